"""The benchmark on UCI data: its cells, a run that is stopped and goes on, every method, and what its pages say."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks.uci import run
from benchmarks.uci.data import Splits
from benchmarks.uci.methods import METHODS, ROWS, Outcome
from benchmarks.uci.training import Plan

pytestmark = pytest.mark.slow

PLAN = Plan(0.01, rounds=2, local_epochs=1, hidden=4)


def splits_of(number: int = 2, examples: int = 40) -> Splits:
    """Two features, and a target that is linear in them with noise of 0.1."""
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(examples, number, 2, generator=source)
    targets = inputs @ torch.tensor([0.8, -0.6]) + 0.1 * torch.randn(examples, number, generator=source)
    return Splits((inputs, targets), (inputs[:7], targets[:7]), torch.ones(number))


@pytest.fixture
def folder(tmp_path):
    """Two data sets of two splits, in the layout of Hernández-Lobato and Adams."""
    for name, seed in (("yacht", 0), ("made", 1)):
        data = tmp_path / "data" / name / "data"
        data.mkdir(parents=True)
        rows = torch.randn(30, 3, generator=torch.Generator().manual_seed(seed)).tolist()
        files = {
            "data": "\n".join(" ".join(map(str, row)) for row in rows),
            "index_features": "0\n1",
            "index_target": "2",
            "n_splits": "2",
        }
        for split in range(2):
            test = range(3 * split, 3 * split + 3)
            files[f"index_test_{split}"] = "\n".join(map(str, test))
            files[f"index_train_{split}"] = "\n".join(str(each) for each in range(30) if each not in test)
        for file, text in files.items():
            (data / f"{file}.txt").write_text(text)
    return tmp_path


@pytest.fixture
def call(folder, monkeypatch):
    """Run the command on the two data sets."""

    def call(*arguments: str, out: str = "out") -> dict:
        given = ["run", "--data", str(folder / "data"), "--out", str(folder / out), *arguments]
        monkeypatch.setattr(sys, "argv", given)
        run.main()
        return json.loads((folder / out / "scores.json").read_text())

    return call


SHORT = ("--methods", "blr", "network", "--rounds", "2", "--local-epochs", "1")


@pytest.mark.parametrize("method", METHODS)
def test_a_method_predicts_after_every_round(method):
    torch.manual_seed(0)
    outcome = METHODS[method](splits_of(), PLAN)
    assert len(outcome.by_round) == (1 if method in ("blr", "linear") else PLAN.rounds)
    for rows in outcome.by_round:
        assert tuple(rows) == ROWS.get(method, (method,))
        assert all(mean.shape == variance.shape == (7, 2) for mean, variance in rows.values())
        assert all(bool(mean.isfinite().all()) and bool((variance > 0).all()) for mean, variance in rows.values())
    assert (outcome.upload == 0) == (method in ("vi", "deep_ensemble"))


def test_a_run_that_is_stopped_goes_on_where_it_was(call, monkeypatch):
    whole = call(*SHORT, out="whole")
    true, trained = METHODS["network"], []

    def fails_once(splits: Splits, plan: Plan) -> Outcome:
        trained.append(splits.features)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return true(splits, plan)

    monkeypatch.setitem(METHODS, "network", fails_once)
    with pytest.raises(KeyboardInterrupt):
        call(*SHORT)
    resumed = call(*SHORT)
    assert len(trained) == 3
    assert {name: {row: entry["scores"] for row, entry in each.items()} for name, each in resumed.items()} == {
        name: {row: entry["scores"] for row, entry in each.items()} for name, each in whole.items()
    }
    call(*SHORT)
    assert len(trained) == 3
    call(*SHORT, "--splits", "1")  # another cell, in place of the one before
    assert len(trained) == 5
    call(*SHORT, "--splits", "1", "--again")
    assert len(trained) == 7


def test_the_command_writes_its_pages(call, folder):
    call(*SHORT)
    out = folder / "out"
    table = (out / "tables.md").read_text()
    assert "| yacht | FedAG network, t = 5 (E = 1, 2 splits) |" in table
    assert "| 1.92 ± 0.06 |" in table
    assert "| made | VI, pooled |" not in table
    assert "| yacht | VI, pooled |  | 3.44 ± 0.16 |" in table
    assert "DIR" in (out / "settings.md").read_text()
    assert str(folder) not in (out / "settings.md").read_text()
    assert (out / "rounds.png").stat().st_size > 1000
