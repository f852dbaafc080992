"""What processes can do together: every one calls the same method, and none goes on before all have."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Talk = Generator[Sequence[Any], list[Any], T]
"""What processes have to say to each other in several meetings, and what each makes of it in the end.

It yields what it says, value r to process r, and is sent what it hears, a value of each process. All processes talk
alike: as often, and of the same things in the same order.
"""


class Processes(ABC):
    """The processes of a run.

    A vector of P numbers has a block of columns per process, in their order: process r of N has those from ⌊rP/N⌋ to
    ⌊(r + 1)P/N⌋.

    Attributes:
        rank: number of this process.
        count: number of processes.
        meetings: how often they have met so far.
        bytes_sent: what this process has sent to others so far.
    """

    rank: int
    count: int
    meetings: int
    bytes_sent: int

    @abstractmethod
    def exchange(self, values: Sequence[Any]) -> list[Any]:
        """One meeting, in which every process has something to say to every process.

        Args:
            values: picklable, value r for process r. NumPy arrays in them are sent as they lie in memory.

        Returns: what each process has said to this one, in their order. A process gets its own value itself.

        Raises:
            FederationError: a process has ended.
        """

    def gather(self, value: T) -> list[T]:
        """The picklable values of all processes, in their order: one meeting."""
        return self.exchange([value] * self.count)

    def broadcast(self, value: T, source: int = 0) -> T:
        """The picklable value of process ``source``: one meeting."""
        return self.gather(value if self.rank == source else None)[source]  # pyright: ignore[reportReturnType]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of the processes' tensors of one shape, on the CPU, in the order of processes: one meeting."""
        first, *others = self.gather(tensor.numpy())
        total = torch.from_numpy(first).clone()
        for each in others:
            total += torch.from_numpy(each)
        return total

    def hold(self, *talks: Talk[Any]) -> list[Any]:
        """What comes of several talks that are held at once, in as many meetings as the longest takes."""
        results: dict[int, Any] = {}
        heard: list[Any] = [None] * len(talks)
        while True:
            said: dict[int, Sequence[Any]] = {}
            for number, talk in enumerate(talks):
                if number not in results:
                    try:
                        said[number] = talk.send(heard[number])
                    except StopIteration as end:
                        results[number] = end.value
            if not said:
                return [results[number] for number in range(len(talks))]
            messages = [{number: values[rank] for number, values in said.items()} for rank in range(self.count)]
            everyone = self.exchange(messages)
            heard = [[each.get(number) for each in everyone] for number in range(len(talks))]


def block_bounds(size: int, count: int) -> list[int]:
    """Where the blocks of ``count`` processes begin in ``size`` columns, and the end: shape (count + 1,).

    >>> block_bounds(5, 2)
    [0, 2, 5]
    """
    return [rank * size // count for rank in range(count + 1)]


def blocks(rows: Tensor, count: int) -> list[Any]:
    """The block of columns of each of ``count`` processes, as arrays that can be sent.

    Args:
        rows: shape (rows, P), on the CPU.

    >>> [block.tolist() for block in blocks(torch.tensor([[1, 2, 3]]), 2)]
    [[[1]], [[2, 3]]]
    """
    bounds = block_bounds(rows.shape[1], count)
    return [rows[:, start:end].contiguous().numpy() for start, end in itertools.pairwise(bounds)]
