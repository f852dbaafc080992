"""UCI regression: shapes, scales and splits of a folder made on the spot, and what is said of damaged ones."""

import json
import math
import re
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.distributions import Normal
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from benchmarks.page import BEGIN, END
from benchmarks.uci import report, run
from benchmarks.uci.data import CLIENTS, Splits, deal
from benchmarks.uci.methods import METHODS, ROWS, TITLES, Outcome
from benchmarks.uci.network import networks
from benchmarks.uci.plans import EVERYWHERE, SMALLER, study
from benchmarks.uci.rates import CHOSEN, SHORT_GRID, tune
from benchmarks.uci.readings import PREDICTIONS, STARTS, TARGETS, compare, start_by_glorot
from benchmarks.uci.report import Store
from benchmarks.uci.sets import UCIDataModule
from benchmarks.uci.training import Plan
from lightning_fedbayes.data import labels_of
from lightning_fedbayes.metrics.functional import gaussian_crps, gaussian_nll
from lightning_fedbayes.modules import mlp
from tests import federations


def write(path, rows):
    path.write_text("\n".join(" ".join(f"{value:.17g}" for value in row) for row in rows) + "\n")


def write_set(data, values, features, target, tests):
    """A data set in the layout of Hernández-Lobato and Adams, whose splits test some of the rows."""
    data.mkdir(parents=True)
    write(data / "data.txt", values.tolist())
    write(data / "index_features.txt", [[each] for each in features])
    write(data / "index_target.txt", [[target]])
    write(data / "n_splits.txt", [[len(tests)]])
    for split, test in enumerate(tests):
        write(data / f"index_test_{split}.txt", [[each] for each in test])
        write(data / f"index_train_{split}.txt", [[each] for each in range(len(values)) if each not in test])


@pytest.fixture
def folder(tmp_path):
    """A data set "toy" of 40 examples in columns feature, constant, another target, target, feature; three splits."""
    generator = torch.Generator().manual_seed(0)
    values = 50 + 7 * torch.randn(40, 5, generator=generator, dtype=torch.float64)
    values[:, 1] = 0.998
    values[:, 3] = 100 + values[:, 0] - 2 * values[:, 4]
    data = tmp_path / "sets" / "toy" / "data"
    write_set(data, values, (0, 1, 4), 3, [torch.randperm(40, generator=generator)[:8].tolist() for _ in range(3)])
    return data


def build(folder, **options):
    return UCIDataModule(folder.parents[1], folder.parent.name, **options)


def ready(folder, **options):
    module = build(folder, **options)
    module.setup("fit")
    return module


def values_of(folder):
    rows = [[float(v) for v in line.split()] for line in (folder / "data.txt").read_text().splitlines()]
    return torch.tensor(rows, dtype=torch.float64)


def indices_of(folder, part, split=0):
    return [int(line) for line in (folder / f"index_{part}_{split}.txt").read_text().split()]


@pytest.mark.parametrize("split", range(3))
def test_the_published_split_standardised_on_its_training_part(folder, split):
    data = ready(folder, split=split)
    values, train, test = values_of(folder), indices_of(folder, "train", split), indices_of(folder, "test", split)
    mean, std = values[train].mean(0), values[train].std(0, correction=0)
    for part, rows in ((data.train, train), (data.test, test)):
        x, y = part.tensors
        assert (x.shape, y.shape) == ((len(rows), 3), (len(rows), 1))
        assert x.dtype == y.dtype == torch.float32
        assert torch.allclose(x[:, [0, 2]].double(), ((values - mean) / std)[rows][:, [0, 4]], atol=1e-6)
        assert torch.equal(x[:, 1], torch.zeros(len(rows)))
        assert torch.allclose(data.target_mean + data.target_std * y.double(), values[rows][:, 3:4], atol=1e-4)
    assert isinstance(data.train, TensorDataset)
    assert labels_of(data.train) is None


