"""Truth by NUTS: networks of one vector, the best Gaussians, the smallest runs, and what the tables say."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import TensorDataset

from benchmarks.posterior import nuts, rounds, truth
from benchmarks.posterior.nuts import METHODS, PROBLEMS, Cell
from lightning_fedbayes.modules import mlp

pytestmark = pytest.mark.slow

LINEAR, NETWORK = "logistic regression, correlated items", "network, two moons"


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_vector_is_the_network_of_its_sizes(name):
    sizes = PROBLEMS[name].sizes
    network, inputs = mlp(sizes[0], sizes[-1], sizes[1:-1]), torch.randn(7, sizes[0])
    vector = torch.nn.utils.parameters_to_vector(network.parameters()).detach()
    assert len(vector) == truth.size(sizes)
    stacked = truth.outputs(torch.stack([vector, 2 * vector]), inputs, sizes)
    torch.testing.assert_close(stacked[0], network(inputs))
    torch.testing.assert_close(stacked[1], truth.outputs(2 * vector, inputs, sizes))


def test_the_best_gaussians_of_a_logistic_regression(monkeypatch):
    """Each is a maximum of the bound: mean field beside changes of it, and a full covariance above mean field."""
    data = TensorDataset(torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2)
    mean, variance = (each.float() for each in truth.mean_field(data))

    def bound(mean, root):
        torch.manual_seed(0)
        return float(truth.bound(mean, root, data, (3, 2), 2000))

    best = bound(mean, variance.sqrt().diag())
    for place in (0, 4, 7):
        for sign in (-1, 1):
            shift = torch.zeros(8).index_fill(0, torch.tensor(place), 0.3 * sign)
            assert bound(mean + shift, variance.sqrt().diag()) < best
            assert bound(mean, (variance.sqrt() * shift.exp()).diag()) < best
    monkeypatch.setattr(truth, "STEPS", 1000)
    assert bound(*truth.full_covariance(data, (3, 2))) > best


def test_without_data_every_gaussian_is_the_prior():
    data = TensorDataset(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long))
    mean, variance = truth.mean_field(data)
    torch.testing.assert_close(mean, torch.zeros_like(mean))
    torch.testing.assert_close(variance, torch.ones_like(variance))
    assert float(truth.bound(mean, variance.diag(), data, (2, 2), 3)) == pytest.approx(0)


@pytest.mark.parametrize(
    "cell",
    [
        *(Cell(NETWORK, method, 0) for method in METHODS[1:]),
        Cell(LINEAR, "sites", 1),
        Cell(LINEAR, METHODS[1], 1),
    ],
    ids=lambda cell: f"{cell.problem}-{cell.method}",
)
def test_a_cell_runs(cell, monkeypatch):
    monkeypatch.setattr(nuts, "ROUNDS", 2)
    monkeypatch.setattr(nuts, "LOOKS", (1, 2, 3))
    monkeypatch.setattr(rounds, "STEPS", 3)
    monkeypatch.setattr(truth, "STEPS", 3)
    problem = PROBLEMS[cell.problem]
    data = problem.data()
    data.setup("fit")
    exact = nuts.described(torch.randn(4, 50, truth.size(problem.sizes)), data, problem.sizes)
    found = nuts.run(cell, exact)
    assert 0 <= found["total_variation"] <= 1
    assert 0 <= found["coverage"] <= 1
    assert found["mutual_information"] >= 0
    if cell.problem == LINEAR and cell.method == "sites":
        assert list(found["distances"]) == ["1", "2"]
        assert found["distances"]["1"]["to_end"] > found["distances"]["2"]["to_end"] > 0
    json.dumps(found)
