"""Scores of every split in original units."""

from __future__ import annotations

from torch import Tensor

from lightning_fedbayes.metrics.functional import (
    determinant_sharpness,
    gaussian_crps,
    gaussian_nll,
    interval_coverage,
)

SCORES = {
    "nll": "NLL",
    "rmse": "RMSE",
    "sharpness": "determinant sharpness DS",
    "crps": "CRPS",
    "coverage": "coverage of the 90 % interval",
}


def scores_of(mean: Tensor, variance: Tensor, targets: Tensor, target_std: Tensor) -> dict[str, list[float]]:
    """Score → one value per split.

    Args:
        mean, variance, targets: standardised, shape (examples, splits).
        target_std: what the targets were divided by, shape (splits,).
    """
    mean, variance, targets = mean * target_std, variance * target_std**2, targets * target_std
    values = {
        "nll": gaussian_nll(mean, variance, targets).mean(0),
        "rmse": (mean - targets).square().mean(0).sqrt(),
        "sharpness": determinant_sharpness(variance[..., None, None]).mean(0),
        "crps": gaussian_crps(mean, variance, targets).mean(0),
        "coverage": interval_coverage(mean, variance, targets, level=0.9).mean(0),
    }
    return {name: value.tolist() for name, value in values.items()}
