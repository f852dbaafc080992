"""The benchmark of widths by round: its cells, its smallest runs, and what its tables say."""

from __future__ import annotations

import pytest

from benchmarks.posterior import rounds
from benchmarks.posterior.rounds import Cell

pytestmark = pytest.mark.slow


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
