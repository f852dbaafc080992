"""Predictions from the global posterior and from the clients: moments, the closed form, and what a checkpoint keeps."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes import FedBayesError, HybridBayesianRegressor
from lightning_fedbayes.modules import mlp
from tests.federations import trainer
from tests.refusals import refusals

FEATURES = 3


def examples(count=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.3 * torch.randn(count, 1, generator=generator))


def federated(network=None, rounds=2, engine="auto", clients=4, seed=0, **options):
    torch.manual_seed(seed)
    defaults = {"predictive": "bootstrap", "noise": "none", "samples": 200, "learning_rate": 0.05, "scaler": False}
    model = HybridBayesianRegressor(network or nn.Linear(FEATURES, 1), **{**defaults, **options})
    settings = {"fusion": "gaussian_fit", "engine": engine, "local_epochs": 3, "seed": seed}
    federation = fb.FederatedBayes(fb.IIDPartition(clients), **settings)
    run = trainer(rounds, [federation])
    run.fit(model, DataLoader(examples(), 5, shuffle=True))
    return model.eval(), federation, run


def test_bootstrap_draws_are_the_clients():
    """Eq. (4) and (5) with the weights that the clients sent."""
    model, federation, _ = federated(mlp(FEATURES, 1, (4,)))
    x = torch.randn(7, FEATURES)
    by_hand = []
    for client in model.global_round.clients:
        network = mlp(FEATURES, 1, (4,))
        network.load_state_dict({name.removeprefix("network."): value for name, value in client.mean.items()})
        by_hand.append(network(x).detach())
    prediction = model.predict_step(x)
    draws = torch.stack(by_hand)
    torch.testing.assert_close(prediction.samples, draws)
    torch.testing.assert_close(prediction.mean, draws.mean(0))
    torch.testing.assert_close(prediction.variance, draws.square().mean(0) - draws.mean(0) ** 2, atol=1e-5, rtol=1e-4)
    assert prediction.samples.shape == (4, 7, 1)
    for name, mean in federation.posterior.mean.items():
        stacked = torch.stack([client.mean[name] for client in model.global_round.clients])
        torch.testing.assert_close(mean, stacked.mean(0))
        torch.testing.assert_close(federation.posterior.variance[name], stacked.var(0, correction=0))


def test_monte_carlo_approaches_the_closed_form_of_a_linear_model():
    model, _, _ = federated(predictive="closed_form", noise="fixed", noise_std=0.5)
    x = torch.randn(20, FEATURES)
    exact = model.predict_step(x)
    model.predictive, model.samples = "omc", 40_000
    sampled = model.predict_step(x)
    error = exact.epistemic.sqrt() / math.sqrt(40_000)
    assert bool(((sampled.mean - exact.mean).abs() < 5 * error).all())
    torch.testing.assert_close(sampled.epistemic, exact.epistemic, rtol=0.04, atol=1e-7)
    torch.testing.assert_close(exact.aleatoric, torch.full_like(exact.aleatoric, 0.25))


def test_closed_form_is_equation_6():
    model, federation, _ = federated(predictive="closed_form")
    x = torch.randn(5, FEATURES)
    mean, variance = (federation.posterior.mean, federation.posterior.variance)
    prediction = model.predict_step(x)
    expected = x @ mean["network.weight"].T + mean["network.bias"]
    torch.testing.assert_close(prediction.mean, expected)
    expected = torch.einsum("bi,oi,bi->bo", x, variance["network.weight"], x) + variance["network.bias"]
    torch.testing.assert_close(prediction.epistemic, expected)


@pytest.mark.parametrize("predictive", ["omc", "bootstrap", "closed_form"])
def test_a_loaded_model_predicts_with_the_same_uncertainty(predictive, tmp_path):
    model, _, run = federated(predictive=predictive)
    run.save_checkpoint(tmp_path / "last.ckpt")
    loaded = HybridBayesianRegressor.load_from_checkpoint(
        tmp_path / "last.ckpt", network=nn.Linear(FEATURES, 1), weights_only=False
    ).eval()
    x = torch.randn(6, FEATURES)
    torch.manual_seed(1)
    expected = model.predict_step(x)
    torch.manual_seed(1)
    for one, other in zip(loaded.predict_step(x), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert float(expected.epistemic.min()) > 0


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_validation_scores_the_predictive_of_the_federation(engine):
    model = HybridBayesianRegressor(nn.Linear(FEATURES, 1), predictive="bootstrap", noise="residual")
    federation = fb.FederatedBayes(fb.IIDPartition(4), fusion="gaussian_fit", engine=engine)
    run = trainer(2, [federation])
    data = examples(30, seed=3)
    run.fit(model, DataLoader(examples(), 5, shuffle=True), DataLoader(data, 30))
    prediction = model.eval().predict_step(data.tensors[0])
    expected = torch.distributions.Normal(prediction.mean, prediction.variance.sqrt()).log_prob(data.tensors[1])
    assert float(run.callback_metrics["val/nll"]) == pytest.approx(-float(expected.mean()), rel=1e-5)
    assert float(prediction.epistemic.min()) > 0


def test_interval_holds_its_share_of_a_gaussian():
    model, _, _ = federated(noise="fixed", predictive="closed_form")
    prediction = model.predict_step(torch.randn(4, FEATURES))
    low, high = prediction.interval(0.9)
    normal = torch.distributions.Normal(prediction.mean, prediction.variance.sqrt())
    torch.testing.assert_close(normal.cdf(high) - normal.cdf(low), torch.full_like(low, 0.9))
    for level in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(FedBayesError, match="level"):
            prediction.interval(level)


test_wrong_arguments = refusals(
    FedBayesError,
    ({"predictive": "bootstrop"}, "bootstrap"),
    ({"noise": "learned"}, "learnt"),
    ({"noise": "none", "bayesian_last": 1}, "likelihood"),
    ({"predictive": "closed_form"}, "no closed form"),
    ({"predictive": "closed_form", "network": nn.Sequential(nn.Linear(3, 1), nn.ReLU())}, "no closed form"),
    ({"predictive": "closed_form", "network": nn.Conv1d(3, 1, 1)}, "no closed form"),
    call=lambda wrong: HybridBayesianRegressor(**{"network": mlp(3, 1), **wrong}),
)
