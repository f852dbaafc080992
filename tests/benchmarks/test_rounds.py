"""The benchmark of widths by round: its cells, its smallest runs, and what its tables say."""

import json

import pytest

from benchmarks import cells as study
from benchmarks.posterior import rounds
from benchmarks.posterior.rounds import Cell


@pytest.mark.parametrize(
    "cell",
    [
        Cell("rounds", "digits", "pooled", 0),
        Cell("rounds", "digits", "sites", 0),
        Cell("rounds", "breast cancer", "fedavg", 0),
        Cell("rounds", "digits", "IVON + sites", 1),
        Cell("widths", "breast cancer", "sites", 0),
        Cell("networks", "wine", "last layer", 0, 1, 50, "local_reparameterization"),
    ],
    ids=lambda cell: f"{cell.study}-{cell.data}-{cell.method}",
)
def test_a_cell_runs(cell, monkeypatch):
    monkeypatch.setattr(rounds, "LOOKS", (1, 2))
    monkeypatch.setattr(rounds, "LONGEST", {})
    monkeypatch.setattr(rounds, "LAST", {"widths": 2, "networks": 20})
    monkeypatch.setattr(rounds, "WIDTHS", (1, 2))
    monkeypatch.setattr(rounds, "STEPS", 5)
    found = rounds.run(cell)
    looks = [found[key] for key in found if key.isdigit()]
    assert len(looks) == (1 if cell.method == "pooled" else 2)
    assert all(0 <= look["accuracy"] <= 1 and look["nll"] > 0 for look in looks)
    assert all((look["largest"] > 0) == (cell.method != "fedavg") for look in looks)


def test_each_estimator_trains_each_network_once_in_three_seeds():
    cells = [cell for cell in rounds.cells() if cell.study == "networks" and cell.method in ("default", "last layer")]
    kinds = {(cell.data, cell.method, cell.clients, cell.epochs) for cell in cells}
    assert len(kinds) == 6 * 2 * 2 * 2
    assert len(cells) == 3 * len(kinds)
    assert all(
        {cell.estimator for cell in cells if (cell.data, cell.method, cell.clients, cell.epochs) == kind}
        == set(rounds.ESTIMATORS)
        for kind in kinds
    )
    assert len(set(rounds.cells())) == len(rounds.cells())


def test_the_tables_compare_with_the_pooled_posterior_and_name_the_dead(tmp_path):
    look = {"accuracy": 0.9, "nll": 0.2, "mutual_information": 0.06, "median": 0.5, "largest": 0.9, "distance": 0.1}
    tenths = [str(number) for number in range(10, 301, 10)]
    pooled, sites = Cell("rounds", "digits", "pooled", 0), Cell("rounds", "digits", "sites", 0)
    lines = [
        {"cell": pooled._asdict(), "0": {**look, "mutual_information": 0.03}},
        {"cell": sites._asdict(), **dict.fromkeys(("20", "40", "60"), look)},
        {
            "cell": sites._replace(study="widths")._asdict(),
            **dict.fromkeys(("20", "60"), look),
            **{key: {**look, "nll": 0.1, "mutual_information": 0.04} for key in ("best 20", "best 60")},
        },
        {"cell": Cell("rules", "digits", "fedadam", 0)._asdict(), "error": "dead", "20": look},
        {"cell": Cell("networks", "wine", "pooled, default", 0)._asdict(), "0": look},
        {"cell": Cell("networks", "wine", "fedavg", 0)._asdict(), **dict.fromkeys(tenths, look)},
        {"cell": Cell("networks", "wine", "one client, default", 0)._asdict(), "20": look, "30": {**look, "nll": 0.5}},
        {
            "cell": Cell("networks", "wine", "default", 0)._asdict(),
            **dict.fromkeys(tenths, look),
            "70": {**look, "nll": 0.24, "largest": 1.1},
            "50": {**look, "mutual_information": 0.03},
        },
    ]
    file = tmp_path / "rounds.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    text = rounds.tables(study.read(file, Cell))
    assert "0.200 / 2.00 / 0.50" in text
    assert "2.00 ≤ 1.5: **no**" in text
    assert "| digits | 20 | 1 | 2.00 | 1.33 | 1.50 | 0.200 | 0.100 | 0.200 |" in text
    assert "| fedadam | 0.200 | died | died | died | +inf |" in text
    assert "+0.040 (70) | +0.300 | 1.00, 1.00; 0.50 (50) | 1.100 |" in text
