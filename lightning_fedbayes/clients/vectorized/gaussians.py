"""Gaussian parameters in a stack of clients: joint draws of the small ones, and cavities as their priors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_fedbayes.clients.cavities import RoundCavities, take_gradient
from lightning_fedbayes.clients.model import Tensors
from lightning_fedbayes.clients.vectorized.schedule import Slots, take_rows
from lightning_fedbayes.core.private_torch import (
    version_of,
)
from lightning_fedbayes.layers.base import BayesianLayer, GaussianParameter
from lightning_fedbayes.layers.kl import SMALL, JointDraw
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.layers.priors import CavityPrior, NormalPrior, Prior


@dataclass(frozen=True)
class GaussiansOf:
    """The Gaussian parameters of a module or of a part of it.

    Args:
        every: all of them.
        others: those that are not drawn jointly; None unless all that are drawn jointly are among them.
    """

    every: Sequence[GaussianParameter]
    others: Sequence[GaussianParameter] | None


class GaussianParameters:
    """The Gaussian parameters of a module, looked up once: it must not be rebuilt while this is in use.

    Args:
        module: any network.

    Attributes:
        small: those that are drawn jointly: in our own layers, with few entries, and of one dtype and device.
        names: for each of these, the names of mean and ρ among the module's parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        found = gaussian_parameters(module).values()
        self.small = _alike([each for each in found if id(each.mean) in names and id(each.rho) in names])
        self.names = [(names[id(each.mean)], names[id(each.rho)]) for each in self.small]
        self._modules = {id(part): part for part in module.modules()}
        self._found: dict[int, GaussiansOf] = {}

    def of(self, module: nn.Module) -> GaussiansOf:
        """Return the Gaussian parameters of the module or of a part of it."""
        found = self._found.get(id(module))
        if found is None:
            every = list(gaussian_parameters(module).values())
            others = [each for each in every if each not in self.small]
            has_small = len(self.small) == len(every) - len(others) > 0
            found = GaussiansOf(every, others if has_small else None)
            if id(module) in self._modules:
                self._found[id(module)] = found
        return found


class JointDraws:
    """Joint draws of the small Gaussian parameters in one step, made when the first of them is asked for.

    A parameter that is asked for again in the same step is not drawn here a second time, because it needs new noise.

    Args:
        gaussians: Gaussian parameters of the module.
        parameters: name → tensor of shape (clients, \\*).
        views: name → the same tensor as one client sees it.
        cavities: the clients' cavities, if they are the priors.
    """

    def __init__(
        self, gaussians: GaussianParameters, parameters: Tensors, views: Mapping[str, Tensor],
        cavities: StackedCavities | None = None,
    ) -> None:
        self._small = gaussians.small
        self._cavities = cavities
        self._index: dict[tuple[int, int], int] = {}
        self._stacks: list[Tensor] = []
        names = gaussians.names
        if len(names) > 1 and all(mean in parameters and rho in parameters for mean, rho in names):
            self._index = {(id(views[mean]), id(views[rho])): i for i, (mean, rho) in enumerate(names)}
            self._stacks = [parameters[mean] for mean, _ in names] + [parameters[rho] for _, rho in names]
        self._asked: set[int] = set()
        self._joint: tuple[Tensor, ...] = ()

    def draw(self, mean: Tensor, rho: Tensor) -> Tensor | None:
        """Return a draw of every client, shape (clients, \\*); None if it is not drawn jointly or was drawn before.

        Args:
            mean, rho: μ and ρ as one client sees them.
        """
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
        """Return KL(q‖p) of all small parameters, shape (clients,); None unless it was computed with the draws."""
        if not self._joint or self._prior is None or not torch.is_grad_enabled() or self._changed():
            return None
        live = [(id(s.owner._parameters.get(s.mean_name)), id(s.layer._parameters.get(s.rho_name)))
                for s in self._small]
        same = self._joint_prior() == self._prior and all(pair in self._index for pair in live)
        if not same or isinstance(self._prior, tuple):
            return self._joint[-1] if same else None
        return self._prior.tallied(self._joint[-1], self._entries)

    def cavity(self) -> CavityPrior | None:
        """Return the joint cavity of the small parameters; None if they have other priors."""
        return None if self._cavities is None else self._cavities.joint(self._small)

    def _joint_prior(self) -> tuple[float, float] | CavityPrior | None:
        """Return the prior that the small parameters have in common; None if it has no closed form here."""
        return shared_prior(self._small) if self._cavities is None else self.cavity()

    def _changed(self) -> bool:
        """Return whether a parameter has been written into since the draw."""
        return [version_of(stack) for stack in self._stacks] != self._versions


