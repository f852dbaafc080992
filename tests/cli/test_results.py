"""Curves, the file and the table of a comparison, and what cannot be drawn."""

import csv
import json
import math
import statistics

import pytest

from lightning_fedbayes.cli import results
from lightning_fedbayes.cli.results import Run, metrics_of, read_curves
from lightning_fedbayes.core.tables import markdown_table

NAN = math.nan


def test_the_table_has_moments_over_seeds_of_the_last_round():
    scores = [0.2, 0.5, 0.9]
    runs = [
        Run(
            "a",
            seed,
            {
                "val/nll": [5.0, score, NAN],
                "val/retained_area_entropy": [1.0],
                "federation/seconds": [9.0, 1.0, 2.0],
                "federation/megabytes_up": [1.0, 2.0, 3.0],
                "federation/megabytes_down": [4.0, 4.0, 4.0],
            },
        )
        for seed, score in enumerate(scores)
    ]
    columns, rows = results.table([*runs, Run("b", 0, {"val/ece": [0.125]})])
    assert columns == ["fusion", "seeds", "ece", "nll", "s per round", "MB per round"]
    moments = f"{statistics.fmean(scores):.4g} ± {statistics.stdev(scores):.2g}"
    assert rows[0] == ["a", "3", "nan", moments, "2", "6"]
    assert rows[1] == ["b", "1", "0.125", "nan", "nan", "0"]
    assert markdown_table(columns, rows).count("\n") == 3


def test_results_come_back_from_their_file_with_nan(elsewhere):
    runs = [Run("a", 3, {"x": [0.1, NAN, 1e-12], "y": []})]
    results.save(elsewhere, {"trainer": {"max_time": None}}, runs)
    json.loads((elsewhere / results.FILE).read_text(), parse_constant=pytest.fail)  # JSON knows no NaN
    configuration, again = results.load(elsewhere)
    assert configuration == {"trainer": {"max_time": None}}
    assert repr(again) == repr(runs)
    assert [each.name for each in elsewhere.iterdir()] == [results.FILE]


def write(file, *rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(file, "w", newline="") as lines:
        writer = csv.DictWriter(lines, names)
        writer.writeheader()
        writer.writerows(rows)


def test_the_last_value_of_an_epoch_is_its_rounds(elsewhere):
    file = elsewhere / "metrics.csv"
    write(
        file,
        {"epoch": 0, "step": 3, "val/nll": 2.0},
        {"epoch": 0, "step": 4, "train/nll": 9.0, "round": 1.0},
        {"epoch": 0, "step": 5, "val/nll": 1.5},
        {"epoch": 2, "step": 9, "val/nll": 0.5},
        {"step": 9, "val/nll": 7},
    )
    curves = read_curves(file)
    assert set(curves) == {"val/nll", "train/nll"}
    assert repr(curves["val/nll"]) == "[1.5, nan, 0.5]"
    assert repr(curves["train/nll"]) == "[9.0, nan, nan]"
    assert metrics_of([Run("conflation", 0, curves)]) == ["val/nll"]
