"""Functions that most training steps call, written for a stack: half the operations of what vmap makes of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fedbayes.engines.vectorized.losses import mean_cross_entropy, mean_squared_error
from lightning_fedbayes.engines.vectorized.small_sites import Sites, SmallSites
from lightning_fedbayes.engines.vectorized.vmap import beneath, enter, stack_of
from lightning_fedbayes.layers.autograd import PlainGaussianKL
from lightning_fedbayes.layers.base import draw, sum_kl
from lightning_fedbayes.layers.functional import joined_kl_sum, softplus_std
from lightning_fedbayes.layers.kl import kl_divergence


class StackedFunctions(TorchFunctionMode):
    """Inside, the functions of :data:`STACKED` take their own way where they can; all others go through vmap.

    Args:
        level: of the clients, see :func:`~lightning_fedbayes.engines.vectorized.vmap.clients`.
        sites: the Gaussian sites of the module.
        small: those of them that are drawn together in this step.
    """

    def __init__(self, level: int, sites: Sites, small: SmallSites) -> None:
        self.level = level
        self.sites = sites
        self.small = small
        self.stds: dict[Hashable, tuple[Tensor, Tensor]] = {}  # of this step: which ρ → ρ, σ

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``func``, or its stacked form."""
        kwargs = kwargs or {}
        stacked = STACKED.get(func)
        result = stacked(self, *args, **kwargs) if stacked is not None else None
        return func(*args, **kwargs) if result is None else result


def linear(mode: StackedFunctions, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``F.linear`` of inputs, weights and biases that differ between clients; None for anything else.

    The gradient of the weights comes from one batched product, that of the biases from one sum.
    """
    level = mode.level
    x, w = stack_of(input, level), stack_of(weight, level)
    b = None if bias is None else stack_of(bias, level)
    if x is None or w is None or (bias is not None and b is None) or x.dim() < 2 or w.dim() != 3:
        return None
    rows = x if x.dim() == 3 else x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)
    transposed = w.transpose(1, 2)
    output = torch.bmm(rows, transposed) if b is None else torch.baddbmm(b.unsqueeze(1), rows, transposed)
    return enter(output if rows is x else output.view(*x.shape[:-1], w.shape[1]), level)


def embedding(
    mode: StackedFunctions,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """``F.embedding`` with a padding row, of which vmap itself forgets that it gets no gradient; None without one."""
    indices, table = stack_of(input, mode.level), stack_of(weight, mode.level)
    if padding_idx is None or max_norm is not None or scale_grad_by_freq or sparse or indices is None or table is None:
        return None
    count, rows, width = table.shape
    offsets = rows * torch.arange(count, device=indices.device).view(-1, *[1] * (indices.dim() - 1))
    found = F.embedding(indices + offsets, table.reshape(count * rows, width))
    padded = (indices == padding_idx % rows).unsqueeze(-1)
    return enter(torch.where(padded, found.detach(), found), mode.level)


def cross_entropy(
    mode: StackedFunctions,
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
    with beneath():
        loss = mean_cross_entropy(x, y, ignore_index)
    return enter(loss, mode.level)


def mse_loss(
    mode: StackedFunctions,
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
    with beneath():
        loss = mean_squared_error(x, y)
    return enter(loss, mode.level)


def std(mode: StackedFunctions, rho: Tensor) -> Tensor | None:
    """:func:`~lightning_fedbayes.layers.functional.softplus_std` of every client; None if they share it."""
    sigma = std_stack(mode, rho)
    return None if sigma is None else enter(sigma, mode.level)


def std_stack(mode: StackedFunctions, rho: Tensor) -> Tensor | None:
    """The stack of σ, computed once in a step: for the noise and for the KL."""
    stack = stack_of(rho, mode.level)
    if stack is None:
        return None
    key = id(rho), stack._version, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    if key not in mode.stds:
        with beneath():
            mode.stds[key] = rho, softplus_std(stack)
    return mode.stds[key][1]


def sample(mode: StackedFunctions, means: Sequence[Tensor], rhos: Sequence[Tensor]) -> list[Tensor] | None:
    """:func:`~lightning_fedbayes.layers.base.draw` of every client; None if they share a parameter."""
    mus = [stack_of(mean, mode.level) for mean in means]
    if any(mu is None for mu in mus):
        return None
    with beneath():
        draws = [mode.small.draw(mean, rho) for mean, rho in zip(means, rhos)]
    for place, (mu, rho) in enumerate(zip(mus, rhos)):
        if mu is None or draws[place] is not None:
            continue
        sigma = std_stack(mode, rho)
        if sigma is None:
            return None
        with beneath():
            draws[place] = torch.addcmul(mu, sigma, torch.randn_like(mu))
    return [enter(drawn, mode.level) for drawn in draws if drawn is not None]


def divergence(mode: StackedFunctions, module: nn.Module) -> Tensor | None:
    """:func:`~lightning_fedbayes.layers.kl_divergence` of every client; None for a network without Gaussian sites."""
    part = mode.sites.of(module)
    if not part.sites:
        return None
    joint = None
    if part.others is not None and stack_of(mode.sites.small[0].mean, mode.level) is not None:
        joint = mode.small.divergence()
    with mode:
        if joint is None:
            return sum_kl(part.sites)
        joint = enter(joint, mode.level)
        return joint + sum_kl(part.others) if part.others else joint


def kl_sum(
    mode: StackedFunctions, means: Sequence[Tensor], rhos: Sequence[Tensor], prior_mean: float, prior_std: float
) -> Tensor | None:
    """:func:`~lightning_fedbayes.layers.functional.joined_kl_sum` of every client; None if they share a parameter."""
    mus = [stack_of(mean, mode.level) for mean in means]
    sigmas = [std_stack(mode, rho) for rho in rhos]
    if any(each is None for each in (*mus, *sigmas)):
        return None
    with beneath():
        mean, sigma = (
            torch.cat([each.reshape(len(each), -1) for each in part if each is not None], 1) for part in (mus, sigmas)
        )
        half = mean.dtype in (torch.float16, torch.bfloat16)
        mean, sigma = (mean.float(), sigma.float()) if half else (mean, sigma)
        joint = PlainGaussianKL.apply(mean, sigma, prior_mean, prior_std)
    return enter(joint, mode.level)


STACKED: dict[Any, Callable[..., Tensor | list[Tensor] | None]] = {
    F.linear: linear,
    F.embedding: embedding,
    F.cross_entropy: cross_entropy,
    F.mse_loss: mse_loss,
    softplus_std: std,
    draw: sample,
    joined_kl_sum: kl_sum,
    kl_divergence: divergence,
}
"""Function → its stacked form, which returns None where it does not apply."""
