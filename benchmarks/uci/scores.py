"""Scores of every split in original units, and those that [FedAG] reports: Tables 2, 3 and 4, a row per data set."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from benchmarks.published import mean_and_spread, rows
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
    """Return a mapping from score to one value per split.

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


class Published(NamedTuple):
    """Mean over splits and its standard error; None where the paper gives none."""

    mean: float
    error: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.error is None else f"{self.mean:.2f} ± {self.error:.2f}"


TABLES = {"nll": "fedag table 2", "rmse": "fedag table 3", "sharpness": "fedag table 4"}


def published(score: str, dataset: str, row: str) -> Published | None:
    """Return the published score of a row of a data set, or None.

    A data set of the paper is the beginning of a folder's name in lower case; the rest differs between collections.
    """
    for each in rows(TABLES[score]) if score in TABLES else ():
        if dataset.lower().startswith(each["dataset"]) and row in each:
            return Published(*mean_and_spread(each[row]))
    return None
