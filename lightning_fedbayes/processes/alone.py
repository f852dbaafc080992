"""The only process of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from lightning_fedbayes.processes.base import Processes

T = TypeVar("T")


class OneProcess(Processes):
    """A process without others: nothing is sent, and everything is as it was.

    >>> ALONE.gather("mine")
    ['mine']
    """

    rank = 0
    count = 1
    bytes_sent = 0

    def gather(self, value: T) -> list[T]:
        """See :meth:`Processes.gather`."""
        return [value]

    def broadcast(self, value: T, source: int = 0) -> T:
        """See :meth:`Processes.broadcast`."""
        return value

    def sum(self, tensor: Tensor) -> Tensor:
        """See :meth:`Processes.sum`."""
        return tensor

    def columns(self, rows: Tensor) -> Tensor:
        """See :meth:`Processes.columns`."""
        return rows

    def join(self, block: Tensor) -> Tensor:
        """See :meth:`Processes.join`."""
        return block

    def agree(self, local: Callable[[], T]) -> T:
        """See :meth:`Processes.agree`."""
        return local()


ALONE = OneProcess()
"""One process for all who have no others."""
