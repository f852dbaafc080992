"""Learning rates, which the paper does not give; chosen on training data alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.uci.data import Splits, read_splits
from benchmarks.uci.methods import METHODS, ROWS, TITLES
from benchmarks.uci.scores import scores_of
from benchmarks.uci.training import Plan
from lightning_fedbayes.core.tables import markdown_table

SGD = ("linear", "network")
"""Methods that train by SGD, as in [FedAG]; others by Adam, or by IVON."""
GRID = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
SHORT_GRID = (0.0003, 0.001, 0.003, 0.01)
"""Rates of methods that train by Adam or IVON, one after the other."""
VALIDATION = 0.2

CHOSEN: dict[str, dict[str, float]] = {
    "bostonHousing": {"linear": 0.003, "network": 0.01},
    "concrete": {"linear": 0.003, "network": 0.03},
    "energy": {"linear": 0.003, "network": 0.03},
    "kin8nm": {"linear": 0.003, "network": 0.01},
    "naval-propulsion-plant": {"linear": 0.01, "network": 0.01},
    "power-plant": {"linear": 0.003, "network": 0.03},
    "protein-tertiary-structure": {"linear": 0.0003, "network": 0.003},
    "wine-quality-red": {"linear": 0.001, "network": 0.01},
    "yacht": {"linear": 0.003, "network": 0.03},
}
"""Data set → method → rate that ``--tune`` chose; a test compares them with results/rates.md."""
DEFAULT = 0.01
"""Rate of SGD on a data set without a choice by ``--tune``."""
OTHERS = 0.001
"""Rate of methods that train by Adam or IVON."""


def chosen(dataset: str, method: str) -> float:
    """Return the rate of ``method`` on a data set."""
    return CHOSEN.get(dataset, {}).get(method, DEFAULT if method in SGD else OTHERS)


def optimizer(method: str) -> str:
    """Return the name of the optimizer of a method; none for a closed form."""
    return "" if method == "blr" else "SGD" if method in SGD else "IVON" if method == "ivon_sites" else "Adam"


def tune(
    directory: Path, dataset: str, method: str, plan: Plan, splits: int, grid: Sequence[float] | None = None
) -> str:
    """Train with every rate of the grid; return the validation scores and the choice as text.

    A fifth of the training examples of the first ``splits`` splits is held out. The choice is the rate with the
    lowest mean NLL of the method's first row over the splits; a rate that diverges in one split is excluded.
    """
    one = read_splits(directory, dataset, splits, VALIDATION)
    grid = grid or (GRID if method in SGD else SHORT_GRID)
    found = at_once(one, method, plan, grid) if method in SGD else one_by_one(one, method, plan, grid)
    rows = ROWS.get(method, (method,))
    rounds = len(found[0])
    last = {
        (row, name): [statistics.fmean(each[-1][row][name]) for each in found]
        for row in rows
        for name in ("nll", "rmse", "sharpness")
    }
    losses = last[rows[0], "nll"]
    best = min(range(len(grid)), key=lambda place: losses[place] if math.isfinite(losses[place]) else math.inf)
    shown = {"NLL": losses, "RMSE": last[rows[0], "rmse"], "DS": last[rows[0], "sharpness"]}
    shown |= {f"NLL, {TITLES[row]}": last[row, "nll"] for row in rows[1:]}
    shown |= {
        f"NLL after round {number + 1}": [statistics.fmean(each[number][rows[0]]["nll"]) for each in found]
        for number in range(rounds - 1)
    }
    run = f"{one.number} splits, {rounds} rounds of {plan.local_epochs} local epochs"
    return "\n\n".join(
        [
            f"{dataset}, {TITLES[rows[0]]}: {grid[best]:g} ({run})",
            markdown_table(
                ["validation", *map(str, grid)],
                [[name, *(f"{value:.3f}" for value in values)] for name, values in shown.items()],
            ),
        ]
    )


ByRound = list[dict[str, dict[str, list[float]]]]
"""Scores after every round: row → score → value per split."""


def at_once(splits: Splits, method: str, plan: Plan, grid: Sequence[float]) -> list[ByRound]:
    """Return the scores of every rate, all trained side by side."""
    copies = splits.repeated(len(grid))
    outcome = METHODS[method](copies, plan._replace(rate=torch.tensor(grid).repeat_interleave(splits.number)))
    every = [
        {row: scores_of(*each, copies.test[1], copies.target_std) for row, each in rows.items()}
        for rows in outcome.by_round
    ]
    return [
        [
            {
                row: {
                    name: values[place * splits.number : (place + 1) * splits.number] for name, values in scores.items()
                }
                for row, scores in rows.items()
            }
            for rows in every
        ]
        for place in range(len(grid))
    ]


def one_by_one(splits: Splits, method: str, plan: Plan, grid: Sequence[float]) -> list[ByRound]:
    """Return the scores of every rate, one trained after the other from the same start."""
    found = []
    for rate in grid:
        torch.manual_seed(plan.seed)
        outcome = METHODS[method](splits, plan._replace(rate=rate))
        found.append(
            [
                {row: scores_of(*each, splits.test[1], splits.target_std) for row, each in rows.items()}
                for rows in outcome.by_round
            ]
        )
    return found
