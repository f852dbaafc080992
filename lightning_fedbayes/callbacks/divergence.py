"""Clients whose training has diverged, by their training loss of one round and another."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_fedbayes.core.errors import listed


def worst_loss(first: float) -> float:
    r"""Return the mean training loss of a round beyond which a client's training has diverged.

    :math:`\ell_1 + \max(|\ell_1|, 1)` for the loss :math:`\ell_1` of its first round, which began at parameters that
    know nothing: what is far above that is worse than the prior.
    """
    return first + max(abs(first), 1.0)


def divergence_of(names: Sequence[str]) -> str:
    """Return the message that the training of clients has diverged.

    >>> divergence_of(["a", "b"])[:45]
    'the training of clients a, b has diverged: th'
    """
    return (
        f"the training of client{'s' if len(names) > 1 else ''} {listed(names)} has diverged: the loss is far above "
        "that of the first round, which began without knowledge. Take a smaller learning rate or fewer local epochs"
    )
