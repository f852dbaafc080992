"""The geometry of clients of whom only squared distances are known: n points, the last of them the origin."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedbayes.fusion.geometric_median import GeometricMedian
from lightning_fedbayes.fusion.gram import Gram


def consensus(distances: Tensor) -> Tensor:
    """Shares of the K clients in their geometric median, shape (K,), from ``distances``, shape (K + 1, K + 1)."""
    clients = distances[:-1, :-1]
    weights = torch.full((len(clients),), 1 / len(clients), dtype=torch.float64)
    centre = int(clients.sort(1).values[:, len(clients) // 2].argmin())
    towards = distances[:, centre]
    return GeometricMedian().judge(Gram((towards[:, None] + towards - distances) / 2, 1), weights)[0]


def residuals(distances: Tensor, shares: Tensor) -> Tensor:
    """Mean squared distances of all points to their combination with ``shares``, which sum to 1, shape (K,)."""
    return squared_lengths(distances, torch.eye(len(shares), dtype=torch.float64) - shares[:, None])


def signal_of(distances: Tensor, shares: Tensor) -> Tensor:
    """Mean square of the update that the clients' ``shares`` make, a scalar."""
    return squared_lengths(distances, torch.cat([shares, -shares.sum(0, keepdim=True)])[:, None])[0]


def centred_products(distances: Tensor, shares: Tensor) -> Tensor:
    """Mean products of the points' differences to their combination with ``shares``, which sum to 1, shape (K, K)."""
    directions = torch.eye(len(shares), dtype=torch.float64) - shares[:, None]
    return -(directions.T @ distances @ directions) / 2


def gram_about_last(distances: Tensor) -> Tensor:
    """Inner products of the first n − 1 points as seen from the last, shape (n − 1, n − 1)."""
    towards = distances[:-1, -1]
    return (towards[:, None] + towards - distances[:-1, :-1]) / 2


def squared_lengths(distances: Tensor, directions: Tensor) -> Tensor:
    """‖Σ_i b_i p_i‖² for columns b of ``directions``, shape (n, m), each of sum 0, from squared distances of n points.

    Only differences of points enter, so nothing cancels however far all of them are from the origin.
    """
    return (-(directions * (distances @ directions)).sum(0) / 2).clamp_min(0)
