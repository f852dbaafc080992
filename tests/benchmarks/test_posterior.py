"""The study of distances from the pooled posterior: its figures against theory, small federations, its page."""

import math

import pytest
import torch

import lightning_fedbayes as fb
from benchmarks.posterior import digits, logistic
from benchmarks.posterior.report import BEGIN, END, reached, tables
from benchmarks.posterior.run import HERE, Cell, include, keep, read


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
    sites, average = (logistic.run(few, pooled, clients, 15, 0, fusion=rule) for rule in ("sites", "weighted_average"))
    assert sites["kl"][-1] < 0.005 < 0.1 < average["kl"][-1]
    assert sites["mean_error"][-1] < 0.1
    assert sites["held_back"] == 0
    assert reached(sites) < 15
    assert reached(average) == math.inf


@pytest.mark.parametrize("partition", [digits.POOLED, fb.IIDPartition(3)], ids=["pooled", "federated"])
def test_a_small_federation_on_digits_is_scored(partition, monkeypatch):
    monkeypatch.setattr(digits, "LOCAL_EPOCHS", 8)
    scores = digits.run(partition, seed=0, rounds=1, hidden=8, fusion="sites")
    assert scores["accuracy"] > 0.3
    assert 0 < scores["nll"] < math.log(10)
    assert 0 < scores["mutual_information"] < math.log(10)


def test_cells_are_kept_and_a_page_takes_their_tables(tmp_path):
    cell = Cell("logistic", "IID", "sites", "fixed", 0)
    result = {"kl": [0.1, 0.01], "mean_error": [0.5, 0.1], "variance_ratio": [1.0, 1.0], "held_back": 0.0}
    keep(tmp_path / "cells.jsonl", cell, result)
    assert read(tmp_path / "cells.jsonl") == {cell: result}
    assert reached(result) == 2
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\noutdated\n{END}\nafter\n")
    include(page, tables({cell: result}))
    assert "outdated" not in page.read_text()
    assert page.read_text().startswith("before")
    assert page.read_text().endswith("after\n")


def test_the_page_shows_the_cells_that_are_stored():
    assert tables(read(HERE / "results" / "cells.jsonl")) in (HERE / "README.md").read_text()
