"""Collective operations. Every process must call the same method; the call returns when all have."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Collective(ABC):
    """The processes of a run, and what they can do together.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        calls: number of collective calls so far.
        bytes_sent: bytes that this process has sent to others so far.
    """

    rank: int
    size: int
    calls: int
    bytes_sent: int

    @abstractmethod
    def all_to_all(self, values: Sequence[Any]) -> list[Any]:
        """Send a value to every process and receive one from each.

        Args:
            values: picklable, value r for process r. NumPy arrays in them are sent as they lie in memory.

        Returns: the value that each process has sent to this one, in order of rank; its own as it is.

        Raises:
            FederationError: a process has ended.
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
        """See :meth:`Collective.all_to_all`."""
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
