"""Bound on what one client adds to a sum of a calibration, from what the median client adds."""

from __future__ import annotations

from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError, check_number

CHANCE = 2.0
"""Standard deviations of the median client's sampling noise that are added to the median size."""


def check_influence(max_influence: float | None) -> None:
    """Raise FedBayesError unless ``max_influence`` is a multiple of at least 1, or None."""
    if max_influence is not None:
        why = "a client may count as this multiple of the median client; None turns the bound off"
        check_number("max_influence", max_influence, "[1, inf)", error=FedBayesError, why=why)


def middle(values: Tensor) -> Tensor:
    """Return the upper median over the first dimension: the larger of two, so that two clients are never bounded."""
    return values.sort(0).values[len(values) // 2]


def largest_sums(sums: Tensor, variances: Tensor, max_influence: float) -> Tensor:
    r"""Return the largest size of a client's sum that is believed.

    .. math:: B = c \left(\operatorname{median}_k |s_k| + 2 \sqrt{\operatorname{median}_k v_k}\right)

    with the clients' sums s, whose expectation is 0 at the solution if clients are alike, and their variances v there.
    Fewer than half of the clients cannot move it beyond what the others are. Of three honest clients whose sums cancel
    none exceeds it with c = 2: the largest is the sum of the other two.

    When to use it: for sums that are 0 at the value sought. A client that is clipped at :math:`\pm B` moves the value
    no further than :math:`B` divided by the slope of the others' sum, whatever it sends.

    Args:
        sums: shape (clients, *).
        variances: shape (clients, *), or that of their median's shape with one client.
        max_influence: c, at least 1.

    Returns: shape (*).
    """
    return max_influence * (middle(sums.abs()) + CHANCE * middle(variances).clamp_min(0).sqrt())