def test_scores_go_to_original_units(folder):
    data = ready(folder)
    y, mean, variance = torch.randn(3, 20, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    variance = variance.exp()
    m, s = data.target_mean, data.target_std
    original = Normal(m + s * mean, s * variance.sqrt())
    nll = gaussian_nll(mean, variance, y).squeeze() + math.log(s)
    assert torch.allclose(nll, -original.log_prob(m + s * y).squeeze())
    crps = gaussian_crps(m + s * mean, s**2 * variance, m + s * y)
    assert torch.allclose(crps, s * gaussian_crps(mean, variance, y))


def test_validation_is_the_test_split_or_a_part_of_training(folder):
    published, tuning = ready(folder), ready(folder, validation_fraction=0.25)
    again = ready(folder, seed=1, validation_fraction=0.25)
    targets = {
        name: torch.cat([y for _, y in getattr(published, f"{name}_dataloader")()])
        for name in ("val", "test", "predict")
    }
    assert torch.equal(targets["val"], published.test.tensors[1])
    assert torch.equal(targets["test"], targets["val"])
    assert torch.equal(targets["predict"], targets["val"])
    assert (len(tuning.train), len(tuning.validation), len(tuning.test)) == (24, 8, 8)

    def original(module, part):
        y = getattr(module, part).tensors[1].double()
        return (module.target_mean + module.target_std * y).flatten()

    everything = torch.cat([original(tuning, "train"), original(tuning, "validation")]).sort().values
    assert torch.allclose(everything, original(published, "train").sort().values, atol=1e-4)
    assert torch.allclose(original(tuning, "test"), original(published, "test"), atol=1e-4)
    assert tuning.train.tensors[1].mean().abs() < 1e-6  # not of the examples that are held out
    assert tuning.target_mean != published.target_mean
    assert not torch.equal(tuning.validation.tensors[1], again.validation.tensors[1])


def test_ten_clients_learn_from_it_and_the_checkpoint_is_plain(folder, tmp_path):
    L.seed_everything(0, verbose=False)
    data = build(folder, batch_size=1)
    model = fb.HybridBayesianRegressor(mlp(data.num_features, 1, (8,)), bayesian_last=1, learning_rate=0.02)
    federation = fb.FederatedBayes(fb.IIDPartition(10), local_epochs=3)
    trainer = federations.trainer(6, [federation], default_root_dir=tmp_path)
    trainer.fit(model, datamodule=data)
    assert trainer.callback_metrics["val/rmse"] < 0.7
    trainer.save_checkpoint(tmp_path / "federation.ckpt")
    checkpoint = torch.load(tmp_path / "federation.ckpt", weights_only=True)
    assert checkpoint["datamodule_hyper_parameters"]["dataset"] == "toy"


RESULTS = Path(run.__file__).parent / "results"
NINE = tuple(sorted(Store(RESULTS).entries))
PLAN = Plan(0.01, rounds=2, local_epochs=1, hidden=4)


def splits_of(number: int = 2, examples: int = 40) -> Splits:
    """Two features, and a target that is linear in them with noise of 0.1."""
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(examples, number, 2, generator=source)
    targets = inputs @ torch.tensor([0.8, -0.6]) + 0.1 * torch.randn(examples, number, generator=source)
    return Splits((inputs, targets), (inputs[:7], targets[:7]), torch.ones(number))


@pytest.fixture
def two(tmp_path):
    """Two data sets of two splits, in the layout of Hernández-Lobato and Adams."""
    for name, seed in (("yacht", 0), ("made", 1)):
        rows = torch.randn(30, 3, generator=torch.Generator().manual_seed(seed))
        write_set(tmp_path / "data" / name / "data", rows, (0, 1), 2, [range(3), range(3, 6)])
    return tmp_path


@pytest.fixture
def call(two, monkeypatch):
    def call(*arguments: str, out: str = "out") -> dict:
        given = ["run", "--data", str(two / "data"), "--out", str(two / out), *arguments]
        monkeypatch.setattr(sys, "argv", given)
        run.main()
        return json.loads((two / out / "scores.json").read_text())

    return call


SHORT = ("--methods", "blr", "network", "--rounds", "2", "--local-epochs", "1")


@pytest.mark.parametrize("method", METHODS)
def test_a_method_predicts_after_every_round(method):
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
    assert len(NINE) == 9
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


@pytest.mark.parametrize("method", ["network", "vi"])
def test_the_choice_of_a_rate_has_a_page(call, two, method, monkeypatch):
    with pytest.raises(FileNotFoundError):  # no scores
        call("--tune", "--datasets", "yacht", "--methods", method, "--rounds", "2", "--local-epochs", "1")
    page = (two / "out" / "rates.md").read_text()
    assert "NLL after round 1" in page
    assert re.search(rf"yacht, {TITLES[ROWS.get(method, (method,))[0]]}: [\d.]+ \(2 splits, 2 rounds of 1 local", page)


def test_the_rate_with_the_lowest_loss_is_chosen(two, monkeypatch):
    """Of a method whose error is |rate − 0.003|, and which diverges at the least rate."""

    def method(splits: Splits, plan: Plan) -> Outcome:
        shift = float("nan") if plan.rate == SHORT_GRID[0] else 1000 * abs(plan.rate - 0.003)
        targets = splits.test[1]
        return Outcome([{"vi": (targets + shift, torch.ones_like(targets))}], 0.0, 0, "")

    monkeypatch.setitem(METHODS, "vi", method)
    assert "yacht, VI, pooled: 0.003 (" in tune(two / "data", "yacht", "vi", PLAN, 2)


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


def test_every_reading_is_scored_by_every_prediction():
    splits = splits_of()
    rows = compare(splits, 7.0, [0.01, 0.02], PLAN).splitlines()[2:]
    assert len(rows) == 2 * len(STARTS) * len(TARGETS) * 2 * len(PREDICTIONS)
    assert all(math.isfinite(float(row.split("|")[6])) for row in rows)


def test_glorots_start_has_the_variance_that_it_is_named_for():
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
