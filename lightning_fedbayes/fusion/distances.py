"""Geometry of clients from their squared distances alone: consensus, residuals and the scale of their noise.

Squared distances are those of K clients and, last, the origin, shape (K + 1, K + 1), or of any n points where a
docstring says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedbayes.fusion.gram import Gram
from lightning_fedbayes.fusion.robust import GeometricMedian

FAR = 1e8
"""Squared distance to its nearest clients, in units of the others', from which a client is left out."""
NOTHING = 1e-9
"""Ratio of noise variances below which the smaller is 0 except for rounding."""


def consensus(distances: Tensor) -> Tensor:
    """Return the shares of the K clients in their geometric median, shape (K,)."""
    clients = distances[:-1, :-1]
    weights = torch.full((len(clients),), 1 / len(clients), dtype=torch.float64)
    centre = int(clients.sort(1).values[:, len(clients) // 2].argmin())
    towards = distances[:, centre]
    return GeometricMedian().infer_shares(Gram((towards[:, None] + towards - distances) / 2, 1), weights)[0]


def residuals(distances: Tensor, shares: Tensor) -> Tensor:
    """Return the squared distances of n points to their combination with ``shares``, which sum to 1, shape (n,)."""
    return squared_lengths(distances, torch.eye(len(shares), dtype=torch.float64) - shares[:, None])


def signal_of(distances: Tensor, shares: Tensor) -> Tensor:
    """Return the squared distance of the clients' combination with ``shares`` to the origin, a scalar."""
    return squared_lengths(distances, torch.cat([shares, -shares.sum(0, keepdim=True)])[:, None])[0]


def centred_products(distances: Tensor, shares: Tensor) -> Tensor:
    """Return the products of n points' differences to their combination with ``shares``, of sum 1, shape (n, n)."""
    directions = torch.eye(len(shares), dtype=torch.float64) - shares[:, None]
    return -(directions.T @ distances @ directions) / 2


def gram_about_last(distances: Tensor) -> Tensor:
    """Return the inner products of the first n − 1 points relative to the last, shape (n − 1, n − 1)."""
    towards = distances[:-1, -1]
    return (towards[:, None] + towards - distances[:-1, :-1]) / 2


def squared_lengths(distances: Tensor, directions: Tensor) -> Tensor:
    """Return ‖Σ_i b_i p_i‖² for columns b of ``directions``, shape (n, m), each of sum 0, from distances of n points.

    Only differences of points enter, so nothing cancels however far all of them are from the origin.
    """
    return (-(directions * (distances @ directions)).sum(0) / 2).clamp_min(0)


def least_noise(noise: Tensor, floor: float) -> float:
    """Return ``floor`` in units of the lower quartile of ``noise``, which a majority that sends noise does not raise.

    Where the quartile is 0 compared with the median, some clients are the consensus itself: the unit is then the
    median, or, where that is 0 too, the largest.
    """
    ordered = noise.sort().values
    quartile, median, largest = (float(ordered[place]) for place in (len(noise) // 4, len(noise) // 2, -1))
    scale = quartile if quartile > NOTHING * median else median if median > NOTHING * largest else largest
    return floor * (scale or 1.0)


def near_clients(distances: Tensor) -> Tensor:
    """Return a mask, shape (K,): False for a client so far off that rounding loses the distances of the others.

    Such a client counts as absent in that round.
    """
    count = len(distances) - 1
    nearest = distances[:-1, :-1].sort(1).values[:, min(count - 1, max(1, count // 4))]
    return nearest <= FAR * least_noise(nearest, 1.0)
