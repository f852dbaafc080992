"""The image studies on tiny digits: they run, go on after a kill, and refuse what cannot be run before they train."""

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
import yaml

import lightning_fedbayes as fb
from benchmarks.images import run
from benchmarks.images.cell import check, make_rule
from benchmarks.images.data import make_data
from benchmarks.images.federation import PATIENCE, begin, run_cell
from benchmarks.images.report import METRICS, failures
from benchmarks.images.settings import Settings
from benchmarks.images.store import Store
from benchmarks.images.study import read_study
from benchmarks.published import rows
from tests.benchmarks.writer import put_many

CONFIGS = sorted((Path(run.__file__).parent / "configs").glob("*.yaml"))


def study(tmp_path: Path, **changes) -> Path:
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
    trained, kills = [], [KeyboardInterrupt]

    def counted(settings, *more):
        if trained and kills:
            raise kills.pop()
        trained.append(settings)
        return run_cell(settings, *more)

    monkeypatch.setattr(run, "run_cell", counted)
    with pytest.raises(KeyboardInterrupt):
        run.main(command(path))
    first = cells(path)
    assert [cell["settings"]["bayesian_last"] for cell in first] == [0]

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


def test_a_cell_is_reproducible():
    settings = Settings(rounds=1, local_epochs=1, examples=100, clients=3, partition="iid", validation_fraction=0.2)
    first, second = (run_cell(settings, None) for _ in range(2))
    for each in (first, second):
        each.pop("seconds")
        each["scores"].pop("seconds_per_round")
    assert first == second
    assert len(first["by_round"]) == 1
    assert all(
        curve[-1] == pytest.approx(first["scores"]["accuracy"], abs=1e-4) for curve in first["retained"].values()
    )


@pytest.mark.parametrize("start", ["bayesian", "moped"])
def test_a_federation_starts_from_a_pretrained_network(start):
    options = {"rounds": 1, "local_epochs": 1, "clients": 3, "partition": "iid", "batch_size": 16}
    settings = Settings(start=start, start_share=0.3, learning_rate=0.05, **options)
    data = make_data(settings, None)
    data.setup()
    torch.manual_seed(0)
    network, epochs = begin(settings, data)
    inputs, labels = data.test.tensors
    with torch.no_grad():
        accuracy = (network.eval()(inputs).argmax(-1) == labels).float().mean()
    assert epochs > PATIENCE
    assert accuracy > 0.5
    assert hasattr(network[-1], "mu_weight")


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


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_study_can_be_run_offline(config):
    read = read_study(config)
    for budget in read.budgets:
        every = read.cells(budget, seeds=2, offline=True)
        assert len(every) == len(set(every))
        for cell in every[: len(every) // 2]:
            check(cell, None)


def test_published_values_belong_to_cells():
    read = {config: read_study(config) for config in CONFIGS}
    cells = {
        config: [cell for budget in each.budgets for cell in each.cells(budget, seeds=1, offline=False)]
        for config, each in read.items()
    }
    for table in {table for each in read.values() for table in each.published}:
        using = [cell for config, each in read.items() if table in each.published for cell in cells[config]]
        for row in rows(table):
            wanted = {key: value for key, value in row.items() if key not in METRICS}
            assert any(all(getattr(cell, key) == value for key, value in wanted.items()) for cell in using), row


@pytest.mark.parametrize(
    "config", [each for each in CONFIGS if each.stem in ("dropout", "prior", "skew")], ids=lambda path: path.stem
)
def test_the_full_budget_is_that_of_the_paper(config):
    """[FBDL] §3.3 to §3.5: 400 rounds at E = 1 and 200 at E = 5, 5,000 images of a client, as many of each class."""
    cells = read_study(config).cells("full", seeds=1, offline=False)
    assert {(cell.rounds, cell.local_epochs) for cell in cells if cell.clients == 10} <= {(400, 1), (200, 5)}
    assert {(cell.validation_fraction, cell.examples, cell.network) for cell in cells} == {(None, None, "resnet20")}
    assert any(cell.partition == "classes(10)" for cell in cells)


def test_the_normalised_weighted_sum_keeps_the_variance_of_equal_clients():
    client = fb.GaussianPosterior({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, 3.0])})
    fused = fb.fuse(make_rule("normalised_weighted_sum"), [client, client, client], weights=[1.0, 2.0, 3.0])
    torch.testing.assert_close((fused.mean["w"], fused.variance["w"]), (client.mean["w"], client.variance["w"]))


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


def test_a_line_cut_short_is_ignored_and_reported(tmp_path, capsys):
    store, cells = Store(tmp_path / "cells.jsonl"), [Settings(seed=seed) for seed in (2, 1, 0)]
    for cell in cells:
        store.put(cell, {"steps": cell.seed})
    store.file.write_bytes(store.file.read_bytes()[:-5])
    assert list(store.finished(cells)) == cells[:2]
    assert "cells.jsonl, line 3: incomplete" in capsys.readouterr().err
    store.put(cells[2], {"steps": 7})  # on a line of its own
    assert [result["steps"] for result in store.finished(cells).values()] == [2, 1, 7]
    store.sort()
    assert [json.loads(line)["settings"]["seed"] for line in store.file.read_text().splitlines()] == [0, 1, 2]
    capsys.readouterr()
    assert len(store.finished(cells)) == 3
    assert not capsys.readouterr().err


def test_the_last_line_of_a_cell_counts_and_other_settings_are_another_cell(tmp_path):
    store, cell = Store(tmp_path / "cells.jsonl"), Settings()
    assert store.finished([cell]) == {}
    for steps in (1, 2):
        store.put(cell, {"steps": steps})
    store.sort()
    assert len(store.file.read_text().splitlines()) == 1
    assert [result["steps"] for result in store.finished([cell, cell.but(rounds=51)]).values()] == [2]
