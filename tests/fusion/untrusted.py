"""Updates of clients of known quality, made on the spot."""

import torch
from torch import Tensor

from lightning_fedbayes import GaussianPosterior


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def independent(noise: list[float], size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A ground truth of variance 1, shape (size,), and each client's noisy view of it, shape (clients, size)."""
    truth = normal(size, seed=seed)
    return truth, truth + torch.tensor(noise, dtype=torch.float64)[:, None] * normal(len(noise), size, seed=seed + 1)


def overlapping(shares: list[set[int]], size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Clients who average draws of N(y, 1), some of them the same: y, the averages, and their covariance, eq. (5)."""
    count = 1 + max(max(each) for each in shares)
    averaging = torch.zeros(len(shares), count, dtype=torch.float64)
    for client, draws in enumerate(shares):
        averaging[client, list(draws)] = 1 / len(draws)
    truth = normal(size, seed=seed)
    return truth, truth + averaging @ normal(count, size, seed=seed + 1), averaging @ averaging.T


def point_masses(updates: Tensor) -> list[GaussianPosterior]:
    return [GaussianPosterior.point_mass({"w": row}) for row in updates]


def origin(size: int, at: float = 0.0) -> GaussianPosterior:
    """A previous global model."""
    return GaussianPosterior.point_mass({"w": torch.full((size,), at, dtype=torch.float64)})


def distances_of(updates: Tensor) -> Tensor:
    """Mean squared differences between the clients and the origin, which comes last."""
    points = torch.cat([updates, torch.zeros_like(updates[:1])])
    return (points[:, None] - points).square().mean(-1)


def error(fused: GaussianPosterior, truth: Tensor) -> float:
    return float((fused.mean["w"] - truth).square().mean())
