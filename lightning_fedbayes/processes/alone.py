"""The only process of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_fedbayes.processes.base import Processes


class OneProcess(Processes):
    """A process without others: nothing is sent, and everything is as it was.

    >>> ALONE.gather("mine")
    ['mine']
    """

    rank = 0
    count = 1
    meetings = 0
    bytes_sent = 0

    def exchange(self, values: Sequence[Any]) -> list[Any]:
        """See :meth:`Processes.exchange`."""
        return list(values)


ALONE = OneProcess()
"""One process for all who have no others."""
