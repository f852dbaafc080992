"""Matrix of all clients' parameters, a row per client, read a block of columns at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_fedbayes.core.posterior import is_zero

ENTRIES = 2**19
"""Number of entries of a block: 4 MiB in double precision, which fits in a cache."""
ROUNDING = 1e-12
"""Rounding of sums of weights."""


def columns(rows: Sequence[Mapping[str, Tensor]]) -> Iterator[Tensor]:
    """Yield blocks of the float64 matrix whose row k is the tensors of ``rows[k]`` as one flat vector.

    Args:
        rows: at least one; parameter name → tensor, all of the names and shapes of the first.

    Yields: blocks of shape (rows, width), left to right in the order of the first row's names. They are copies, which
    the caller may write into, on the tensors' device (on the CPU for MPS, which has no float64).

    >>> a, b = {"w": torch.tensor([1.0, 2.0]), "v": torch.tensor(3.0)}, {"w": torch.zeros(2), "v": torch.tensor(5.0)}
    >>> torch.cat(list(columns([a, b])), 1)
    tensor([[1., 2., 3.],
            [0., 0., 5.]], dtype=torch.float64)
    """
    width = max(1, ENTRIES // len(rows))
    for name, like in rows[0].items():
        flat = [row[name].detach().reshape(-1) for row in rows]
        for start in range(0, like.numel(), width):
            yield in_double([each[start : start + width] for each in flat])


def sample(rows: Sequence[Mapping[str, Tensor]], most: int) -> Tensor:
    """Return at most ``most`` evenly spread columns of the matrix of :func:`columns`, shape (rows, columns)."""
    size = sum(tensor.numel() for tensor in rows[0].values())
    stride = max(1, -(-size // most))
    blocks, offset = [], 0
    for name, like in rows[0].items():
        first = -offset % stride
        if first < like.numel():
            blocks.append(in_double([row[name].detach().reshape(-1)[first::stride] for row in rows]))
        offset += like.numel()
    return torch.cat(blocks, 1) if blocks else torch.zeros(len(rows), 0, dtype=torch.float64)


def in_double(vectors: Sequence[Tensor]) -> Tensor:
    """Return ``vectors`` of equal length as the rows of a new float64 matrix."""
    if any(vector.device.type == "mps" for vector in vectors):
        vectors = [vector.cpu() for vector in vectors]
    if len({vector.dtype for vector in vectors}) > 1:  # each is exact in float64, but not in each other
        vectors = [vector.to(torch.float64) for vector in vectors]
    return torch.stack(list(vectors)).to(torch.float64)


def weighted_sum(rows: Sequence[Mapping[str, Tensor]], weights: Tensor) -> Tensor:
    """Return Σ_k w_k x_k of the rows x_k of :func:`columns`, shape (P,), float64; weights are float64, of any sign.

    Rows of weight 0 are skipped, and so are tensors that are known to be 0 in all rows (variances of point masses).
    """
    counted = [k for k, weight in enumerate(weights.tolist()) if weight] or [0]
    weights = weights[counted]
    parts = []
    for name in rows[0]:
        tensors = [{name: rows[k][name]} for k in counted]
        if all(is_zero(each[name]) for each in tensors):
            tensors = tensors[:1]
        parts += [weights[: len(tensors)].to(block.device) @ block for block in columns(tensors)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def weighted_medians(block: Tensor, weights: Tensor) -> Tensor:
    """Return weighted medians of every column: the middle of the lower and the upper one, shape (n, width).

    Args:
        block: shape (rows, width), as :func:`columns` yields.
        weights: shape (n, rows), float64, none negative, each row of sum 1.

    >>> block = torch.tensor([[1.0], [9.0], [2.0], [4.0]], dtype=torch.float64)
    >>> weighted_medians(block, torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.1, 0.6, 0.2, 0.1]], dtype=torch.float64))
    tensor([[3.],
            [9.]], dtype=torch.float64)
    """
    ordered, order = block.T.contiguous().sort(1)
    medians = []
    for each in weights.to(block.device):
        below = each[order].cumsum_(1)
        lower, upper = (
            ordered.gather(1, (below < half).sum(1, keepdim=True).clamp_max_(len(block) - 1)).squeeze(1)
            for half in (0.5 - ROUNDING, 0.5 + ROUNDING)
        )
        medians.append((lower + upper) / 2)
    return torch.stack(medians)


def weighted_median(rows: Sequence[Mapping[str, Tensor]], weights: Tensor) -> Tensor:
    """Return the weighted median of ``rows``, entry by entry, shape (P,), float64; see :func:`weighted_medians`."""
    counted = [k for k, weight in enumerate(weights.tolist()) if weight]
    weights = weights[counted][None]
    parts = []
    for name in rows[0]:
        tensors = [{name: rows[k][name]} for k in counted]
        if len(counted) == 1 or all(is_zero(each[name]) for each in tensors):
            parts += [block[0] for block in columns(tensors[:1])]
        else:
            parts += [weighted_medians(block, weights)[0] for block in columns(tensors)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
