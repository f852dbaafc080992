"""Learning curves out of the folder of a CSVLogger."""

from __future__ import annotations

import csv
import math
from pathlib import Path

AXES = ("epoch", "step", "round")

Curves = dict[str, list[float]]
"""Metric → its value in rounds 1, 2, …; NaN where it was not logged."""


def read_curves(file: Path) -> Curves:
    """What a ``metrics.csv`` says of every round (epoch): the last value that was logged in it.

    Args:
        file: as a CSVLogger writes it, with a column "epoch" (from 0) and one per metric.
    """
    with open(file, newline="") as lines:
        rows = list(csv.DictReader(lines))
    rounds = 1 + max((int(float(row["epoch"])) for row in rows if row.get("epoch")), default=-1)
    names = [name for name in (rows[0] if rows else {}) if name not in AXES]
    curves: Curves = {name: [math.nan] * rounds for name in names}
    for row in rows:
        for name in names:
            if row.get("epoch") and row[name]:
                curves[name][int(float(row["epoch"]))] = float(row[name])
    return curves


def validated(curves: Curves) -> list[str]:
    """Names of the validation metrics, sorted."""
    return sorted(name for name in curves if name.startswith("val/"))
