"""Rows of a stack: what belongs to some of the clients in a tensor of shape (clients, *)."""

from __future__ import annotations

from torch import Tensor

from lightning_fedbayes.engines.vectorized.schedule import Slots


def take_rows(stack: Tensor, slots: Slots) -> Tensor:
    """The rows of ``slots``: a view where they are neighbours, else a copy."""
    return stack[slots.start : slots.stop] if isinstance(slots, range) else stack[list(slots)]


def put_rows(stack: Tensor, slots: Slots, rows: Tensor) -> None:
    """Write ``rows`` into the places of ``slots``; nothing is to be done for the view that :func:`take_rows` gave."""
    if isinstance(slots, range):
        target = stack[slots.start : slots.stop]
        if target.data_ptr() != rows.data_ptr():
            target.copy_(rows)
    else:
        stack[list(slots)] = rows


def add_rows(stack: Tensor, slots: Slots, rows: Tensor | float) -> None:
    """Add ``rows`` to the rows of ``slots``."""
    if isinstance(slots, range):
        stack[slots.start : slots.stop].add_(rows)
    else:
        stack[list(slots)] += rows
