"""Learning rate of the SGD of [FedAG], which the paper does not give; chosen on training data alone."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import torch

from benchmarks.uci.data import read_splits
from benchmarks.uci.methods import METHODS, TITLES
from benchmarks.uci.scores import scores_of
from benchmarks.uci.training import Plan
from lightning_fedbayes.core.tables import markdown_table

GRID = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
VALIDATION = 0.2
ROW = {"linear": "fedag_linear", "network": "fedag"}
"""Method → row whose NLL decides."""

CHOSEN: dict[str, dict[str, float]] = {
    "bostonHousing": {"linear": 0.003, "network": 0.01},
    "concrete": {"linear": 0.003, "network": 0.03},
    "energy": {"linear": 0.003, "network": 0.03},
    "naval-propulsion-plant": {"linear": 0.01, "network": 0.01},
    "protein-tertiary-structure": {"linear": 0.0003, "network": 0.003},
}
"""Data set → method → rate that ``--tune`` chose."""
DEFAULT = 0.01
"""Rate of a data set without a choice by ``--tune``."""


def chosen(dataset: str, method: str) -> float:
    """Return the rate of ``method`` on a data set."""
    return CHOSEN.get(dataset, {}).get(method, DEFAULT)


def tune(directory: Path, dataset: str, method: str, plan: Plan, splits: int) -> str:
    """Train with every rate of the grid at once; return the validation scores and the choice as text.

    A fifth of the training examples of the first ``splits`` splits is held out. The choice is the rate with the
    lowest mean NLL over the splits; a rate that diverges in one split is excluded.
    """
    one = read_splits(directory, dataset, splits, VALIDATION)
    all_rates = one.repeated(len(GRID))
    rates = torch.tensor(GRID).repeat_interleave(one.number)
    outcome = METHODS[method](all_rates, plan._replace(rate=rates))
    mean, variance = outcome.predictions[ROW[method]]
    scores = scores_of(mean, variance, all_rates.test[1], all_rates.target_std)
    by_rate = {
        name: [scores[name][place * one.number : (place + 1) * one.number] for place in range(len(GRID))]
        for name in ("nll", "rmse")
    }
    means = [statistics.fmean(each) for each in by_rate["nll"]]
    best = min(range(len(GRID)), key=lambda place: means[place] if math.isfinite(means[place]) else math.inf)
    rows = [[name.upper(), *(f"{statistics.fmean(each):.3f}" for each in by_rate[name])] for name in by_rate]
    run = f"{one.number} splits, {outcome.rounds} rounds of {plan.local_epochs} local epochs"
    return "\n\n".join([
        f"{dataset}, {TITLES[ROW[method]]}: {GRID[best]} ({run})",
        markdown_table(["validation", *map(str, GRID)], rows),
    ])
