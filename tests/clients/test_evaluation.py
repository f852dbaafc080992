"""Scores of every client, what is held out, and the choice of a personal posterior."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.clients.evaluation import ClientScores
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.core.posterior import GaussianPosterior
from tests.federations import FEATURES, Plain, bayesian, blobs, clients, network
from tests.refusals import refusals


def test_every_client_is_scored_on_its_own_data_whatever_the_batches():
    module, data = network(), clients(40, 7, 13)
    predictive = fb.PosteriorPredictive(module, fb.read_posterior(module))
    scores = fb.evaluate_clients(predictive, data, batch_size=np.int64(5))
    for k, part in enumerate(data.datasets):
        x, y = part.tensors
        logits = module(x).detach()
        assert float(scores.values["nll"][k]) == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-5)
        assert float(scores.values["accuracy"][k]) == pytest.approx(float((logits.argmax(1) == y).float().mean()))
    x, y = (torch.cat(each) for each in zip(*(part.tensors for part in data.datasets)))
    assert scores.mean("nll") == pytest.approx(float(nn.functional.cross_entropy(module(x).detach(), y)), rel=1e-5)


def test_a_regressor_is_scored_in_root_mean_squares_nats_and_coverage():
    layer = nn.Linear(FEATURES, 1)
    x = torch.randn(4000, FEATURES, generator=torch.Generator().manual_seed(0))
    y = layer(x).detach() + 0.5 * torch.randn(4000, 1, generator=torch.Generator().manual_seed(1))
    data = fb.ClientDatasets({"a": TensorDataset(x[:1000], y[:1000, 0]), "b": TensorDataset(x[1000:], y[1000:, 0])})
    predictive = fb.PosteriorPredictive(layer, fb.read_posterior(layer), likelihood=fb.Gaussian(0.5))
    scores = fb.evaluate_clients(predictive, data)
    assert scores.mean("rmse") == pytest.approx(0.5, abs=0.02)
    assert scores.mean("coverage") == pytest.approx(0.9, abs=0.015)
    entropy = 0.5 * math.log(2 * math.pi * math.e * 0.25)
    assert scores.mean("nll") == pytest.approx(entropy, abs=0.04)


def test_scores_do_not_depend_on_the_state_of_the_generators_and_leave_it_alone():
    module, data = network(), clients(20, 10)
    wide = fb.read_posterior(module)
    posterior = GaussianPosterior(wide.mean, {name: torch.full_like(value, 0.1) for name, value in wide.mean.items()})
    predictive, values = fb.PosteriorPredictive(module, posterior), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before, drawn = torch.get_rng_state(), random.getstate()
        values.append(fb.evaluate_clients(predictive, data).mean("nll"))
        assert torch.equal(before, torch.get_rng_state())
        assert random.getstate() == drawn
    assert values[0] == values[1]


def test_the_worst_are_the_lowest_accuracies_and_the_highest_of_the_rest():
    values = torch.linspace(0, 1, 21)
    scores = ClientScores(tuple(map(str, range(21))), (1,) * 21, {"accuracy": values, "nll": values})
    assert scores.worst("accuracy") == pytest.approx(0.05)  # three of 21, as for accuracies elsewhere
    assert scores.worst("nll") == pytest.approx(0.95)
    assert scores.worst("nll", 1.0) == pytest.approx(0.5)
    assert scores.spread("nll") == pytest.approx(float(values.std(correction=0)))


def test_a_client_without_a_value_counts_nowhere():
    values = {"val/accuracy": torch.tensor([0.5, math.nan, 1.0]), "nll": torch.tensor([1.0, 2.0, 3.0])}
    scores = ClientScores(("a", "b", "c"), (10, 1000, 30), values)
    assert scores.mean("val/accuracy") == 0.875
    assert (scores.worst("val/accuracy"), scores.spread("val/accuracy")) == (0.5, 0.25)


def test_what_is_held_out_and_the_rest_are_all_of_a_client_and_do_not_depend_on_the_others():
    rest, held = fb.hold_out(clients(20, 2, 5), 0.2)
    assert [len(part) for part in held.datasets] == [4, 1, 1]
    assert [len(part) for part in rest.datasets] == [16, 1, 4]
    for first, second, size in zip(rest.datasets, held.datasets, (20, 2, 5)):
        assert sorted([*first.indices, *second.indices]) == list(range(size))
    assert fb.hold_out(clients(20, 9), 0.2)[1].datasets[0].indices == held.datasets[0].indices
    assert fb.hold_out(clients(20, 9), 0.2, seed=1)[1].datasets[0].indices != held.datasets[0].indices


def test_the_weight_is_the_one_of_the_lowest_held_out_nll_and_a_tie_goes_to_the_global_posterior():
    """The network is right at 0.5 and the further from it the worse."""
    layer = nn.Linear(1, 1, bias=False)
    x = torch.linspace(-1, 1, 50)[:, None]

    def posterior_of(weight: float) -> GaussianPosterior:
        return GaussianPosterior.point_mass({"weight": torch.full((1, 1), weight)})

    options = {"likelihood": fb.Gaussian(1.0)}
    weight, scores = fb.choose_personal_weight(posterior_of, layer, TensorDataset(x, 0.5 * x), **options)
    assert weight == 0.5
    assert scores[0.25] < scores[0.0] == pytest.approx(scores[1.0])
    assert fb.choose_personal_weight(posterior_of, layer, TensorDataset(0 * x, x), (1.0, 0.0), **options)[0] == 0.0


LINE = nn.Linear(1, 1)
NAN = TensorDataset(torch.full((4, 1), torch.nan), torch.zeros(4, 1))


def test_a_personal_weight_without_a_finite_score_is_not_chosen():
    """NaN is not smaller than anything, and was the first."""
    posteriors = {0.0: torch.nan, 0.5: 2.0, 1.0: 1.0}
    x, net = torch.ones(4, 1), nn.Linear(1, 1, bias=False)

    def posterior_of(weight: float) -> GaussianPosterior:
        return GaussianPosterior.point_mass({"weight": torch.tensor([[posteriors[weight]]])})

    options = {"weights": (0.0, 0.5, 1.0), "likelihood": fb.Gaussian(1.0)}
    weight, scores = fb.choose_personal_weight(posterior_of, net, TensorDataset(x, x), **options)
    assert weight == 1.0
    assert math.isnan(scores[0.0])


test_what_cannot_be_scored_is_refused = refusals(
    FedBayesError,
    (lambda: fb.evaluate_clients(Plain(), clients(5)), "fb.PosteriorPredictive"),
    (lambda: fb.evaluate_clients({}, clients(5)), "no module for client c0"),
    (lambda: fb.evaluate_clients(Plain(), blobs()), "ClientDatasets"),
    (lambda: fb.evaluate_clients(bayesian(), fb.ClientDatasets({"a": [None, None]})), "make no batch"),
    (lambda: fb.evaluate_clients(bayesian(), fb.ClientDatasets({"a": torch.zeros(3, 6)})), "a batch is"),
    (lambda: fb.evaluate_clients(Plain(), fb.ClientDatasets({"a": TensorDataset(torch.zeros(0, 6))})), "no example"),
    (lambda: fb.hold_out(clients(1, 5)), "client c0 has 1 examples"),
    (lambda: fb.hold_out(clients(5), 1.0), "fraction=1.0"),
    (lambda: fb.choose_personal_weight(lambda w: None, Plain(), TensorDataset(torch.zeros(0))), "held_out has no"),
    (lambda: fb.choose_personal_weight(lambda w: None, Plain(), blobs(), ()), "weights is empty"),
    (
        lambda: fb.choose_personal_weight(lambda w: fb.read_posterior(LINE), LINE, NAN, likelihood=fb.Gaussian()),
        "the noise is not known",
    ),
    (
        lambda: fb.choose_personal_weight(lambda w: fb.read_posterior(LINE), LINE, NAN, likelihood=fb.Gaussian(1)),
        "not finite by e",
    ),
)
