"""Scores of every split in original units, and those that [FedAG] reports: Tables 2, 3 and 4, a row per data set."""

from __future__ import annotations

from typing import NamedTuple

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


DATASETS = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht", "year")
"""Beginnings of the folders' names in lower case; the rest differs between collections."""

ROWS = ("blr", "vi", "fedag_linear", "fedag", "deep_ensemble")
"""Columns of Tables 2 and 3; VI and the deep ensemble are the paper's citations, on all data in one place."""

NLL = (  # of the data sets in their order, mean and standard error in the order of ROWS
    ((3.07, 0.03), (2.90, 0.07), (3.02, 0.03), (2.58, 0.06), (2.41, 0.25)),
    ((3.78, 0.02), (3.39, 0.02), (3.76, 0.03), (3.21, 0.04), (3.06, 0.18)),
    ((5.12, 0.05), (2.39, 0.03), (5.31, 0.06), (2.07, 0.04), (1.38, 0.22)),
    ((1.17, 0.04), (-0.90, 0.01), (1.03, 0.04), (-0.87, 0.01), (-1.20, 0.02)),
    ((-3.55, 0.02), (-3.73, 0.12), (-3.45, 0.01), (-3.21, 0.01), (-5.63, 0.05)),
    ((2.97, 0.01), (2.89, 0.01), (2.94, 0.01), (2.92, 0.01), (2.79, 0.04)),
    ((3.07, 0.00), (2.99, 0.01), (3.08, 0.00), (2.95, 0.00), (2.83, 0.04)),
    ((1.50, 0.07), (0.98, 0.01), (1.01, 0.03), (0.99, 0.02), (0.94, 0.12)),
    ((3.63, 0.05), (3.44, 0.16), (4.02, 0.07), (1.92, 0.06), (1.18, 0.21)),
    ((3.73, None), (3.86, None), (3.72, None), (3.66, None), (3.35, None)),
)
RMSE = (
    ((4.87, 0.22), (4.32, 0.29), (4.96, 0.22), (4.07, 0.18), (3.28, 1.00)),
    ((10.58, 0.33), (7.13, 0.12), (10.52, 0.33), (6.50, 0.20), (6.03, 0.58)),
    ((4.35, 0.14), (2.65, 0.08), (4.36, 0.14), (2.02, 0.07), (2.09, 0.29)),
    ((0.20, 0.00), (0.10, 0.00), (0.20, 0.00), (0.10, 0.00), (0.09, 0.00)),
    ((0.01, 0.00), (0.00, 0.00), (0.01, 0.00), (0.01, 0.00), (0.00, 0.00)),
    ((4.74, 0.05), (4.33, 0.04), (4.56, 0.05), (4.45, 0.05), (4.11, 0.17)),
    ((5.18, 0.02), (4.84, 0.03), (5.18, 0.02), (4.63, 0.02), (4.71, 0.06)),
    ((0.65, 0.02), (0.65, 0.01), (0.65, 0.02), (0.65, 0.02), (0.64, 0.04)),
    ((9.12, 0.52), (6.89, 0.67), (9.12, 0.52), (2.29, 0.15), (1.58, 0.48)),
    ((9.51, None), (9.03, None), (9.51, None), (9.35, None), (8.89, None)),
)
SHARPNESS = (4.05, 6.37, 2.16, 0.10, 0.01, 4.30, 3.88, 0.79, 2.85, 11.12)
"""Table 4, of FedAG with one hidden layer after five rounds; no standard errors."""


def published(score: str, dataset: str, row: str) -> Published | None:
    """Return the published score ("nll", "rmse", "sharpness") of a row of a data set, or None."""
    places = [place for place, name in enumerate(DATASETS) if dataset.lower().startswith(name)]
    if not places:
        return None
    if score == "sharpness":
        return Published(SHARPNESS[places[0]]) if row == "fedag" else None
    table = {"nll": NLL, "rmse": RMSE}.get(score)
    return Published(*table[places[0]][ROWS.index(row)]) if table is not None and row in ROWS else None
