"""Cells of the study, and the few that are smaller than the published ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.uci.methods import METHODS
from benchmarks.uci.rates import chosen
from benchmarks.uci.training import Plan

LOCAL_EPOCHS = 40
"""E of [FedAG]."""
WIDE = ("protein", "year")
"""Beginnings of the names of data sets with 100 hidden units in the paper."""
LARGE = ("kin8nm", "naval", "power", "protein", "year")
"""Beginnings of the names of data sets on which only the methods of :data:`EVERYWHERE` run."""
EVERYWHERE = ("blr", "linear", "network", "mean_variance")
ON_BOSTON = ("ensemble", "vi_rklb", "vi_wb", "vi_lp")
"""Methods that run on Boston alone."""


class Smaller(NamedTuple):
    """Budget of a cell for which the published one is too long.

    Attributes:
        splits: number of splits; None for all.
        local_epochs: E.
    """

    splits: int | None = None
    local_epochs: int = LOCAL_EPOCHS


SMALLER: dict[tuple[str, str], Smaller] = {
    ("kin8nm", "network"): Smaller(local_epochs=10),
    ("power-plant", "network"): Smaller(local_epochs=10),
    ("kin8nm", "mean_variance"): Smaller(local_epochs=2),
    ("power-plant", "mean_variance"): Smaller(local_epochs=2),
    ("naval-propulsion-plant", "mean_variance"): Smaller(local_epochs=2),
    ("protein-tertiary-structure", "mean_variance"): Smaller(local_epochs=2),
}
"""Data set and method → their budget."""


def study(datasets: Sequence[str], methods: Sequence[str] | None) -> Iterable[tuple[str, str]]:
    """Yield the cells, data set and method, the short ones of a data set first.

    Args:
        methods: those of every data set; None for those of the study.
    """
    for method in methods or METHODS:
        for dataset in datasets:
            name = dataset.lower()
            is_left_out = name.startswith(LARGE) and method not in EVERYWHERE
            if methods or not (is_left_out or (method in ON_BOSTON and not name.startswith("boston"))):
                yield dataset, method


def plan_of(
    dataset: str, method: str, rounds: int, local_epochs: int | None, splits: int | None
) -> tuple[Plan, int | None]:
    """Return the plan of a cell and its number of splits, None for all.

    Args:
        rounds: of networks.
        local_epochs, splits: in place of those of the study.
    """
    smaller = SMALLER.get((dataset, method), Smaller())
    hidden = 100 if dataset.lower().startswith(WIDE) else 50
    plan = Plan(chosen(dataset, method), rounds, local_epochs or smaller.local_epochs, hidden)
    return plan, splits or smaller.splits