class StackedCavities:
    """The cavities of the clients in a stack, as priors of the module's parameters.

    Args:
        cavities: puts them into the network.
        fields: curvature, slope and step of each client's, shape (clients, P).
    """

    def __init__(self, cavities: RoundCavities, fields: Sequence[Tensor]) -> None:
        self._round = cavities
        priors = cavities.priors(fields)
        self._stacks = {name: priors[name] for name in cavities.parameters}
        self._joint: CavityPrior | None = None
        self._tally: Tensor | None = None
        self._installed: dict[tuple[int, str], Prior] = {}
        self._chosen: dict[tuple[int, ...], StackedCavities] = {}

    def rows(self, slots: Slots) -> StackedCavities:
        """Return the cavities of the clients in ``slots``, with a tally where precisions are measured."""
        key = tuple(slots)
        if key not in self._chosen:
            chosen = copy.copy(self)
            first = next(iter(self._stacks.values())).curvature
            chosen._tally = first.new_zeros(len(slots), requires_grad=True) if self._round.measures else None
            chosen._joint = None if self._joint is None else _rows_of(self._joint, slots, chosen._tally)
            chosen._stacks = {
                name: replace(_rows_of(stack, slots, chosen._tally), squares=self._squares(stack, len(slots)))
                for name, stack in self._stacks.items()
            }
            self._chosen[key] = chosen
        return self._chosen[key]

    def _squares(self, stack: CavityPrior, count: int) -> Tensor | None:
        """Return the tallies of single examples of ``count`` clients; None if they are not asked for."""
        if not self._round.measures or self._round.batch_part == 1:
            return None
        return stack.curvature.new_zeros((count, *stack.curvature.shape[1:]), requires_grad=True)

    def squares(self, name: str) -> Tensor | None:
        """Return the sums of squared gradients of single examples of a parameter, (clients, *); None if unknown."""
        return take_gradient(self._stacks[name].squares)

    def factors(self) -> Tensor | None:
        """Return the factor of each client's divergence in its loss, as the last backward pass has seen it, (clients,).

        None if it has seen none.
        """
        if self._tally is None or self._tally.grad is None:
            return None
        factors, self._tally.grad = self._tally.grad / self._round.num_entries, None
        return factors

    def of_means(self, name: str, means: Tensor) -> Tensor:
        """Return the gradient of each client's divergence by the ``means`` of a parameter, shape (clients, *)."""
        cavity = self._stacks[name]
        return torch.addcmul(cavity.slope, means - cavity.mean, cavity.curvature)

    def join(self, gaussians: GaussianParameters) -> None:
        """Lay the cavities of the small parameters side by side, for joint draws."""
        names = {id(each.mean): name for name, each in self._round.parameters.items()}
        if gaussians.small and all(id(each.mean) in names for each in gaussians.small):
            parts = [self._stacks[names[id(each.mean)]] for each in gaussians.small]
            mean = torch.cat([part.mean.flatten() for part in parts])
            std = torch.cat([part.std.flatten() for part in parts])
            own = [torch.cat([each.flatten(1) for each in field], 1) for field in zip(*map(_own, parts))]
            self._joint = with_own(replace(parts[0], mean=mean, std=std), own)

    @contextmanager
    def installed(self, as_seen: Callable[[CavityPrior], Prior]) -> Iterator[None]:
        """Inside, every parameter has its cavity, ``as_seen`` by one client, as its prior."""
        parameters = self._round.parameters
        for name, each in parameters.items():
            prior = as_seen(self._stacks[name])
            each.replace_prior(prior)
            self._installed[id(each.layer), each.path] = prior
        try:
            yield
        finally:
            for each in parameters.values():
                each.replace_prior(None)

    def stacks(self) -> list[Tensor]:
        """Return what differs between clients, cavity by cavity in the order of :meth:`installed`."""
        return [each for stack in self._stacks.values() for each in seen(stack)]

    def joint(self, small: Sequence[GaussianParameter]) -> CavityPrior | None:
        """Return the joint cavity of the ``small`` parameters; None if one has another prior."""
        mine = all(each.prior is self._installed.get((id(each.layer), each.path)) for each in small)
        return self._joint if mine else None


