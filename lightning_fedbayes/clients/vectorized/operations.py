"""Operations that most training steps use, written for a stack: half the calls that vmap makes of them.

Linear and recurrent layers, the two usual losses, draws of Gaussian parameters and their KL divergence; and what vmap
refuses although it has a meaning for a stack.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fedbayes.clients.cavities import RoundCavities, take_gradient
from lightning_fedbayes.clients.model import Tensors
from lightning_fedbayes.clients.vectorized import recurrent
from lightning_fedbayes.clients.vectorized.schedule import Slots, take_rows
from lightning_fedbayes.core.private_torch import (
    outside_vmap,
    stack_of,
    to_client_view,
    to_stack,
    version_if_any,
    version_of,
)
from lightning_fedbayes.layers.base import BayesianLayer, GaussianParameter, draw, sum_kl
from lightning_fedbayes.layers.functional import Op, softplus_std
from lightning_fedbayes.layers.kl import SMALL, JointDraw, JointKL, PlainGaussianKL, joined_kl_sum
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.layers.priors import CavityPrior, NormalPrior, Prior
from lightning_fedbayes.layers.squares import RowTally, with_tallies
from lightning_fedbayes.layers.whole_network import kl_divergence


class ClientOperations(TorchFunctionMode):
    """Inside, the functions in :attr:`replacements` are replaced; here by operations on what one client sees.

    Attributes:
        replacements: function → its replacement, which returns None where it does not apply.
    """

    replacements: Mapping[Any, Callable[..., Tensor | Sequence[Tensor] | None]]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``, or its replacement."""
        kwargs = kwargs or {}
        replacement = self.replacements.get(func)
        result = replacement(self, *args, **kwargs) if replacement is not None else None
        return func(*args, **kwargs) if result is None else result


class StackedOperations(ClientOperations):
    """Replaces functions by operations on stacks where they can be; all others go through vmap.

    Args:
        level: of the clients, see :class:`~lightning_fedbayes.core.private_torch.vmap_level`.
        gaussians: the Gaussian parameters of the module.
        joint: joint draws of the small ones in this step.

    Attributes:
        fused_times: steps in time that this training step has written out, of recurrences that torch takes in one
            operation when it has one client: LSTMs, and all on a GPU.
    """

    def __init__(self, level: int, gaussians: GaussianParameters, joint: JointDraws) -> None:
        self.level = level
        self.gaussians = gaussians
        self.joint = joint
        self.fused_times = 0
        self.stds: dict[Hashable, tuple[Tensor, Tensor]] = {}  # of this step: identity and version of ρ → ρ, σ


