"""Operations that most training steps use, written for a stack: they take half the calls that vmap makes of them.

Linear and recurrent layers, the cross-entropy, draws of Gaussian parameters and their KL divergence, and what vmap
refuses although it has a meaning for a stack.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fedbayes.clients.vectorized import recurrent
from lightning_fedbayes.clients.vectorized.gaussians import GaussianParameters, JointDraws
from lightning_fedbayes.clients.vectorized.schedule import Disagreement
from lightning_fedbayes.core import private_torch
from lightning_fedbayes.layers.base import draw, sum_kl
from lightning_fedbayes.layers.functional import Op, RowTally, softplus_std, with_tallies
from lightning_fedbayes.layers.kl import gaussian_kl_sum, joined_kl_sum, side_by_side
from lightning_fedbayes.layers.posterior_view import kl_divergence

FULL = (torch.float32, torch.float64)
"""Types of numbers for which the cross-entropy and recurrent layers are written out here."""


class StackedOperations(TorchFunctionMode):
    """Inside, functions are replaced by operations on stacks where they can be. All others go through vmap.

    Without ``branches`` every branch on a value that differs between clients is refused, even where they agree on it.
    ``branched`` says that one was taken. ``replacements`` return None where they do not apply.
    """

    replacements: Mapping[Any, Callable[..., Tensor | Sequence[Tensor] | bool | None]]

    def __init__(self, level: int, gaussians: GaussianParameters, joint: JointDraws, branches: bool = True) -> None:
        self.branches, self.branched = branches, False
        self.level, self.gaussians, self.joint = level, gaussians, joint
        self.stds: dict[Hashable, tuple[Tensor, Tensor]] = {}  # of this step: identity and version of ρ → ρ, σ

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replacement = self.replacements.get(func)
        result = replacement(self, *args, **kwargs) if replacement is not None else None
        return func(*args, **kwargs) if result is None else result


def linear(mode: StackedOperations, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``F.linear`` of inputs, weights and biases that differ between clients, or None for anything else."""
    level = mode.level
    x, w = private_torch.stack_of(input, level), private_torch.stack_of(weight, level)
    b = None if bias is None else private_torch.stack_of(bias, level)
    if x is None or w is None or (bias is not None and b is None) or x.dim() < 2 or w.dim() != 3:
        return None
    rows = x if x.dim() == 3 else x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)
    output = recurrent.linear_rows(rows, w, b)
    return private_torch.to_client_view(output if rows is x else output.view(*x.shape[:-1], w.shape[1]), level)


