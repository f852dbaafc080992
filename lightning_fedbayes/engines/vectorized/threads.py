"""One thread for small steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_STEP = 5e6
"""Floating-point operations of a stacked step up to which one thread of the CPU takes it.

The threads that torch would use gain microseconds there. When another process has one of the cores they wait for it at
every operation, and the step takes twenty times as long.
"""


@contextmanager
def threads_for(operations: float) -> Iterator[None]:
    """Inside, torch uses one thread if a step of so many ``operations`` is small."""
    threads = torch.get_num_threads()
    if operations > SMALL_STEP or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
