"""The study of distances from the pooled posterior: its figures against theory, small federations, its page."""

import json
import math
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from benchmarks import cells as study
from benchmarks.posterior import images, label_noise, logistic, nuts, peers, report, rounds, truth
from benchmarks.posterior.nuts import METHODS, PROBLEMS
from benchmarks.posterior.report import reached
from benchmarks.posterior.run import HERE, Cell, cells, result_of
from lightning_fedbayes.modules import mlp
from tests.benchmarks.test_readers import grey


def gaussian(mean: float, variance: float) -> fb.GaussianPosterior:
    return fb.GaussianPosterior({"w": torch.full((4,), mean)}, {"w": torch.full((4,), variance)})


def test_distances_of_gaussians_are_those_of_theory():
    pooled = gaussian(1.0, 0.25)
    assert logistic.distance(pooled, pooled) == pytest.approx((0.0, 0.0, 1.0))
    assert logistic.distance(gaussian(1.5, 0.25), pooled) == pytest.approx((0.5, 1.0, 1.0))
    assert logistic.distance(gaussian(1.0, 1.0), pooled) == pytest.approx(((3 - math.log(4)) / 2, 0.0, 4.0))


@pytest.fixture(scope="module")
def few():
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
    grey(tmp_path)
    monkeypatch.setattr(images, "IMAGES", 120)
    monkeypatch.setitem(images.STUDIES, "fashion_mnist", images.STUDIES["fashion_mnist"]._replace(rounds=1))
    monkeypatch.setitem(images.SPLITS, "IID", fb.IIDPartition(2))
    result = result_of(Cell("fashion_mnist", "IID", rule, "fixed", 0), tmp_path)
    assert 0 <= result["accuracy"] <= 1
    assert (result["mutual_information"] > 0) == (rule == "sites")
    parameters, gaussian = 44_426, 41_854  # of LeNet, and of its last three layers
    numbers = 2 * parameters + gaussian + 2 if rule == "sites" else parameters
    assert result["megabytes"] == pytest.approx(2 * 4e-6 * numbers)


@pytest.mark.parametrize(
    ("module", "file", "page"),
    [(report, "cells", "README"), (nuts, "nuts", "NUTS"), (rounds, "rounds", "ROUNDS")],
    ids=["distances", "nuts", "rounds"],
)
def test_the_pages_show_the_cells_that_are_stored(module, file, page):
    kind, order = (Cell, cells()) if module is report else (module.Cell, module.cells())
    done = study.read(HERE / "results" / f"{file}.jsonl", kind)
    assert module.tables(study.in_order(done, order)) in (HERE / f"{page}.md").read_text()


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
        *(nuts.Cell(NETWORK, method, 0) for method in METHODS[1:]),
        nuts.Cell(LINEAR, "sites", 1),
        nuts.Cell(LINEAR, METHODS[1], 1),
    ],
    ids=lambda cell: f"{cell.problem}-{cell.method}",
)
def test_a_cell_beside_nuts_runs(cell, monkeypatch):
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


@pytest.mark.parametrize(
    "cell",
    [
        rounds.Cell("rounds", "digits", "pooled", 0),
        rounds.Cell("rounds", "digits", "sites", 0),
        rounds.Cell("rounds", "breast cancer", "fedavg", 0),
        rounds.Cell("rounds", "digits", "IVON + sites", 1),
        rounds.Cell("widths", "breast cancer", "sites", 0),
        rounds.Cell("networks", "wine", "last layer", 0, 1, 50, "local_reparameterization"),
    ],
    ids=lambda cell: f"{cell.study}-{cell.data}-{cell.method}",
)
def test_a_cell_of_rounds_runs(cell, monkeypatch):
    monkeypatch.setattr(rounds, "LOOKS", (1, 2))
    monkeypatch.setattr(rounds, "LONGEST", {})
    monkeypatch.setattr(rounds, "LAST", {"widths": 2, "networks": 20})
    monkeypatch.setattr(rounds, "WIDTHS", (1, 2))
    monkeypatch.setattr(rounds, "STEPS", 5)
    found = rounds.run(cell)
    looks = [found[key] for key in found if key.isdigit()]
    assert len(looks) == (1 if cell.method == "pooled" else 2)
    assert all(0 <= look["accuracy"] <= 1 and look["nll"] > 0 for look in looks)
    assert all((look["largest"] > 0) == (cell.method != "fedavg") for look in looks)


@pytest.mark.parametrize("share", label_noise.SHARES)
def test_a_share_of_the_training_labels_is_wrong_and_none_of_those_held_out(share):
    noisy, clean = (label_noise.NoisyDigits(each, seed=1) for each in (share, 0.0))
    for data in (noisy, clean):
        data.setup("fit")
    (x, labels), (same, right) = noisy.train.tensors, clean.train.tensors
    wrong = labels != right
    assert torch.equal(x, same)
    assert int(wrong.sum()) == round(share * len(right))
    assert torch.equal(labels[wrong], 9 - right[wrong])
    assert torch.equal(noisy.validation.tensors[1], clean.validation.tensors[1])


@pytest.mark.parametrize("name", label_noise.METHODS)
def test_a_small_federation_of_every_method_is_scored(name, monkeypatch):
    monkeypatch.setattr(label_noise, "LOCAL_EPOCHS", 2)
    scores = label_noise.run(label_noise.METHODS[name], 0.2, seed=0, rounds=1)
    assert 0 < scores["nll"] < 2 * math.log(10)


@pytest.fixture
def dealt(tmp_path):
    """Forty examples of two classes at three clients, and the file that holds them."""
    rng = np.random.default_rng(0)
    labels, client = np.arange(40) % 2, np.repeat([2, 0, 5], [25, 10, 5])
    inputs = (255 * rng.random((40, 6)) * (0.1 + labels[:, None])).astype(np.float32)
    file = tmp_path / "split.npz"
    np.savez(file, inputs=inputs, labels=labels, client=client, test_inputs=inputs[:8], test_labels=labels[:8])
    return str(file), inputs, client


def test_every_example_is_at_the_client_that_it_was_dealt_to(dealt):
    file, inputs, client = dealt
    clients, test = peers.load(file, validate=False)
    assert list(clients) == ["0", "2", "5"]
    for number, own in clients.items():
        assert np.allclose(own.tensors[0], inputs[client == int(number)] / inputs.max())
    assert np.allclose(test.tensors[0], inputs[:8] / inputs.max())


def test_settings_are_chosen_on_a_fifth_of_every_clients_training_examples(dealt):
    file, inputs, _ = dealt
    clients, held = peers.load(file, validate=True)
    assert [len(own) for own in clients.values()] == [8, 20, 4]
    seen = np.concatenate([*(own.tensors[0] for own in clients.values()), held.tensors[0]]) * inputs.max()
    assert sorted(map(tuple, seen.round())) == sorted(map(tuple, inputs.round()))


def test_a_federation_beside_its_peers_is_scored(dealt):
    settings = {"rounds": 1, "local_epochs": 1, "batch": 8, "rate": 0.01, "kl_weight": 0.1, "seed": 0}
    options = Namespace(split=dealt[0], validate=False, rule="sites", **settings)
    scores = peers.run(options)
    assert 0 <= scores["accuracy"] <= 1
    assert scores["nll"] > 0
