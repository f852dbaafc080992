"""What processes can do together: every one calls the same method, and none goes on before all have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from lightning_fedbayes.errors import FusionError

T = TypeVar("T")


class Processes(ABC):
    """The processes of a run.

    A vector of P numbers has a block of columns per process, in their order: process r of N has those from ⌊rP/N⌋ to
    ⌊(r + 1)P/N⌋.

    Attributes:
        rank: number of this process.
        count: number of processes.
        bytes_sent: what this process has sent to others so far.
    """

    rank: int
    count: int
    bytes_sent: int

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """The picklable values of all processes, in their order."""

    @abstractmethod
    def broadcast(self, value: T, source: int = 0) -> T:
        """The picklable value of process ``source``."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of the processes' tensors of one shape, of float64 on the CPU."""

    @abstractmethod
    def columns(self, rows: Tensor) -> Tensor:
        """This process's block of columns, of the rows of all processes.

        Args:
            rows: shape (rows of this process, P), float64, on the CPU. P is the same for all.

        Returns: shape (rows of all processes, width of the block), process by process.
        """

    @abstractmethod
    def join(self, block: Tensor) -> Tensor:
        """All columns, of rows of which every process has its block.

        Args:
            block: shape (rows, width of the block), float64, on the CPU. The number of rows is the same for all.

        Returns: shape (rows, P).
        """

    def agree(self, local: Callable[[], T]) -> T:
        """The result of what each process does on its own.

        Raises:
            FusionError: one of them raised it; all raise that of the first.
        """
        result: Any = None
        error: FusionError | None = None
        try:
            result = local()
        except FusionError as raised:
            error = raised
        failed = [each for each in self.gather(error) if each is not None]
        if failed:
            raise failed[0]
        return result


def block_bounds(size: int, count: int) -> list[int]:
    """Where the blocks of ``count`` processes begin in ``size`` columns, and the end: shape (count + 1,).

    >>> block_bounds(5, 2)
    [0, 2, 5]
    """
    return [rank * size // count for rank in range(count + 1)]