def recurrence(cell: recurrent.Cell) -> Callable[..., tuple[Tensor, ...] | None]:
    """Return the replacement of a GRU or RNN. It is None for a PackedSequence, dropout, half precision and on a GPU."""

    def replacement(
        mode: StackedOperations,
        input: Tensor,
        hx: Tensor,
        params: Any,
        has_biases: Any,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> tuple[Tensor, ...] | None:
        if not isinstance(has_biases, bool):  # a PackedSequence: has_biases is params
            return None
        directions, tensors = 1 + bidirectional, [input, hx, *params]
        found = (private_torch.stack_of(each, mode.level) for each in params)
        stack = next((each for each in found if each is not None), None)
        if (
            stack is None
            or not input.is_cpu  # where torch takes all times in one operation
            or (dropout and train and num_layers > 1)
            or torch.is_autocast_enabled(input.device.type)
            or any(each.dtype not in FULL for each in tensors)
        ):
            return None
        x, start, *weights = [private_torch.to_stack(each, mode.level, len(stack)) for each in tensors]
        with private_torch.outside_vmap():
            x = x.transpose(1, 2) if batch_first else x
            groups = recurrent.weights_of(cell, weights, has_biases)
            output, last = recurrent.run_layers(cell, x, start, groups, directions)
            output = output.transpose(1, 2) if batch_first else output
        return tuple(private_torch.to_client_view(each, mode.level) for each in (output, last))

    return replacement


def data(mode: StackedOperations, tensor: Tensor) -> Tensor | None:
    """``tensor.data`` of a tensor that differs between clients, which vmap refuses. None for a shared one."""
    return tensor.detach() if private_torch.version_if_any(tensor) is None else None


def truth(mode: StackedOperations, tensor: Tensor) -> bool | None:
    """``bool(tensor)`` of all clients. None for a tensor that they share. Raise Disagreement if they differ."""
    stack = private_torch.outside_of_vmap(tensor)
    if stack is tensor or tensor.numel() != 1 or not mode.branches:
        return None
    truths = [bool(each) for each in stack.flatten().tolist()]
    if len(set(truths)) > 1:
        raise Disagreement(truths)
    mode.branched = True
    return truths[0]


def embedding(
    mode: StackedOperations,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """``F.embedding`` with a padding row, to which vmap itself would give a gradient, or None without one."""
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
    """The mean ``F.cross_entropy`` of logits (batch, classes) and labels (batch,), or None for anything else."""
    plain = weight is None and size_average is None and reduce is None and reduction == "mean" and not label_smoothing
    x, y = private_torch.stack_of(input, mode.level), private_torch.stack_of(target, mode.level)
    if not plain or x is None or y is None or x.dim() != 3 or y.dim() != 2 or y.is_floating_point():
        return None
    if x.dtype not in FULL:
        return None
    with private_torch.outside_vmap():
        losses = F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=ignore_index, reduction="none")
        loss = losses.view(y.shape).sum(1) / (y != ignore_index).sum(1)
    return private_torch.to_client_view(loss, mode.level)


def std(mode: StackedOperations, rho: Tensor) -> Tensor | None:
    """:func:`~lightning_fedbayes.layers.functional.softplus_std` of every client, or None if they share ρ."""
    sigma = std_stack(mode, rho)
    return None if sigma is None else private_torch.to_client_view(sigma, mode.level)


def std_stack(mode: StackedOperations, rho: Tensor) -> Tensor | None:
    """Return the stack of σ, computed once in a step for noise and KL, or None if the clients share ρ."""
    stack = private_torch.stack_of(rho, mode.level)
    if stack is None:
        return None
    key = id(rho), private_torch.version_of(stack), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    if key not in mode.stds:
        with private_torch.outside_vmap():
            mode.stds[key] = rho, softplus_std(stack)
    return mode.stds[key][1]


def sample(mode: StackedOperations, means: Sequence[Tensor], rhos: Sequence[Tensor]) -> list[Tensor] | None:
    """:func:`~lightning_fedbayes.layers.base.draw` of every client, or None if they share a parameter."""
    mus = [private_torch.stack_of(mean, mode.level) for mean in means]
    if any(mu is None for mu in mus):
        return None
    with private_torch.outside_vmap():
        draws = [mode.joint.draw(mean, rho) for mean, rho in zip(means, rhos)]
    for i, (mu, rho) in enumerate(zip(mus, rhos)):
        if mu is None or draws[i] is not None:
            continue
        sigma = std_stack(mode, rho)
        if sigma is None:
            return None
        with private_torch.outside_vmap():
            draws[i] = torch.addcmul(mu, sigma, torch.randn_like(mu))
    return [private_torch.to_client_view(drawn, mode.level) for drawn in draws if drawn is not None]


def tallies(
    mode: StackedOperations, output: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, op: Op, dims: int
) -> Tensor | None:
    """:func:`~lightning_fedbayes.layers.functional.with_tallies` of every client's rows. None for anything else."""
    stacks = [None if each is None else private_torch.stack_of(each, mode.level) for each in (output, x, weight, bias)]
    out, rows = stacks[:2]
    if out is None or rows is None or dims or not out.dim() == rows.dim() == 3:
        return None
    with private_torch.outside_vmap():
        result: Any = RowTally.apply(*stacks)
    return private_torch.to_client_view(result, mode.level)


def divergence(mode: StackedOperations, module: nn.Module) -> Tensor | None:
    """:func:`~lightning_fedbayes.layers.kl_divergence` of every client, or None without Gaussian parameters."""
    every, others = mode.gaussians.of(module)
    if not every:
        return None
    joint = None
    if others is not None and private_torch.stack_of(mode.gaussians.small[0].mean, mode.level) is not None:
        joint = mode.joint.divergence()
        joint = own_divergence(mode) if joint is None else joint
    with mode:
        if joint is None:
            return sum_kl(every)
        joint = private_torch.to_client_view(joint, mode.level)
        return joint + sum_kl(others) if others else joint


def own_divergence(mode: StackedOperations) -> Tensor | None:
    """Return the divergence of every client's small parameters from its prior, (clients,), or None without one."""
    prior = mode.joint.local()
    mus = [private_torch.stack_of(each.mean, mode.level) for each in mode.gaussians.small]
    if prior is None or any(each is None for each in mus):
        return None
    with private_torch.outside_vmap():
        mean = torch.cat([side_by_side(each) for each in mus if each is not None], 1)
        return prior.tallied(prior.values(mean), mean.shape[1])


def kl_sum(
    mode: StackedOperations, means: Sequence[Tensor], rhos: Sequence[Tensor], prior_mean: float, prior_std: float
) -> Tensor | None:
    """:func:`~lightning_fedbayes.layers.functional.joined_kl_sum` of every client. None if they share a parameter."""
    mus, sigmas = [private_torch.stack_of(mean, mode.level) for mean in means], [std_stack(mode, rho) for rho in rhos]
    if any(each is None for each in (*mus, *sigmas)):
        return None
    with private_torch.outside_vmap():
        parts = ([each.reshape(len(each), -1) for each in part if each is not None] for part in (mus, sigmas))
        mean, sigma = (torch.cat(part, 1) for part in parts)
        joint = gaussian_kl_sum(mean, sigma, prior_mean, prior_std, 1)
    return private_torch.to_client_view(joint, mode.level)


StackedOperations.replacements = {
    F.embedding: embedding,
    Tensor.__bool__: truth,
    Tensor.data.__get__: data,  # pyright: ignore[reportAttributeAccessIssue]
    F.linear: linear,
    F.cross_entropy: cross_entropy,
    torch.gru: recurrence(recurrent.gru_step),
    torch.rnn_tanh: recurrence(recurrent.tanh_step),
    torch.rnn_relu: recurrence(recurrent.relu_step),
    softplus_std: std,
    draw: sample,
    joined_kl_sum: kl_sum,
    kl_divergence: divergence,
    with_tallies: tallies,
}
