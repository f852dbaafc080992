"""Functions that most training steps call, written for a stack: half the operations of what vmap makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_fedbayes.engines.vectorized.vmap import beneath, enter, stack_of
from lightning_fedbayes.layers.autograd import GaussianKL
from lightning_fedbayes.layers.functional import joined_kl_sum, softplus_std


class StackedFunctions(TorchFunctionMode):
    """Inside, the functions of :data:`STACKED` take their own way where they can; all others go through vmap.

    Args:
        level: of the clients, see :func:`~lightning_fedbayes.engines.vectorized.vmap.clients`.
    """

    def __init__(self, level: int) -> None:
        self.level = level
        self.stds: dict[int, tuple[Tensor, Tensor]] = {}  # of this step: id(ρ) → ρ, σ

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
    if x is None or w is None or (bias is not None and b is None) or x.dim() < 2:
        return None
    rows = x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1)
    transposed = w.transpose(1, 2)
    output = torch.bmm(rows, transposed) if b is None else torch.baddbmm(b.unsqueeze(1), rows, transposed)
    return enter(output.view(*x.shape[:-1], w.shape[1]), level)


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
    """The mean ``F.cross_entropy`` of logits (batch, classes) and classes (batch,); None for anything else."""
    level = mode.level
    plain = weight is None and size_average is None and reduce is None and reduction == "mean" and not label_smoothing
    x, y = stack_of(input, level), stack_of(target, level)
    if not plain or x is None or y is None or x.dim() != 3 or y.dim() != 2 or y.is_floating_point():
        return None
    losses = F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none", ignore_index=ignore_index)
    return enter(losses.view(y.shape).sum(1) / (y != ignore_index).sum(1), level)


def std(mode: StackedFunctions, rho: Tensor) -> Tensor:
    """:func:`~lightning_fedbayes.layers.functional.softplus_std`, once in a step: for the noise and for the KL."""
    if id(rho) not in mode.stds:
        mode.stds[id(rho)] = rho, softplus_std(rho)
    return mode.stds[id(rho)][1]


def kl_sum(
    mode: StackedFunctions, means: Sequence[Tensor], rhos: Sequence[Tensor], prior_mean: float, prior_std: float
) -> Tensor | None:
    """:func:`~lightning_fedbayes.layers.functional.joined_kl_sum` of every client; None if they share a parameter."""
    mus, sigmas = ([stack_of(each, mode.level) for each in part] for part in (means, [std(mode, rho) for rho in rhos]))
    if any(each is None for each in (*mus, *sigmas)):
        return None
    with beneath():
        mean, sigma = (torch.cat([each.flatten(1) for each in part if each is not None], 1) for part in (mus, sigmas))
        divergence = GaussianKL.apply(mean, sigma, prior_mean, prior_std)
    return enter(cast("Tensor", divergence), mode.level)


STACKED: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: linear,
    F.cross_entropy: cross_entropy,
    softplus_std: std,
    joined_kl_sum: kl_sum,
}
"""Function → its stacked form, which returns None where it does not apply."""
