"""Truth by NUTS: networks of one vector, the best Gaussians, the smallest runs, and what the tables say."""

import json
import sys

import pytest
import torch
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from benchmarks import cells as study
from benchmarks.posterior import nuts, rounds, truth
from benchmarks.posterior.nuts import FULL, METHODS, NUTS, PROBLEMS, Cell
from lightning_fedbayes.modules import mlp

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


def test_rhat_is_1_for_equal_chains_and_large_for_others():
    torch.manual_seed(0)
    chains = torch.randn(4, 2000, 3)
    assert float(truth.split_rhat(chains).max()) < 1.01
    assert float(truth.split_rhat(torch.zeros(4, 10))) == 1
    apart = chains + torch.arange(4.0)[:, None, None]
    torch.testing.assert_close(truth.split_rhat(apart), torch.full((3,), (1 + 8 / 7 * 1.25) ** 0.5), atol=0.05, rtol=0)
    drifting = chains + torch.linspace(0, 3, 2000)[:, None]
    assert float(truth.split_rhat(drifting).min()) > 1.2


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


def test_draws_of_the_truth_itself_are_at_no_distance():
    torch.manual_seed(0)
    data, sizes = PROBLEMS[LINEAR].data(), PROBLEMS[LINEAR].sizes
    data.setup("fit")
    inputs, targets = data.validation.tensors
    chains = 0.3 * torch.randn(4, 1000, truth.size(sizes))
    exact = nuts.described(chains, data, sizes)
    assert exact["rhat"] < 1.02
    same = nuts.compared(truth.outputs(0.3 * torch.randn(4000, truth.size(sizes)), inputs, sizes), targets, exact)
    assert same["total_variation"] < 0.01
    assert same["coverage"] == pytest.approx(0.9, abs=0.02)
    assert same["mutual_information"] == pytest.approx(exact["mutual_information"], rel=0.05)
    narrow = nuts.compared(truth.outputs(0.1 * torch.randn(4000, truth.size(sizes)), inputs, sizes), targets, exact)
    assert narrow["coverage"] < 0.6


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


def test_nuts_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpyro.infer", None)
    with pytest.raises(fb.FedBayesError, match="pip install"):
        truth.nuts(TensorDataset(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long)), (2, 2))


def test_nuts_of_no_data_gives_the_prior(monkeypatch):
    pytest.importorskip("numpyro")
    monkeypatch.setattr(truth, "WARMUP", 200)
    monkeypatch.setattr(truth, "KEPT", 500)
    data = TensorDataset(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long))
    draws = truth.nuts(data, (1, 2))
    assert draws.shape == (4, 500, 4)
    assert float(draws[..., :2].std()) == pytest.approx(1, abs=0.1)  # a weight of the input 0
    assert float(draws[..., 2].mean()) > 0.2  # the bias of the class


def test_the_tables_compare_with_nuts_and_name_what_did_not_converge(tmp_path):
    look = {"accuracy": 0.9, "nll": 0.3, "mutual_information": 0.06, "total_variation": 0.05, "coverage": 0.7}
    trail = {"30": {"estimated": 0.2, "to_mean_field": 0.5, "to_end": 0.4, "width": 0.5}}
    found = {
        Cell(LINEAR, NUTS, 0): {
            "accuracy": 0.9,
            "nll": 0.2,
            "mutual_information": 0.03,
            "rhat": 1.05,
            "draws": 8000,
            "probs": [[0.5, 0.5]],
            "points": [[0.0]],
        },
        Cell(LINEAR, "mean field, pooled", 0): {**look, "bound": -5.0, "to_mean_field": 0.01},
        Cell(LINEAR, FULL, 0): {**look, "bound": -6.0},
        Cell(LINEAR, "sites", 0): {**look, "distances": trail},
        Cell(LINEAR, "reverse_kl_barycenter", 0): look,
        Cell("no such problem", "sites", 0): look,
    }
    file = tmp_path / "nuts.jsonl"
    file.write_text("\n".join(json.dumps({"cell": cell._asdict(), **each}) for cell, each in found.items()))
    done = study.in_order(study.read(file, Cell), nuts.cells())
    assert len(done) == 5
    text = nuts.tables(done)
    assert "1.0500 (**too large**)" in text
    assert "| sites | 1 | +0.1000 | 0.0500 | 2.00 (2.00 to 2.00) | 0.70 |" in text
    assert "| full covariance, pooled | 1 | did not converge |" in text
    assert "| reverse_kl_barycenter | 1 | " in text
    assert "| 30 | 1 | 0.2 | 0.4 | 0.5 | 0.50 (0.50) |" in text
    nuts.draw(done, tmp_path / "nuts.png")
    assert (tmp_path / "nuts.png").stat().st_size < 100_000


def test_every_federated_method_has_seeds_and_the_truth_comes_first():
    found = nuts.cells()
    assert len(set(found)) == len(found)
    assert [cell.method for cell in found[: len(PROBLEMS)]] == [NUTS] * len(PROBLEMS)
    assert sum(cell.method == "sites" for cell in found) >= 2 * len(PROBLEMS)