def linear(mode: StackedOperations, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``F.linear`` of inputs, weights and biases that differ between clients; None for anything else.

    The gradient of the weights comes from one batched product, that of the biases from one sum.
    """
    level = mode.level
    x, w = stack_of(input, level), stack_of(weight, level)
    b = None if bias is None else stack_of(bias, level)
    if x is None or w is None or (bias is not None and b is None) or x.dim() < 2 or w.dim() != 3:
        return None
    rows = x if x.dim() == 3 else x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)
    output = recurrent.linear_rows(rows, w, b)
    return to_client_view(output if rows is x else output.view(*x.shape[:-1], w.shape[1]), level)


def recurrence(cell: recurrent.Cell) -> Callable[..., tuple[Tensor, ...] | None]:
    """Return the replacement of a recurrent layer, ``torch.gru`` or the like, for every client.

    It returns None for a PackedSequence, dropout between layers, projections and half precision.
    """

    def replacement(
        mode: StackedOperations, input: Tensor, hx: Tensor | Sequence[Tensor], params: Any, has_biases: Any,
        num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool = False,
    ) -> tuple[Tensor, ...] | None:
        if not isinstance(has_biases, bool):  # a PackedSequence: has_biases is params
            return None
        directions, states = 1 + bidirectional, [hx] if isinstance(hx, Tensor) else list(hx)
        tensors = [input, *states, *params]
        stack = next((stack for each in params if (stack := stack_of(each, mode.level)) is not None), None)
        if (
            stack is None
            or len(params) != num_layers * directions * (4 if has_biases else 2)
            or (dropout and train and num_layers > 1)
            or torch.is_autocast_enabled(input.device.type)
            or any(each.dtype not in (torch.float32, torch.float64) for each in tensors)
        ):
            return None
        x, *stacks = [to_stack(each, mode.level, len(stack)) for each in tensors]
        starts, weights = tuple(stacks[: len(states)]), stacks[len(states) :]
        with outside_vmap():
            x = x.transpose(1, 2) if batch_first else x
            if cell is recurrent.lstm_cell or not x.is_cpu:
                mode.fused_times += x.shape[1] * num_layers * directions
            groups = recurrent.weights_of(cell, weights, has_biases)
            output, lasts = recurrent.run_layers(cell, x, starts, groups, directions)
            output = output.transpose(1, 2) if batch_first else output
        return tuple(to_client_view(each, mode.level) for each in (output, *lasts))

    return replacement


def lstm_cell(
    mode: ClientOperations,
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``torch.lstm_cell``, which vmap does not take."""
    h, c = hx
    with mode:
        i, f, g, o = (F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def data(mode: ClientOperations, tensor: Tensor) -> Tensor | None:
    """``tensor.data`` of a client's own tensor, which vmap refuses; None for one that the clients share."""
    return tensor.detach() if version_if_any(tensor) is None else None


def embedding(
    mode: ClientOperations,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """``F.embedding`` with a padding row, to which vmap itself would give a gradient; None without one."""
    if padding_idx is None or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    found = F.embedding(input, weight)
    return torch.where((input == padding_idx % len(weight)).unsqueeze(-1), found.detach(), found)


def cross_entropy(
    mode: StackedOperations,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The mean ``F.cross_entropy`` of logits (batch, classes) and labels (batch,); None for anything else."""
    plain = weight is None and size_average is None and reduce is None and reduction == "mean" and not label_smoothing
    x, y = stack_of(input, mode.level), stack_of(target, mode.level)
    if not plain or x is None or y is None or x.dim() != 3 or y.dim() != 2 or y.is_floating_point():
        return None
    if x.dtype not in (torch.float32, torch.float64):
        return None
    with outside_vmap():
        loss = mean_cross_entropy(x, y, ignore_index)
    return to_client_view(loss, mode.level)


def mse_loss(
    mode: StackedOperations,
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor | None:
    """The mean ``F.mse_loss`` of outputs and targets of one shape and floating-point dtype; None for anything else."""
    plain = weight is None and size_average is None and reduce is None and reduction == "mean"
    x, y = stack_of(input, mode.level), stack_of(target, mode.level)
    if not plain or x is None or y is None or x.shape != y.shape or x.dtype != y.dtype:
        return None
    if x.dtype not in (torch.float32, torch.float64):
        return None
    with outside_vmap():
        loss = mean_squared_error(x, y)
    return to_client_view(loss, mode.level)


def std(mode: StackedOperations, rho: Tensor) -> Tensor | None:
    """:func:`~lightning_fedbayes.layers.functional.softplus_std` of every client; None if they share ρ."""
    sigma = std_stack(mode, rho)
    return None if sigma is None else to_client_view(sigma, mode.level)


def std_stack(mode: StackedOperations, rho: Tensor) -> Tensor | None:
    """Return the stack of σ, computed once in a step: for the noise and for the KL; None if the clients share ρ."""
    stack = stack_of(rho, mode.level)
    if stack is None:
        return None
    key = id(rho), version_of(stack), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    if key not in mode.stds:
        with outside_vmap():
            mode.stds[key] = rho, softplus_std(stack)
    return mode.stds[key][1]


def sample(mode: StackedOperations, means: Sequence[Tensor], rhos: Sequence[Tensor]) -> list[Tensor] | None:
    """:func:`~lightning_fedbayes.layers.base.draw` of every client; None if they share a parameter."""
    mus = [stack_of(mean, mode.level) for mean in means]
    if any(mu is None for mu in mus):
        return None
    with outside_vmap():
        draws = [mode.joint.draw(mean, rho) for mean, rho in zip(means, rhos)]
    for i, (mu, rho) in enumerate(zip(mus, rhos)):
        if mu is None or draws[i] is not None:
            continue
        sigma = std_stack(mode, rho)
        if sigma is None:
            return None
        with outside_vmap():
            draws[i] = torch.addcmul(mu, sigma, torch.randn_like(mu))
    return [to_client_view(drawn, mode.level) for drawn in draws if drawn is not None]


def tallies(
    mode: StackedOperations, output: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, op: Op, dims: int
) -> Tensor | None:
    """:func:`~lightning_fedbayes.layers.squares.with_tallies` of every client's rows; None for anything else."""
    stacks = [None if each is None else stack_of(each, mode.level) for each in (output, x, weight, bias)]
    out, rows = stacks[:2]
    if out is None or rows is None or dims or not out.dim() == rows.dim() == 3:
        return None
    with outside_vmap():
        result: Any = RowTally.apply(*stacks)
    return to_client_view(result, mode.level)


def divergence(mode: StackedOperations, module: nn.Module) -> Tensor | None:
    """:func:`~lightning_fedbayes.layers.kl_divergence` of every client; None without Gaussian parameters."""
    part = mode.gaussians.of(module)
    if not part.every:
        return None
    joint = None
    if part.others is not None and stack_of(mode.gaussians.small[0].mean, mode.level) is not None:
        joint = mode.joint.divergence()
        joint = cavity_divergence(mode) if joint is None else joint
    with mode:
        if joint is None:
            return sum_kl(part.every)
        joint = to_client_view(joint, mode.level)
        return joint + sum_kl(part.others) if part.others else joint


def cavity_divergence(mode: StackedOperations) -> Tensor | None:
    """Return the divergence of every client's small parameters from its cavity, shape (clients,); None without one."""
    prior = mode.joint.cavity()
    mus = [stack_of(each.mean, mode.level) for each in mode.gaussians.small]
    sigmas = [std_stack(mode, each.rho) for each in mode.gaussians.small]
    if prior is None or any(each is None for each in (*mus, *sigmas)):
        return None
    with outside_vmap():
        mean, sigma = (torch.cat([each.flatten(1) for each in part if each is not None], 1) for part in (mus, sigmas))
        divergences: Any = JointKL.apply(mean, sigma, prior)
        return prior.tallied(divergences, mean.shape[1])


def kl_sum(
    mode: StackedOperations, means: Sequence[Tensor], rhos: Sequence[Tensor], prior_mean: float, prior_std: float
) -> Tensor | None:
    """:func:`~lightning_fedbayes.layers.functional.joined_kl_sum` of every client; None if they share a parameter."""
    mus = [stack_of(mean, mode.level) for mean in means]
    sigmas = [std_stack(mode, rho) for rho in rhos]
    if any(each is None for each in (*mus, *sigmas)):
        return None
    with outside_vmap():
        mean, sigma = (
            torch.cat([each.reshape(len(each), -1) for each in part if each is not None], 1) for part in (mus, sigmas)
        )
        half = mean.dtype in (torch.float16, torch.bfloat16)
        mean, sigma = (mean.float(), sigma.float()) if half else (mean, sigma)
        joint = PlainGaussianKL.apply(mean, sigma, prior_mean, prior_std)
    return to_client_view(joint, mode.level)


class CrossEntropy(torch.autograd.Function):
    r"""The cross-entropy of every example, with its closed-form gradient.

    .. math:: L = \log \sum_c e^{z_c} - z_y, \qquad \frac{\partial L}{\partial z_c} = p_c - [c = y],
              \qquad p = \mathrm{softmax}(z)

    It takes half the time of torch's own for ten classes, whose softmax is not vectorised. The backward pass can be
    differentiated again. Use it outside of transforms of ``torch.func`` only.

    Args:
        logits: z, shape (\*, classes).
        labels: y, shape (\*).

    Returns: L, shape (\*), and p, shape (\*, classes).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses, and the probabilities that their gradient needs."""
        labels = labels.unsqueeze(-1)
        largest = logits.amax(-1, keepdim=True)
        probabilities = (logits - largest).exp_()
        total = probabilities.sum(-1, keepdim=True)
        losses = (total.log().add_(largest)).sub_(logits.gather(-1, labels)).squeeze(-1)
        probabilities.div_(total)
        ctx.save_for_backward(probabilities, labels)
        ctx.set_materialize_grads(False)
        return losses, probabilities

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:  # pyright: ignore
        """Return the gradient of the logits."""
        probabilities, labels = ctx.saved_tensors
        of_losses, of_probabilities = gradients
        total: Tensor | None = None
        if of_losses is not None:
            scale = of_losses.unsqueeze(-1)
            total = (probabilities * scale).scatter_add(-1, labels, -scale)
        if of_probabilities is not None:
            weighted = probabilities * of_probabilities
            own = weighted - probabilities * weighted.sum(-1, keepdim=True)
            total = own if total is None else total + own
        return total, None


def mean_cross_entropy(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Return each client's mean cross-entropy over the examples whose label is not ``ignored``; NaN if there is none.

    Args:
        logits: shape (clients, batch, classes).
        labels: shape (clients, batch).
        ignored: label of examples that do not count.

    Returns: shape (clients,).
    """
    if labels.is_cpu and ignored < 0:  # on a GPU the error would come too late
        try:
            losses, _ = CrossEntropy.apply(logits, labels)  # pyright: ignore[reportGeneralTypeIssues]
        except (IndexError, RuntimeError):
            pass  # a label is not a class, such as the ignored one
        else:
            return losses.mean(1)
    counts = labels != ignored
    losses, _ = CrossEntropy.apply(logits, labels.where(counts, 0))  # pyright: ignore[reportGeneralTypeIssues]
    return losses.where(counts, 0.0).sum(1) / counts.sum(1)


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each client's mean squared error, shape (clients,), of two tensors of shape (clients, \\*)."""
    errors = (outputs - targets).reshape(len(outputs), -1)
    return (errors * errors).mean(1)


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


ClientOperations.replacements = {
    F.embedding: embedding,
    torch.lstm_cell: lstm_cell,
    Tensor.data.__get__: data,  # pyright: ignore[reportAttributeAccessIssue]
}
StackedOperations.replacements = {
    **ClientOperations.replacements,
    F.linear: linear,
    F.cross_entropy: cross_entropy,
    F.mse_loss: mse_loss,
    torch.lstm: recurrence(recurrent.lstm_cell),
    torch.gru: recurrence(recurrent.gru_cell),
    torch.rnn_tanh: recurrence(recurrent.tanh_cell),
    torch.rnn_relu: recurrence(recurrent.relu_cell),
    softplus_std: std,
    draw: sample,
    joined_kl_sum: kl_sum,
    kl_divergence: divergence,
    with_tallies: tallies,
}
