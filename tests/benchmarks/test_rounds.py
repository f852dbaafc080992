"""The benchmark of widths by round: its cells, its smallest runs, and what its tables say."""

from __future__ import annotations

import json

import pytest

from benchmarks.posterior import rounds
from benchmarks.posterior.rounds import GRID, LEVELS, Cell


@pytest.mark.parametrize("cell", [
    Cell("rounds", "digits", "pooled", 0), Cell("rounds", "digits", "sites", 0),
    Cell("rounds", "breast cancer", "fedavg", 0), Cell("rounds", "digits", "IVON + sites", 1),
    Cell("widths", "breast cancer", "sites", 0),
    Cell("grid", "breast cancer", "sites", 0, 0.3, 1.0, 1, "local_reparameterization"),
], ids=lambda cell: f"{cell.study}-{cell.data}-{cell.method}")
def test_a_cell_runs(cell, monkeypatch):
    monkeypatch.setattr(rounds, "LOOKS", (1, 2))
    monkeypatch.setattr(rounds, "LONGEST", {})
    monkeypatch.setattr(rounds, "LAST", 2)
    monkeypatch.setattr(rounds, "WIDTHS", (1, 2))
    monkeypatch.setattr(rounds, "STEPS", 5)
    found = rounds.run(cell)
    looks = [found[key] for key in found if key.isdigit()]
    assert len(looks) == (1 if cell.method == "pooled" else 2)
    assert all(0 <= look["accuracy"] <= 1 and look["nll"] > 0 for look in looks)
    assert all((look["largest"] > 0) == (cell.method != "fedavg") for look in looks)


def test_every_two_levels_of_two_factors_meet_in_the_grid():
    assert len(GRID) >= 60
    for first in range(len(LEVELS)):
        for second in range(first):
            assert len({(row[first], row[second]) for row in GRID}) == len(LEVELS[first]) * len(LEVELS[second])
    assert len(set(rounds.cells())) == len(rounds.cells())


def test_the_tables_compare_with_the_pooled_posterior_and_name_the_dead(tmp_path):
    look = {"accuracy": 0.9, "nll": 0.2, "mutual_information": 0.06, "median": 0.5, "largest": 0.9, "distance": 0.1}
    pooled, sites = Cell("rounds", "digits", "pooled", 0), Cell("rounds", "digits", "sites", 0)
    lines = [
        {"cell": pooled._asdict(), "0": {**look, "mutual_information": 0.03}},
        {"cell": sites._asdict(), **dict.fromkeys(("20", "40", "60"), look)},
        {"cell": sites._replace(study="widths")._asdict(), **dict.fromkeys(("20", "60"), look),
         **{key: {**look, "nll": 0.1, "mutual_information": 0.04} for key in ("best 20", "best 60")}},
        {"cell": Cell("grid", "digits", "sites", 0)._asdict(), "error": "dead", "40": look},
        {"cell": Cell("grid", "digits", "sites", 0, 0.3)._asdict(), "40": look,
         "200": {**look, "nll": 0.24, "largest": 1.1}},
    ]
    file = tmp_path / "rounds.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    text = rounds.tables(rounds.read(file))
    assert "0.200 / 2.00 / 0.50" in text
    assert "2.00 ≤ 1.5: **no**" in text
    assert "| digits | 20 | 1 | 2.00 | 1.33 | 1.50 | 0.200 | 0.100 | 0.200 |" in text
    assert "1 died" in text
    assert "the largest σ of all is 1.10" in text
    assert "in 0 the NLL of round 200" in text


def test_the_default_is_held_beside_averaging():
    def path(*losses: float) -> dict:
        return {str(number): {"nll": loss, "median": 0.5} for number, loss in zip((10, 20, 30, 200), losses)}

    done = {Cell("long", "digits", "default", 1): path(9, 0.2, 0.15, 0.1),
            Cell("long", "digits", "fedavg", 1): path(0.5, 0.3, 0.11, 0.4)}
    text = rounds.beside_averaging(done)
    assert "| digits | default | 1 | 0.200 | 0.100 | 0.300 | 0.400 | +0.040 (round 30) |" in text


def test_rules_that_get_worse_come_first_and_the_dead_before_them():
    look = {"nll": 0.2, "median": 0.5}
    done = {Cell("long", "digits", "sites", 0): {"20": look, "200": {**look, "nll": 0.1}},
            Cell("long", "digits", "conflation", 0): {"20": look},
            Cell("long", "digits", "ivar_vb", 0): {"20": look, "200": {**look, "nll": 0.5}}}
    rows = rounds.grown(done).splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["conflation", "ivar_vb", "sites"]
    assert "+0.300" in rows[1]
    assert "-0.100" in rows[2]
