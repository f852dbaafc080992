"""How far apart clients are who mean the same: bounds below a noise variance, and beyond which a client is left out."""

from __future__ import annotations

from torch import Tensor

FAR = 1e8
"""Squared distance to its nearest clients, in units of the others', from which a client is left out."""
NOTHING = 1e-9
"""Ratio of noise variances below which one is 0 but for rounding."""


def least_noise(noise: Tensor, floor: float) -> float:
    """``floor`` in units of the lower quartile of ``noise``, so that a majority that sends noise does not raise it.

    Of the median where the quartile is 0 beside it, or of the largest: some clients then are the consensus.
    """
    ordered = noise.sort().values
    quartile, median, largest = (float(ordered[place]) for place in (len(noise) // 4, len(noise) // 2, -1))
    scale = quartile if quartile > NOTHING * median else median if median > NOTHING * largest else largest
    return floor * (scale or 1.0)


def near_clients(distances: Tensor) -> Tensor:
    """Which clients are not so far off that in double precision they would drown the others, shape (K,), bool.

    A client that is counts as absent in that round.

    Args:
        distances: squared, between K clients and the origin, which comes last, shape (K + 1, K + 1).
    """
    count = len(distances) - 1
    nearest = distances[:-1, :-1].sort(1).values[:, min(count - 1, max(1, count // 4))]
    return nearest <= FAR * least_noise(nearest, 1.0)
