"""One thread for small steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

SMALL_STEP = 5e6
"""Floating-point operations of a step, or of the work between steps, up to which one thread of the CPU takes them.

The threads that torch would use gain microseconds there. When another process has one of the cores they wait for it at
every operation, some for a millisecond, and a step takes twenty times as long.
"""


def threads_for(operations: float) -> AbstractContextManager[None]:
    """Inside, torch uses one thread if so many ``operations`` are few."""
    if operations > SMALL_STEP or torch.get_num_threads() == 1:
        return nullcontext()
    return _one_thread()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, torch uses one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
