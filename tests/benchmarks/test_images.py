"""The image studies on tiny digits: they run, go on after a kill, and refuse what cannot be run before they train."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from matplotlib.figure import Figure
from PIL import Image

import lightning_fedbayes as fb
from lightning_fedbayes.errors import FedBayesError, FederationError
from lightning_fedbayes.fusion.registry import unregister_fusion

from .modules import BENCHMARKS, modules_of

CONFIGS = sorted((BENCHMARKS / "images" / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def images():
    with modules_of("images") as modules:
        yield modules
        unregister_fusion("normalised_weighted_sum")


def study(tmp_path: Path, **changes) -> Path:
    """A small study with some keys changed."""
    content = {
        "title": "Test", "fixed": {"dataset": "digits", "clients": 3, "partition": "iid", "samples": 2},
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
    return [json.loads(file.read_text()) for file in sorted((path.parent / "out" / "cells").glob("*.json"))]


def test_a_killed_study_goes_on_without_repeating_cells(images, tmp_path, monkeypatch):
    path = study(
        tmp_path, published=[{"bayesian_last": 1, "nll": "0.12 ± 0.01"}],
        figures=[
            {"kind": "lines", "x": "bayesian_last", "series": "fusion", "metrics": ["nll"]},
            {"kind": "retained", "series": "fusion", "panels": "bayesian_last", "where": {"bayesian_last": [1]}},
            {"kind": "curves", "series": "fusion", "panels": "partition", "where": {"bayesian_last": [3]}},  # no cells
        ],
    )
    run, real, trained = images["run"], images["federation"].run_cell, []

    def killed_at_the_second(settings, *more):
        if trained:
            raise KeyboardInterrupt
        trained.append(settings)
        return real(settings, *more)

    monkeypatch.setattr(run, "run_cell", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run.main(command(path))
    first = cells(path)
    assert [cell["settings"]["bayesian_last"] for cell in first] == [0]

    def counted(settings, *more):
        trained.append(settings)
        return real(settings, *more)

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


def test_a_cell_is_reproducible(images):
    settings = images["settings"].Settings(
        rounds=1, local_epochs=1, examples=100, clients=3, partition="iid", validation_fraction=0.2
    )
    first, second = (images["federation"].run_cell(settings, None) for _ in range(2))
    for changing in ("seconds", "scores"):
        first_value, second_value = first.pop(changing), second.pop(changing)
        if changing == "scores":
            first_value.pop("seconds_per_round")
            second_value.pop("seconds_per_round")
            assert first_value == second_value
    assert first == second
    assert len(first["by_round"]) == 1
    assert all(curve[-1] == pytest.approx(first_value["accuracy"], abs=1e-4) for curve in first["retained"].values())


@pytest.mark.parametrize("start", ["bayesian", "moped"])
def test_a_federation_starts_from_a_pretrained_network(images, start):
    settings = images["settings"].Settings(
        rounds=1, local_epochs=1, clients=3, partition="iid", start=start, start_share=0.3, learning_rate=0.05,
        batch_size=16,
    )
    data = images["data"].make_data(settings, None)
    data.setup()
    torch.manual_seed(0)
    network, epochs = images["federation"].begin(settings, data)
    inputs, labels = data.test.tensors
    with torch.no_grad():
        accuracy = (network.eval()(inputs).argmax(-1) == labels).float().mean()
    assert epochs > images["federation"].PATIENCE
    assert accuracy > 0.5
    assert hasattr(network[-1], "mu_weight")


@pytest.mark.parametrize(("rounds", "reported"), [(2, "2 of 2 rounds could not be fused"), (4, "precision")])
def test_what_cannot_be_fused_is_kept_and_reported(images, tmp_path, rounds, reported):
    path = study(
        tmp_path, grids=[{"fusion": ["dwc"], "bayesian_last": [1], "rounds": [rounds]}],
        fixed={"dataset": "digits", "clients": 10, "partition": "iid", "kl_weight": 100},  # the prior is vaguer
    )
    images["run"].main(command(path))
    (cell,) = cells(path)
    assert ("error" in cell) == (rounds == 4)  # three such rounds in a row end a federation
    assert reported in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_study_can_be_run_offline(images, config):
    read = images["study"].read_study(config)
    for budget in read.budgets:
        every = read.cells(budget, seeds=2, offline=True)
        assert len(every) == len(set(every))
        for cell in every[: len(every) // 2]:
            images["federation"].check(cell, None)


def test_published_values_belong_to_cells(images):
    for config in CONFIGS:
        read = images["study"].read_study(config)
        full, metrics = read.cells("full", seeds=1, offline=False), images["report"].METRICS
        for row in read.published:
            wanted = {key: value for key, value in row.items() if key not in metrics}
            assert any(all(getattr(cell, key) == value for key, value in wanted.items()) for cell in full), row


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"titel": "x"}, "did you mean 'title'"),
        ({"fixed": {"fusoin": "x"}}, "did you mean 'fusion'"),
        ({"fixed": {"learning_rate": "1e-3"}}, "write 1.0e-3"),
        ({"grids": [{"fusion": "conflation"}]}, "list of values"),
        ({"grids": [{"fusion": ["conflatoin"]}]}, "did you mean 'conflation'"),
        ({"grids": [{"weighting": ["train_sise"]}]}, "did you mean 'train_size'"),
        ({"grids": [{"partition": ["dirichlet"]}]}, "alpha"),
        ({"grids": [{"partition": ["uniform(2)"]}]}, "unknown partition"),
        ({"grids": [{"optimizer": ["adma"]}]}, "did you mean 'adam'"),
        ({"grids": [{"optimizer": ["adam(rate=25)"]}]}, "unexpected keyword argument 'rate'"),
        ({"grids": [{"optimizer": ["adam(rho_rate=-25)"]}]}, "rho_rate=-25 has to be positive"),
        ({"grids": [{"optimizer": ["sgd(rho_rate='25')"]}]}, "rho_rate='25' has to be positive"),
        ({"grids": [{"bayesian_last": [4]}]}, "only 3 layers"),
        ({"grids": [{"dropout": [0.2], "bayesian_last": [1]}]}, "set bayesian_last to 0"),
        ({"grids": [{"fusion": ["auto"]}]}, "validation_fraction"),
        ({"metrics": ["acuracy"]}, "did you mean 'accuracy'"),
        ({"budgets": {"tiny": {}, "laptop": {}}}, "full is missing"),
        ({"figures": [{"kind": "lines", "series": "fusion", "x": "fusion"}]}, "metrics is missing"),
        ({"figures": [{"kind": "lines", "series": "fusion", "x": "fusion", "metrics": ["nll"], "where": {"seed": 0}}]},
         "seed=0 has to be a list of values"),
        ({"published": [{"fusion": "conflation", "acc": 1}]}, "unknown setting or metric"),
    ],
)
def test_mistakes_are_found_before_training(images, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(images["run"], "run_cell", lambda *_: pytest.fail("trained"))
    with pytest.raises(SystemExit) as error:
        images["run"].main(command(study(tmp_path, **changes)))
    assert message in str(error.value)


def test_an_unknown_budget_is_found_before_training(images, tmp_path):
    path = study(tmp_path)
    with pytest.raises(SystemExit, match="unknown budget 'laptpo'; did you mean 'laptop'"):
        images["run"].main([str(path), "--budget", "laptpo", "--out", str(tmp_path / "out")])


def test_missing_data_are_found_before_training(images, tmp_path):
    path = study(tmp_path, fixed={"dataset": "cifar10"})
    with pytest.raises(SystemExit, match="cifar"):
        images["run"].main(command(path, "--data", str(tmp_path)))
    with pytest.raises(SystemExit, match="unknown data set"):
        images["run"].main(command(study(tmp_path, fixed={"dataset": "cifar"}), "--data", str(tmp_path)))


@pytest.mark.parametrize(
    ("wanted", "message"), [("fusion", "KEY=VALUE"), ("fusoin=x", "did you mean"), ("bayesian_last=2", "no cell has")]
)
def test_only_names_cells(images, tmp_path, wanted, message):
    every = images["study"].read_study(study(tmp_path)).cells("tiny", 1, offline=True)
    with pytest.raises(FederationError, match=message):
        images["study"].only(every, [wanted])
    assert [cell.bayesian_last for cell in images["study"].only(every, ["bayesian_last=1"])] == [1]


@pytest.mark.parametrize("text", ["dirichlet(", "a.b(1)", "x + 1", "f(g(1))"])
def test_calls_that_cannot_be_read(images, text):
    with pytest.raises(FedBayesError, match="cannot be read"):
        images["settings"].parse_call(text)


def test_rho_is_trained_at_its_own_rate_and_without_weight_decay(images):
    settings = images["settings"].Settings(optimizer="adam(rho_rate=25)", learning_rate=0.001, weight_decay=0.1)
    network = fb.bayesianize(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), last=1)
    before = {name: value.clone() for name, value in network.named_parameters()}
    optimizer = images["optimizers"].make_optimizer(settings, network)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # the first step of Adam is the learning rate
    assert {"0.weight", "0.bias", "1.mu_weight", "1.rho_weight", "1.mu_bias", "1.rho_bias"} == set(before)
    for name, value in network.named_parameters():
        rate = 0.025 if "rho" in name else 0.001
        torch.testing.assert_close(value, before[name] - rate, rtol=0, atol=1e-6)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize("optimizer", ["sgd", "sgd(rho_rate=25)"])
def test_a_deterministic_network_has_one_group_of_parameters(images, optimizer):
    settings, network = images["settings"].Settings(optimizer=optimizer), torch.nn.Linear(3, 2)
    (group,) = images["optimizers"].make_optimizer(settings, network).param_groups
    assert (len(group["params"]), group["lr"], group["momentum"]) == (2, 0.01, 0.9)


def test_the_normalised_weighted_sum_keeps_the_variance_of_equal_clients(images):
    client = fb.GaussianPosterior({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, 3.0])})
    fused = fb.fuse("normalised_weighted_sum", [client, client, client], weights=[1.0, 2.0, 3.0])
    torch.testing.assert_close((fused.mean["w"], fused.variance["w"]), (client.mean["w"], client.variance["w"]))


def test_mean_and_error(images):
    assert images["report"].mean_and_error([1.0, 2.0, 3.0]) == pytest.approx((2.0, 3**-0.5))


def test_a_figure_keeps_the_colours_of_its_lines(images, tmp_path):
    figure, palette = Figure(figsize=(9.3, 3.5), layout="constrained"), images["figures"].PALETTE
    for panel, axes in enumerate(figure.subplots(1, 3)):
        for number, colour in enumerate(palette):
            across, up = ([1.0], [0.1]) if number == 0 else ([1, 2, 3], [number, 2.5 - panel, number**0.5])
            axes.errorbar(across, up, [0.3] * len(across), color=colour, marker="o", markersize=4, capsize=2)
    images["figures"].save(figure, tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as picture:
        counts = picture.convert("RGB").getcolors()
    for wanted in palette:
        red, green, blue = (int(wanted[place : place + 2], 16) for place in (1, 3, 5))
        assert any(count > 50 and max(abs(r - red), abs(g - green), abs(b - blue)) <= 4 for count, (r, g, b) in counts)
