"""Sums of examples that share a value: what makes curves independent of the order of ties."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_by_value(value: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Number of examples and sums of ``weights`` for each distinct ``value``, ascending, in float64 on the CPU.

    Args:
        value: shape (examples,).
        weights: each of shape (examples,).

    Returns: counts and then one sum per weight, each of shape (distinct values,).
    """
    value = value.detach().cpu()
    distinct, index = torch.unique(value, return_inverse=True)
    return sum_by_index(index, len(distinct), *(weight.detach().cpu().double() for weight in weights))


def sum_by_index(index: Tensor, groups: int, *weights: Tensor) -> tuple[Tensor, ...]:
    """Number of examples and sums of ``weights`` for each group, each of shape (groups,), in the weights' dtype.

    (index_add_ has a deterministic form on every device, bincount with weights has not.)
    """
    ones = torch.ones_like(weights[0])
    return tuple(weight.new_zeros(groups).index_add_(0, index, weight) for weight in (ones, *weights))
