"""Gaussian parameters in a stack of clients: joint draws of the small ones, and the clients' priors."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_fedbayes.clients.model import Tensors
from lightning_fedbayes.clients.problems import LocalPriors
from lightning_fedbayes.clients.vectorized.schedule import Slots, take_rows
from lightning_fedbayes.core.private_torch import version_of
from lightning_fedbayes.layers.base import BayesianLayer, GaussianParameter
from lightning_fedbayes.layers.kl import SMALL, JointDraw, side_by_side
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.layers.priors import LocalPrior, NormalPrior, Prior
from lightning_fedbayes.methods.method import Quadratic


class GaussianParameters:
    """The Gaussian parameters of a module, looked up once: it must not be rebuilt while this is in use.

    Attributes:
        small: those that are drawn jointly: in our layers, with few entries, and of one dtype and device.
        names: for each of these, the names of mean and ρ among the module's parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        found = gaussian_parameters(module).values()
        self.small = _alike([each for each in found if id(each.mean) in names and id(each.rho) in names])
        self.names = [(names[id(each.mean)], names[id(each.rho)]) for each in self.small]
        self._modules = {id(part): part for part in module.modules()}
        self._found: dict[int, tuple[list[GaussianParameter], list[GaussianParameter] | None]] = {}

    def of(self, module: nn.Module) -> tuple[list[GaussianParameter], list[GaussianParameter] | None]:
        """Return all Gaussian parameters of a module or part, and those not drawn jointly, None if some lie outside."""
        if id(module) in self._found:
            return self._found[id(module)]
        every = list(gaussian_parameters(module).values())
        others = [each for each in every if each not in self.small]
        has_small = len(self.small) == len(every) - len(others) > 0
        found = every, others if has_small else None
        if id(module) in self._modules:
            self._found[id(module)] = found
        return found


class JointDraws:
    """Joint draws of the small Gaussian parameters in one step, made when the first of them is asked for.

    A parameter that is asked for again in the same step needs new noise, and is not drawn here. ``views`` are the
    parameters as one client sees them, and ``local`` priors of the clients, if they have such.
    """

    def __init__(
        self,
        gaussians: GaussianParameters,
        parameters: Tensors,
        views: Mapping[str, Tensor],
        local: "StackedPriors | None" = None,
    ) -> None:
        self._small, self._local = gaussians.small, local
        self._index: dict[tuple[int, int], int] = {}
        self._stacks: list[Tensor] = []
        names = gaussians.names
        if len(names) > 1 and all(mean in parameters and rho in parameters for mean, rho in names):
            self._index = {(id(views[mean]), id(views[rho])): i for i, (mean, rho) in enumerate(names)}
            self._stacks = [parameters[mean] for mean, _ in names] + [parameters[rho] for _, rho in names]
        self._asked: set[int] = set()
        self._joint: tuple[Tensor, ...] = ()

    def draw(self, mean: Tensor, rho: Tensor) -> Tensor | None:
        r"""Return a draw of every client, shape (clients, \*), or None if not drawn jointly or drawn before."""
        index = self._index.get((id(mean), id(rho)))
        if index is None or index in self._asked or not torch.is_grad_enabled():
            return None
        if not self._joint:
            # independent of earlier steps: a resumed run must round as one that was not interrupted
            self._prior = self._joint_prior()
            self._versions = [version_of(stack) for stack in self._stacks]
            self._joint = JointDraw.apply(self._prior, *self._stacks)  # pyright: ignore[reportAssignmentType]
            self._entries = self._joint[len(self._small)].shape[1]
        elif self._changed():
            return None
        self._asked.add(index)
        return self._joint[index]

    def divergence(self) -> Tensor | None:
        """Return KL(q‖p) of all small parameters, shape (clients,), or None unless it was computed with the draws."""
        if not self._joint or self._prior is None or not torch.is_grad_enabled() or self._changed():
            return None
        live = [(s.owner._parameters.get(s.mean_name), s.layer._parameters.get(s.rho_name)) for s in self._small]
        same = self._joint_prior() == self._prior and all((id(mean), id(rho)) in self._index for mean, rho in live)
        if not same or isinstance(self._prior, tuple):
            return self._joint[-1] if same else None
        return self._prior.tallied(self._joint[-1], self._entries)

    def local(self) -> LocalPrior | None:
        """Return the clients' joint prior of the small parameters, or None if they have others."""
        return None if self._local is None else self._local.joint(self._small)

    def _joint_prior(self) -> tuple[float, float] | LocalPrior | None:
        """Return the prior that the small parameters have in common, or None if it has no closed form here."""
        if self._local is not None:
            return self._local.joint(self._small)
        first, *others = [each.prior for each in self._small]
        if not isinstance(first, NormalPrior) or isinstance(first.mean, Tensor) or isinstance(first.std, Tensor):
            return None
        own = first.mean, first.std
        alike = all(
            each is first or (isinstance(each, NormalPrior) and each.is_scalar and (each.mean, each.std) == own)
            for each in others
        )
        return own if alike else None

    def _changed(self) -> bool:
        return [version_of(stack) for stack in self._stacks] != self._versions


