"""The benchmark on UCI data: its cells, a run that is stopped and goes on, every method, and what its pages say."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.page import BEGIN, END
from benchmarks.uci import report, run
from benchmarks.uci.data import CLIENTS, Splits, deal
from benchmarks.uci.methods import METHODS, ROWS, TITLES, Outcome
from benchmarks.uci.network import networks
from benchmarks.uci.plans import EVERYWHERE, SMALLER, plan_of, study
from benchmarks.uci.rates import CHOSEN, SHORT_GRID, tune
from benchmarks.uci.readings import PREDICTIONS, STARTS, TARGETS, compare, start_by_glorot
from benchmarks.uci.report import Store, departure, missing, one_network, verdict
from benchmarks.uci.scores import Published
from benchmarks.uci.training import Plan

RESULTS = Path(run.__file__).parent / "results"
NINE = (
    "bostonHousing",
    "concrete",
    "energy",
    "kin8nm",
    "naval-propulsion-plant",
    "power-plant",
    "protein-tertiary-structure",
    "wine-quality-red",
    "yacht",
)
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


def test_the_noise_is_the_difference_of_two_rows():
    rows = METHODS["network"](splits_of(), PLAN).predictions
    noise = rows["fedag_noise"][1] - rows["fedag"][1]
    assert torch.allclose(noise, noise[:1].expand_as(noise))  # one number per split
    rows = METHODS["linear"](splits_of(examples=400), PLAN._replace(local_epochs=20)).predictions
    noise = 1 + rows["fedag_linear"][1] - rows["fedag_linear_target"][1]
    assert torch.allclose(noise, torch.tensor(0.01), rtol=0.3)  # 0.1²; a training error, over the last hundred examples


def test_sites_cost_three_times_what_a_network_costs():
    """And the noise, a buffer, and two numbers for all splits."""
    torch.manual_seed(0)
    sent = {method: METHODS[method](splits_of(), PLAN).upload for method in ("network", "sites", "ivon_sites")}
    assert sent["sites"] == sent["ivon_sites"] == 3 * sent["network"] + round(4 + 8 / splits_of().number)


def test_pooled_training_takes_the_steps_of_a_client():
    plan = PLAN.pooled()
    (pooled,), shards = deal(splits_of().train, 0, plan.clients).datasets, deal(splits_of().train, 0).datasets
    assert len(shards) == CLIENTS
    assert len(pooled) / plan.batch_size == len(shards[0]) / PLAN.batch_size


def test_the_study_has_nine_data_sets_and_every_row():
    cells = list(study(NINE, None))
    assert len(set(cells)) == len(cells)
    assert all((dataset, method) in cells for dataset in NINE for method in EVERYWHERE)
    assert {method for _, method in cells} == set(METHODS)
    assert set(TITLES) == {row for method in METHODS for row in ROWS.get(method, (method,))}
    assert set(SMALLER) <= set(cells)
    assert list(study(["kin8nm"], ["sites"])) == [("kin8nm", "sites")]  # what is asked for by name


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


@pytest.mark.parametrize("method", ["network", "vi"])
def test_the_choice_of_a_rate_has_a_page(call, folder, method, monkeypatch):
    with pytest.raises(FileNotFoundError):  # no scores
        call("--tune", "--datasets", "yacht", "--methods", method, "--rounds", "2", "--local-epochs", "1")
    page = (folder / "out" / "rates.md").read_text()
    assert "NLL after round 1" in page
    assert re.search(rf"yacht, {TITLES[ROWS.get(method, (method,))[0]]}: [\d.]+ \(2 splits, 2 rounds of 1 local", page)


def test_the_rate_with_the_lowest_loss_is_chosen(folder, monkeypatch):
    """Of a method whose error is |rate − 0.003|, and which diverges at the least rate."""

    def method(splits: Splits, plan: Plan) -> Outcome:
        shift = float("nan") if plan.rate == SHORT_GRID[0] else 1000 * abs(plan.rate - 0.003)
        targets = splits.test[1]
        return Outcome([{"vi": (targets + shift, torch.ones_like(targets))}], 0.0, 0, "")

    monkeypatch.setitem(METHODS, "vi", method)
    assert "yacht, VI, pooled: 0.003 (" in tune(folder / "data", "yacht", "vi", PLAN, 2)


def test_chosen_rates_are_those_of_the_page():
    titles = {"linear": TITLES["fedag_linear"], "network": TITLES["fedag"]}
    page = (RESULTS / "rates.md").read_text()
    for dataset, rates in CHOSEN.items():
        for method, rate in rates.items():
            title = titles.get(method, TITLES.get(method, ""))
            assert re.search(rf"^{dataset}, {re.escape(title)}: {rate:g} \(", page, re.MULTILINE), (dataset, method)


def test_the_pages_are_those_of_the_scores(tmp_path):
    (tmp_path / "scores.json").write_text((RESULTS / "scores.json").read_text())
    text = report.write(Store(tmp_path))
    page = (RESULTS.parent / "README.md").read_text()
    assert page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip() == text
    for name in ("tables.md", "settings.md"):
        assert (RESULTS / name).read_text() == (tmp_path / name).read_text()
    assert (RESULTS / "rounds.png").stat().st_size <= 100_000


def test_what_the_paper_has_is_there_for_nine_data_sets():
    store = Store(RESULTS)
    assert tuple(sorted(store.entries)) == NINE
    for dataset, method in study(NINE, ("blr", "linear", "network")):
        plan, splits = plan_of(dataset, method, 5, None, None)
        wanted = run.settings(method, plan, splits or (5 if dataset.startswith("protein") else 20))
        for row in ROWS.get(method, (method,)):
            assert store.holds(dataset, row, wanted), (dataset, row)


def test_what_is_not_there_is_named():
    text = missing({"yacht": {row: {} for row in TITLES if row != "vi"}, "kin8nm": {"blr": {}}})
    assert text.startswith("Not run yet: FedAG linear, t = 1: kin8nm;")
    assert text.endswith("VI, pooled: yacht.")
    assert missing({"bostonHousing": {row: {} for row in TITLES}}).startswith("Every cell")


def test_what_is_smaller_than_published_is_marked():
    entry = {"local_epochs": 40, "scores": {"nll": [0.0] * 20}}
    assert departure("yacht", entry) == ""
    assert departure("protein-tertiary-structure", entry) == " (20 splits)"
    assert departure("yacht", {**entry, "local_epochs": 2, "scores": {"nll": [0.0] * 5}}) == " (E = 2, 5 splits)"


def test_a_score_is_compared_in_published_standard_errors():
    assert verdict(0.98, Published(0.99, 0.02)) == "better"
    assert verdict(1.029, Published(0.99, 0.02)) == "within 2 s.e."
    assert verdict(1.05, Published(0.99, 0.02)) == "**3.0 s.e. worse**"
    assert verdict(1.003, Published(0.99, 0.0)) == "**2.6 s.e. worse**"
    assert report.mean_and_error([1.0, 2.0, 3.0, 6.0]) == (3.0, pytest.approx((14 / 3) ** 0.5 / 2))


def test_networks_alone_are_as_much_worse_than_their_mean_as_they_disagree():
    outputs, target = torch.randn(10, generator=torch.Generator().manual_seed(0)).double(), 0.3
    rmse, spread = abs(outputs.mean() - target), outputs.var(correction=0).sqrt()
    assert one_network(float(rmse), float(spread)) == pytest.approx(float((outputs - target).square().mean().sqrt()))


def test_every_reading_is_scored_by_every_prediction():
    splits = splits_of()
    rows = compare(splits, 7.0, [0.01, 0.02], PLAN).splitlines()[2:]
    assert len(rows) == 2 * len(STARTS) * len(TARGETS) * 2 * len(PREDICTIONS)
    assert all(math.isfinite(float(row.split("|")[6])) for row in rows)


def test_glorots_start_has_the_variance_that_it_is_named_for():
    torch.manual_seed(0)
    network = networks(400, 11, 50)
    before = [each.detach().clone() for each in network.parameters()]
    where = torch.arange(400) >= 200
    start_by_glorot(network, where)
    for (path, after), old in zip(network.named_parameters(), before):
        assert torch.equal(after[~where], old[~where])
        if path.endswith("bias"):
            assert not after[where].any()
        else:
            fan_in, fan_out = (11, 50) if path.startswith("0") else (50, 1)
            assert float(after[where].detach().var()) == pytest.approx(2 / (fan_in + fan_out), rel=0.05)
