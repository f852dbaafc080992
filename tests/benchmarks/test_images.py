"""The image studies on tiny digits: they run, go on after a kill, and refuse what cannot be run before they train."""

import json
import multiprocessing
from pathlib import Path

import pytest
import yaml

from benchmarks.images import run
from benchmarks.images.federation import run_cell
from benchmarks.images.report import failures
from benchmarks.images.settings import Settings
from benchmarks.images.store import Store

from .writer import put_many

pytestmark = pytest.mark.slow


def study(tmp_path: Path, **changes) -> Path:
    """A small study with some keys changed."""
    content = {
        "title": "Test",
        "fixed": {"dataset": "digits", "clients": 3, "partition": "iid", "samples": 2},
        "grids": [{"bayesian_last": [0, 1], "fusion": ["weighted_average"]}],
        "budgets": {"tiny": {"rounds": 2, "local_epochs": 1, "examples": 100}, "laptop": {}, "full": {}},
        "metrics": ["accuracy", "ece100", "nll"],
        **changes,
    }
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def command(path: Path, *more: str) -> list[str]:
    return [str(path), "--budget", "tiny", "--seeds", "1", "--out", str(path.parent / "out"), *more]


def cells(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path.parent / "out" / "cells.jsonl").read_text().splitlines()]


def test_a_killed_study_goes_on_without_repeating_cells(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.images.study.rows", lambda table: [{"bayesian_last": 1, "nll": "0.12 ± 0.01"}])
    path = study(
        tmp_path,
        published=["any table"],
        figures=[
            {"kind": "lines", "x": "bayesian_last", "series": "fusion", "metrics": ["nll"]},
            {"kind": "retained", "series": "fusion", "panels": "bayesian_last", "where": {"bayesian_last": [1]}},
            {"kind": "curves", "series": "fusion", "panels": "partition", "where": {"bayesian_last": [3]}},  # no cells
            {"kind": "curves", "series": "fusion", "panels": "bayesian_last"},  # no held-out images
        ],
    )
    trained = []

    def killed_at_the_second(settings, *more):
        if trained:
            raise KeyboardInterrupt
        trained.append(settings)
        return run_cell(settings, *more)

    monkeypatch.setattr(run, "run_cell", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run.main(command(path))
    first = cells(path)
    assert [cell["settings"]["bayesian_last"] for cell in first] == [0]

    def counted(settings, *more):
        trained.append(settings)
        return run_cell(settings, *more)

    monkeypatch.setattr(run, "run_cell", counted)
    run.main(command(path))
    assert [settings.bayesian_last for settings in trained] == [0, 1]
    assert cells(path)[0] == first[0]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "0.12 ± 0.01" in report
    assert "tiny" in report
    pictures = sorted(file.name for file in (tmp_path / "out").glob("*.png"))
    assert pictures == ["digits_0_lines.png", "digits_1_retained.png"]
    assert all((tmp_path / "out" / name).stat().st_size < 100_000 for name in pictures)

    (tmp_path / "out" / "report.md").unlink()  # tables rebuild without training
    run.main(command(path))
    assert len(trained) == 2
    assert (tmp_path / "out" / "report.md").read_text() == report


@pytest.mark.parametrize("rounds", [2, 4])  # three in a row end a federation, and so does a fit that has fused none
def test_what_cannot_be_fused_is_kept_and_reported(tmp_path, rounds):
    path = study(
        tmp_path,
        grids=[{"fusion": ["dwc"], "bayesian_last": [1], "rounds": [rounds]}],
        fixed={"dataset": "digits", "clients": 10, "partition": "iid", "kl_weight": 100},  # the prior is vaguer
    )
    run.main(command(path))
    (cell,) = cells(path)
    assert f"{min(rounds, 3)} rounds in a row could not be fused" in cell["error"]
    assert "precision" in (tmp_path / "out" / "report.md").read_text()
    part = failures({Settings(rounds=rounds): {"failed_rounds": 1}}, ["fusion"])
    assert f"1 of {rounds} rounds could not be fused and left the posterior as it was" in part


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"titel": "x"}, "did you mean 'title'"),
        ({"fixed": {"fusoin": "x"}}, "did you mean 'fusion'"),
        ({"fixed": {"learning_rate": "1e-3"}}, "write 1.0e-3"),
        ({"grids": [{"fusion": "conflation"}]}, "list of values"),
        ({"grids": [{"fusion": ["conflation"], "budgets": {"ful": {"rounds": 1}}}]}, "did you mean 'full'"),
        ({"grids": [{"fusion": ["conflation"], "budgets": {"full": {"rounds": "1"}}}]}, "has to be a whole number"),
        ({"grids": [{"fusion": ["conflatoin"]}]}, "did you mean 'conflation'"),
        ({"grids": [{"weighting": ["train_sise"]}]}, "did you mean 'train_size'"),
        ({"grids": [{"partition": ["dirichlet"]}]}, "alpha"),
        ({"grids": [{"partition": ["uniform(2)"]}]}, "unknown partition"),
        ({"grids": [{"optimizer": ["adma"]}]}, "has to be 'sgd' or 'adam'"),
        ({"grids": [{"bayesian_last": [4]}]}, "only 3 layers"),
        ({"grids": [{"dropout": [0.2], "bayesian_last": [1]}]}, "set bayesian_last to 0"),
        ({"grids": [{"fusion": ["auto"]}]}, "validation_fraction"),
        ({"metrics": ["acuracy"]}, "did you mean 'accuracy'"),
        ({"budgets": {"tiny": {}, "laptop": {}}}, "full is missing"),
        ({"figures": [{"kind": "lines", "series": "fusion", "x": "fusion"}]}, "metrics is missing"),
        (
            {
                "figures": [
                    {"kind": "lines", "series": "fusion", "x": "fusion", "metrics": ["nll"], "where": {"seed": 0}}
                ]
            },
            "seed=0 has to be a list of values",
        ),
        ({"published": ["fbdl tabel 2"]}, "did you mean 'fbdl table 2'"),
        ({"published": ["fedag table 2"]}, "unknown setting or metric 'blr'"),
    ],
)
def test_mistakes_are_found_before_training(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(run, "run_cell", lambda *_: pytest.fail("trained"))
    with pytest.raises(SystemExit) as error:
        run.main(command(study(tmp_path, **changes)))
    assert message in str(error.value)


def test_processes_that_share_a_store_lose_no_cell(tmp_path):
    file, context = tmp_path / "cells.jsonl", multiprocessing.get_context("spawn")
    processes = [context.Process(target=put_many, args=(file, 40 * number)) for number in range(2)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        Store(file).sort()
    assert [process.exitcode for process in processes] == [0, 0]
    finished = Store(file).finished(Settings(seed=seed) for seed in range(81))
    assert {cell.seed: result["by_round"][-1] for cell, result in finished.items()} == {s: s for s in range(80)}