class StackedPriors:
    """The priors of the clients in a stack, ``stacks``, as priors of the module's parameters."""

    def __init__(self, local: LocalPriors, own: Sequence[Quadratic], gaussians: GaussianParameters) -> None:
        self.local = local
        priors = local.priors(own, stacked=True)
        self.stacks = {name: priors[name] for name in local.layers}
        self._joint: LocalPrior | None = None
        self._tally: Tensor | None = None
        self._installed: dict[tuple[int, str], Prior] = {}
        self._chosen: dict[tuple[int, ...], StackedPriors] = {}
        names = {id(each.mean): name for name, each in local.layers.items()}
        if gaussians.small and all(id(each.mean) in names for each in gaussians.small):
            parts = [self.stacks[names[id(each.mean)]] for each in gaussians.small]
            fields = zip(*((part.mean.unsqueeze(0), part.curvature, part.slope) for part in parts))
            mean, curvature, slope = (torch.cat([side_by_side(each) for each in field], 1) for field in fields)
            self._joint = replace(parts[0], mean=mean, curvature=curvature, slope=slope)

    def rows(self, slots: Slots) -> "StackedPriors":
        """Return the priors of the clients in ``slots``, with tallies."""
        key = tuple(slots)
        if key not in self._chosen:
            chosen = copy.copy(self)
            first = next(iter(self.stacks.values())).curvature
            chosen._tally = first.new_zeros((len(slots), 2), requires_grad=True)
            chosen._joint = None if self._joint is None else _rows_of(self._joint, slots, chosen._tally)
            chosen.stacks = {
                name: replace(
                    _rows_of(stack, slots, chosen._tally),
                    squares=stack.curvature.new_zeros((len(slots), *stack.curvature.shape[1:]), requires_grad=True),
                )
                for name, stack in self.stacks.items()
            }
            self._chosen[key] = chosen
        return self._chosen[key]

    def squares(self, name: str) -> Tensor | None:
        """Return a parameter's sums of squared gradients of single examples, (clients, *), or None if unknown."""
        return _taken(self.stacks[name].squares)

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """Return the factors of the clients' divergences in their losses, and what these gain, (clients,) each.

        None without a backward pass.
        """
        found = _taken(self._tally)
        return None if found is None else (found[:, 0] / self.local.num_entries, found[:, 1])

    @contextmanager
    def installed(self, view: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Inside, every parameter has its client's prior, as one client sees it by ``view``."""
        layers = self.local.layers
        for name, each in layers.items():
            prior = SeenPrior(self.stacks[name], view)
            each.replace_prior(prior)
            self._installed[id(each.layer), each.path] = prior
        try:
            yield
        finally:
            for each in layers.values():
                each.replace_prior(None)

    def joint(self, small: Sequence[GaussianParameter]) -> LocalPrior | None:
        """Return the joint prior of the ``small`` parameters, or None if one has another."""
        mine = all(each.prior is self._installed.get((id(each.layer), each.path)) for each in small)
        return self._joint if mine else None


class SeenPrior:
    """The prior of one client under vmap, made by ``view`` of a stack of priors when it is asked for."""

    def __init__(self, stack: LocalPrior, view: Callable[[Tensor], Tensor]) -> None:
        self._stack, self._view = stack, view

    @property
    def squares(self) -> Tensor | None:
        """See :class:`~lightning_fedbayes.layers.priors.LocalPrior`."""
        return None if self._stack.squares is None else self._view(self._stack.squares)

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        """See :meth:`~lightning_fedbayes.layers.priors.LocalPrior.kl`."""
        stacks = {name: getattr(self._stack, name) for name in ("curvature", "slope", "tally", "squares")}
        views = {name: self._view(stack) for name, stack in stacks.items() if stack is not None}
        return replace(self._stack, **views).kl(mean, std)


def _taken(tally: Tensor | None) -> Tensor | None:
    """Return the gradient of a tally and clear it, or None if there is none."""
    if tally is None or tally.grad is None:
        return None
    gradient, tally.grad = tally.grad, None
    return gradient


def _rows_of(prior: LocalPrior, slots: Slots, tally: Tensor | None) -> LocalPrior:
    curvature, slope = (take_rows(each, slots) for each in (prior.curvature, prior.slope))
    return replace(prior, curvature=curvature, slope=slope, tally=tally)


def _alike(gaussians: Iterable[GaussianParameter]) -> list[GaussianParameter]:
    """Return the small ones with the dtype and device of the first, in single or double precision."""
    kinds = [
        (each, {(tensor.dtype, tensor.device) for tensor in (each.mean, each.rho)})
        for each in gaussians
        if isinstance(each.layer, BayesianLayer)
        and each.mean.numel() < SMALL
        and each.mean.dtype in (torch.float32, torch.float64)
    ]
    return [each for each, kind in kinds if len(kind) == 1 and kind == kinds[0][1]]
