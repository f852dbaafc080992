"""Clients whose training has diverged, by their training loss of one round and another."""

from __future__ import annotations

from collections.abc import Sequence

MOST_NAMES = 3
"""Most clients that a message names."""


def worst_loss(first: float) -> float:
    r"""Return the mean training loss of a round beyond which a client's training has diverged.

    :math:`\ell_1 + \max(|\ell_1|, 1)` for the loss :math:`\ell_1` of its first round, which began at parameters that
    know nothing: what is far above that is worse than the prior.
    """
    return first + max(abs(first), 1.0)


def divergence_of(names: Sequence[str]) -> str:
    """Return the message that the training of clients has diverged; it names :data:`MOST_NAMES`, and counts the others.

    >>> divergence_of(["a", "b", "c", "d", "e"])[:58]
    'the training of clients a, b, c and 2 more has diverged: t'
    """
    shown, more = ", ".join(names[:MOST_NAMES]), len(names) - MOST_NAMES
    who = f"client{'s' if len(names) > 1 else ''} {shown}" + (f" and {more} more" if more > 0 else "")
    return (
        f"the training of {who} has diverged: the loss is far above that of the first round, which began without "
        "knowledge. Take a smaller learning rate or fewer local epochs"
    )
