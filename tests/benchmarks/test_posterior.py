"""The study of distances from the pooled posterior: its figures against theory, small federations, its page."""

import math

import pytest
import torch

import lightning_fedbayes as fb
from benchmarks import cells as study
from benchmarks.page import BEGIN, END, include
from benchmarks.posterior import images, logistic
from benchmarks.posterior.report import fashion_mnist_bars, reached, rows_of, tables
from benchmarks.posterior.run import HERE, Cell, cells, result_of
from lightning_fedbayes.modules import mlp
from tests.benchmarks.image_files import write_idx


def gaussian(mean: float, variance: float) -> fb.GaussianPosterior:
    return fb.GaussianPosterior({"w": torch.full((4,), mean)}, {"w": torch.full((4,), variance)})


def test_distances_of_gaussians_are_those_of_theory():
    pooled = gaussian(1.0, 0.25)
    assert logistic.distance(pooled, pooled) == pytest.approx((0.0, 0.0, 1.0))
    assert logistic.distance(gaussian(1.5, 0.25), pooled) == pytest.approx((0.5, 1.0, 1.0))
    assert logistic.distance(gaussian(1.0, 1.0), pooled) == pytest.approx(((3 - math.log(4)) / 2, 0.0, 4.0))


@pytest.fixture(scope="module")
def few():
    """Eighty examples with six features."""
    inputs, labels = logistic.breast_cancer().tensors
    return logistic.TensorDataset(inputs[:80, -6:], labels[:80])


def test_the_pooled_posterior_is_where_the_elbo_is_stationary(few):
    module = logistic.LogisticRegression(6, len(few))
    fb.load_posterior(module, logistic.pooled_posterior(few))
    module.training_step(few.tensors, 0).backward()
    assert max(float(each.grad.abs().max()) for each in module.parameters()) < 1e-5


def test_sites_come_near_the_pooled_posterior_and_averages_do_not(few):
    pooled, clients = logistic.pooled_posterior(few), fb.SizesPartition((50, 20, 10))
    sites, average = (logistic.run(few, pooled, clients, 60, 0, fusion=rule) for rule in ("sites", "weighted_average"))
    assert sum(sites["kl"][-20:]) / 20 < 0.03 < 0.1 < min(average["kl"])  # six variances of noisy gradients
    assert sites["mean_error"][-1] < 0.1
    assert reached(sites) < 60
    assert reached(average) == math.inf


@pytest.mark.parametrize("partition", [images.POOLED, fb.IIDPartition(3)], ids=["pooled", "federated"])
def test_a_small_federation_on_digits_is_scored(partition):
    study = images.STUDIES["digits"]._replace(network=lambda: mlp(64, 10, [8]), rounds=1, local_epochs=8)
    scores = images.run(study, partition, seed=0, fusion="sites")
    assert scores["accuracy"] > 0.3
    assert 0 < scores["nll"] < math.log(10)
    assert 0 < scores["mutual_information"] < math.log(10)


@pytest.mark.parametrize("rule", ["sites", "fedavg"])
def test_the_images_in_a_folder_are_trained_on_and_scored(rule, tmp_path, monkeypatch):
    for part, count in (("train", 120), ("test", 40)):
        labels = torch.arange(count) % 10
        pixels = (torch.rand(count, 28, 28) * 255 * (labels + 1)[:, None, None] / 10).to(torch.uint8)
        write_idx(tmp_path, part, pixels.numpy()[:, None], labels.to(torch.uint8).numpy())
    monkeypatch.setattr(images, "IMAGES", 120)
    monkeypatch.setitem(images.STUDIES, "fashion_mnist", images.STUDIES["fashion_mnist"]._replace(rounds=1))
    monkeypatch.setitem(images.SPLITS, "IID", fb.IIDPartition(2))
    result = result_of(Cell("fashion_mnist", "IID", rule, "fixed", 0), tmp_path)
    assert 0 <= result["accuracy"] <= 1
    assert (result["mutual_information"] > 0) == (rule == "sites")
    parameters, gaussian = 44_426, 41_854  # of LeNet, and of its last three layers
    numbers = 2 * parameters + gaussian + 2 if rule == "sites" else parameters
    assert result["megabytes"] == pytest.approx(2 * 4e-6 * numbers)


def test_bars_compare_with_the_best_rule_of_the_same_seed_and_clients():
    def cell(rule, nll, ece, accuracy, split="Dirichlet(0.1)"):
        scores = {"nll": nll, "ece": ece, "accuracy": accuracy}
        return {Cell("fashion_mnist", split, rule, "fixed", 0): scores}

    results = {
        **cell("sites", 0.4, 0.05, 0.8),
        **cell("fedavg", 0.3, 0.01, 0.806),
        **cell("linear_pool", 0.5, 0.02, 0.7),
        **cell("conflation", 0.45, 0.09, 0.7),
        **cell("weighted_sum", 0.1, 0.0, 0.9, "IID"),
    }
    line = fashion_mnist_bars(rows_of(results, "fashion_mnist")).splitlines()[-1]
    assert [each.strip() for each in line.strip("|").split("|")] == [
        "Dirichlet(0.1)",
        "0",
        "0.400",
        "0.450 (conflation, fixed)",
        "0.050",
        "0.020 (linear_pool, fixed)",
        "-0.6",
        "yes",
        "**no**",
        "**no**",
    ]


def test_cells_are_kept_and_a_page_takes_their_tables(tmp_path):
    cell = Cell("logistic", "IID", "sites", "fixed", 0)
    result = {"kl": [0.1, 0.01], "mean_error": [0.5, 0.1], "variance_ratio": [1.0, 1.0]}
    study.keep(tmp_path / "cells.jsonl", cell, result)
    assert study.read(tmp_path / "cells.jsonl", Cell) == {cell: result}
    assert reached(result) == 2
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\noutdated\n{END}\nafter\n")
    include(page, tables({cell: result}))
    assert "outdated" not in page.read_text()
    assert page.read_text().startswith("before")
    assert page.read_text().endswith("after\n")


def test_the_page_shows_the_cells_that_are_stored():
    assert (
        tables(study.in_order(study.read(HERE / "results" / "cells.jsonl", Cell), cells()))
        in (HERE / "README.md").read_text()
    )