class SeenCavity:
    """The cavity of one client under vmap, made of a stack of them when it is asked for.

    Args:
        stack: the clients' cavities.
        view: makes of a stack what one client sees.
    """

    def __init__(self, stack: CavityPrior, view: Callable[[Tensor], Tensor]) -> None:
        self._stack, self._view = stack, view

    @property
    def squares(self) -> Tensor | None:
        """See :class:`~lightning_fedbayes.layers.priors.CavityPrior`."""
        return None if self._stack.squares is None else self._view(self._stack.squares)

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        """See :meth:`~lightning_fedbayes.layers.priors.CavityPrior.kl`."""
        return with_own(self._stack, map(self._view, seen(self._stack))).kl(mean, std)


def _rows_of(cavity: CavityPrior, slots: Slots, tally: Tensor | None) -> CavityPrior:
    return replace(with_own(cavity, (take_rows(each, slots) for each in _own(cavity))), tally=tally)


def _own(cavity: CavityPrior) -> list[Tensor]:
    """Return what differs between clients."""
    return [cavity.curvature, cavity.slope, cavity.step]


def seen(cavity: CavityPrior) -> list[Tensor]:
    """Return what differs between clients, with the tallies that there are."""
    return [*_own(cavity), *(each for each in (cavity.tally, cavity.squares) if each is not None)]


def with_own(cavity: CavityPrior, own: Iterable[Tensor]) -> CavityPrior:
    """Return ``cavity`` with other values of what differs between clients: curvature, slope, step, tallies if any."""
    curvature, slope, step, *tallies = own
    tally, squares = [*tallies, None, None][:2]
    return replace(cavity, curvature=curvature, slope=slope, step=step, tally=tally, squares=squares)


def shared_prior(gaussians: Sequence[GaussianParameter]) -> tuple[float, float] | None:
    """Return m and s of the prior N(m, s²) that all ``gaussians`` share; None if they share none."""
    priors = [each.prior for each in gaussians]
    first = priors[0]
    if not isinstance(first, NormalPrior) or isinstance(first.mean, Tensor) or isinstance(first.std, Tensor):
        return None
    for prior in priors:
        if prior is not first and not (
            isinstance(prior, NormalPrior) and prior.is_scalar and (prior.mean, prior.std) == (first.mean, first.std)
        ):
            return None
    return first.mean, first.std


def _alike(gaussians: Iterable[GaussianParameter]) -> list[GaussianParameter]:
    """Return the small ones with the dtype and device of the first, in single or double precision."""
    kinds = [
        (each, {(tensor.dtype, tensor.device) for tensor in (each.mean, each.rho)})
        for each in gaussians
        if isinstance(each.layer, BayesianLayer) and each.mean.numel() < SMALL
        and each.mean.dtype in (torch.float32, torch.float64)
    ]
    return [each for each, kind in kinds if len(kind) == 1 and kind == kinds[0][1]]
