"""The parameters of all clients side by side, a block of columns at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from lightning_fedbayes.posterior import is_zero
from lightning_fedbayes.processes import ALONE, Processes

ENTRIES = 2**19
"""Entries of a block: 4 MiB in double precision, which a cache holds and K × P numbers would not."""


_HOLDERS: ContextVar[Processes] = ContextVar("the processes that hold all columns", default=ALONE)


@contextmanager
def columns_spread_over(processes: Processes) -> Iterator[None]:
    """Inside, the clients at hand are blocks of columns; the others are in ``processes``, which do the same."""
    token = _HOLDERS.set(processes)
    try:
        yield
    finally:
        _HOLDERS.reset(token)


def total(partial: Tensor) -> Tensor:
    """The sum over all columns of what has been summed over those at hand, float64 on the CPU."""
    return _HOLDERS.get().sum(partial)


def columns(rows: Sequence[Mapping[str, Tensor]]) -> Iterator[Tensor]:
    """Blocks of the float64 matrix whose row k lays the tensors of ``rows[k]`` out as one flat vector.

    Args:
        rows: at least one; parameter name → tensor, all of the names and shapes of the first.

    Yields:
        Blocks of shape (rows, width), left to right in the order of the first row's names, made anew for each call
        and therefore free to be written into. They lie where the tensors lie, but on the CPU for MPS, which has no
        float64.

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
    """At most ``most`` columns of the matrix of :func:`columns`, evenly spread: shape (rows, columns), float64."""
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
    """``vectors`` of equal length as the rows of a new float64 matrix."""
    if any(vector.device.type == "mps" for vector in vectors):
        vectors = [vector.cpu() for vector in vectors]
    if len({vector.dtype for vector in vectors}) > 1:  # each is exact in float64, but not in each other
        vectors = [vector.to(torch.float64) for vector in vectors]
    return torch.stack(list(vectors)).to(torch.float64)


def weighted_sum(rows: Sequence[Mapping[str, Tensor]], weights: Tensor) -> Tensor:
    """Σ_k w_k x_k of the rows x_k of :func:`columns`, shape (P,), float64.

    Rows of weight 0 are not read, nor are tensors that are known to be 0 in all rows (variances of point masses).

    Args:
        rows: as for :func:`columns`.
        weights: shape (rows,), float64, of any sign.
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
