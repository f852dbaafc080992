"""Collective operations of the processes that share a round's clients, without Lightning.

Every process must call the same method. The call returns when all have.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["ALONE", "Collective", "OneProcess", "Reduction", "merge_statistics"]
T = TypeVar("T")


class Collective(ABC):
    """The processes of a run, and their collective operations.

    This one has the number ``rank`` of ``size``, from 0, and counts ``calls`` and ``bytes_sent`` to others so far.
    """

    rank: int
    size: int
    calls: int
    bytes_sent: int

    @abstractmethod
    def all_to_all(self, values: Sequence[Any]) -> list[Any]:
        """Send value r, picklable, to process r, for every process. Return the values received, in order of rank.

        NumPy arrays are sent as they lie in memory. This process's value is not copied. Raise FederationError if a
        process has ended.
        """

    def all_gather(self, value: T) -> list[T]:
        """Return the picklable values of all processes, in order of rank: one call."""
        return self.all_to_all([value] * self.size)

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the picklable value of process ``source``: one call."""
        return self.all_gather(value if self.rank == source else None)[source]  # pyright: ignore[reportReturnType]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the processes' tensors of one shape, on the CPU, added in order of rank: one call."""
        first, *others = self.all_gather(tensor.numpy())
        total = torch.from_numpy(first).clone()
        for each in others:
            total += torch.from_numpy(each)
        return total


class OneProcess(Collective):
    """A run of one process: every value comes back as it is.

    >>> ALONE.all_gather("mine")
    ['mine']
    """

    rank = 0
    size = 1
    calls = 0
    bytes_sent = 0

    def all_to_all(self, values: Sequence[Any]) -> list[Any]:
        return list(values)


ALONE = OneProcess()
"""The collective of a run of one process."""


def shard_bounds(length: int, size: int) -> list[int]:
    """Return where the shards of ``size`` processes begin in a vector of ``length`` entries, and its end.

    Process r holds the entries from ⌊rP/N⌋ to ⌊(r + 1)P/N⌋ of P entries.

    >>> shard_bounds(5, 2)
    [0, 2, 5]
    """
    return [rank * length // size for rank in range(size + 1)]


def shards(rows: Tensor, size: int) -> list[Any]:
    """Cut the columns of a matrix on the CPU, shape (rows, P), into one array per process, ready to be sent.

    >>> [shard.tolist() for shard in shards(torch.tensor([[1, 2, 3]]), 2)]
    [[[1]], [[2, 3]]]
    """
    bounds = shard_bounds(rows.shape[1], size)
    return [rows[:, start:end].contiguous().numpy() for start, end in itertools.pairwise(bounds)]


Statistics = dict[str, Tensor]
"""Running sums over clients: float64, each a vector or a scalar."""


@dataclass(frozen=True)
class Reduction:
    """Running sums of this process's clients, to be merged with the sums of the other processes.

    Args:
        own: the sums, name → vector of ``length`` entries or scalar. Empty if this process has no client.
        merge: adds the second argument to the first, in place. Vectors are shards of equal length.
        totals_only: return only the sum of the entries of every merged vector.
    """

    own: Statistics
    length: int
    merge: Callable[[Statistics, Statistics], None]
    totals_only: bool = False


def merge_statistics(reductions: Sequence[Reduction], collective: Collective) -> list[Statistics]:
    """Merge the sums of several processes. The result is the same in each, on the CPU.

    Each process receives its shard of all vectors, merges it in order of rank, and sends the result to all. Vectors
    that are 0 everywhere, such as the variances of a deterministic network, are not sent.
    """
    packed = [_packed(each, collective.size) for each in reductions]
    received = collective.all_to_all([[each[rank] for each in packed] for rank in range(collective.size)])
    merged = [_merged(each, parts) for each, parts in zip(reductions, zip(*received, strict=True), strict=True)]
    told = [_to_send(each, total) for each, total in zip(reductions, merged, strict=True)]
    everyone = collective.all_gather(told)
    return [
        _joined(each, total, parts, collective.size)
        for each, total, parts in zip(reductions, merged, zip(*everyone, strict=True), strict=True)
    ]


def _packed(reduction: Reduction, size: int) -> list[Any]:
    """One message per process: scalars, names of vectors, names of those that are sent, its shard of them."""
    own = reduction.own
    scalars = {name: value.item() for name, value in own.items() if not value.dim()}
    vectors = [name for name, value in own.items() if value.dim()]
    filled = [name for name in vectors if bool(own[name].any())]
    rows = [own[name].cpu() for name in filled]
    matrix = torch.stack(rows) if rows else torch.zeros(0, reduction.length, dtype=torch.float64)
    return [(scalars, vectors, filled, shard) for shard in shards(matrix, size)]


def _merged(reduction: Reduction, parts: Sequence[Any]) -> Statistics:
    """Merge this process's shard of the sums of all processes."""
    total: Statistics = {}
    for scalars, vectors, filled, shard in parts:
        part = {name: torch.tensor(number, dtype=torch.float64) for name, number in scalars.items()}
        part |= {name: torch.zeros(shard.shape[1], dtype=torch.float64) for name in vectors}
        part |= dict(zip(filled, torch.from_numpy(shard), strict=True))
        if part:  # that process has clients
            reduction.merge(total, part)
    return total


def _to_send(reduction: Reduction, merged: Statistics) -> dict[str, Any]:
    """Return the merged shard as all processes get it: arrays that are not 0, or their totals."""
    vectors = {name: value for name, value in merged.items() if value.dim()}
    if reduction.totals_only:
        return {name: float(value.sum()) for name, value in vectors.items()}
    return {name: value.numpy() for name, value in vectors.items() if bool(value.any())}


def _joined(reduction: Reduction, merged: Statistics, parts: Sequence[dict[str, Any]], size: int) -> Statistics:
    """Put the merged shards of all processes together."""
    vectors = [name for name, value in merged.items() if value.dim()]
    if reduction.totals_only:
        totals = {name: torch.tensor(sum(part[name] for part in parts), dtype=torch.float64) for name in vectors}
        return {**merged, **totals}
    whole = {name: torch.zeros(reduction.length, dtype=torch.float64) for name in vectors}
    for (start, end), part in zip(itertools.pairwise(shard_bounds(reduction.length, size)), parts, strict=True):
        for name, shard in part.items():
            whole[name][start:end] = torch.from_numpy(shard)
    return {**merged, **whole}
