"""Bayesian linear regression: its posterior, the federation that equals the pooled data, and what it refuses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes import BayesianLinearRegression, FedBayesError
from tests.refusals import refusals

FEATURES, TARGETS, NOISE_STD = 4, 2, 0.6


def examples(count=80, features=FEATURES, seed=0, targets=TARGETS):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=generator, dtype=torch.float64)
    w = torch.randn(features, targets, generator=generator, dtype=torch.float64)
    return x, x @ w + 0.4 + NOISE_STD * torch.randn(count, targets, generator=generator, dtype=torch.float64)


def with_bias(x):
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def assert_same(one, other, inputs, tolerance=1e-8):
    options = {"rtol": tolerance, "atol": tolerance}
    for name in ("precision", "precision_mean", "mean", "covariance"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), **options)
    assert one.noise_variance == pytest.approx(other.noise_variance, rel=tolerance)
    for field, expected in zip(one.predict(inputs)[:4], other.predict(inputs)[:4]):
        torch.testing.assert_close(field, expected, **options)


def marginal(x, y, variance, prior_std):
    """The targets' distribution with the weights integrated out, N(0, σ² I + s² X Xᵀ)."""
    design = with_bias(x)
    covariance = variance * torch.eye(len(x), dtype=x.dtype) + prior_std**2 * design @ design.T
    return torch.distributions.MultivariateNormal(torch.zeros_like(y.T), covariance).log_prob(y.T).sum()


@pytest.mark.parametrize("count", [1, 3, 80])
def test_prediction_is_the_conditional_of_the_joint_gaussian(count):
    """Conditioning the joint distribution of old and new targets uses no posterior of weights at all."""
    x, y = examples(count)
    new, s, variance = torch.randn(6, FEATURES, dtype=torch.float64), 1.3, 0.25
    prediction = BayesianLinearRegression.fit(x, y, prior_std=s, noise=variance).predict(new)
    old_design, new_design = with_bias(x), with_bias(new)
    marginal = s**2 * old_design @ old_design.T + variance * torch.eye(len(x), dtype=x.dtype)
    gain = s**2 * new_design @ old_design.T @ torch.linalg.inv(marginal)
    torch.testing.assert_close(prediction.mean, gain @ y)
    covariance = s**2 * (new_design @ new_design.T - gain @ old_design @ new_design.T)
    torch.testing.assert_close(prediction.epistemic, covariance.diagonal().unsqueeze(1).expand(6, TARGETS))
    torch.testing.assert_close(prediction.aleatoric, torch.full((6, TARGETS), variance, dtype=torch.float64))
    torch.testing.assert_close(prediction.variance, prediction.aleatoric + prediction.epistemic)


def test_draws_have_the_moments_of_the_closed_form():
    model, draws = BayesianLinearRegression.fit(*examples(10), noise=0.3), 40_000
    prediction = model.predict(torch.randn(5, FEATURES), draws, torch.Generator().manual_seed(0))
    error = (prediction.samples.mean(0) - prediction.mean).abs() / (prediction.epistemic / draws).sqrt()
    assert float(error.max()) < 5
    torch.testing.assert_close(prediction.samples.var(0), prediction.epistemic, rtol=6 * math.sqrt(2 / draws), atol=0)


def test_a_vague_prior_is_least_squares_and_a_tight_one_is_zero():
    x, y = examples()
    vague = BayesianLinearRegression.fit(x, y, prior_std=1e6, noise=0.3)
    torch.testing.assert_close(vague.mean, torch.linalg.lstsq(with_bias(x), y).solution, rtol=1e-8, atol=1e-8)
    tight = BayesianLinearRegression.fit(x, y, prior_std=1e-6, noise=0.3)
    assert float(tight.mean.abs().max()) < 1e-8
    assert float(tight.predict(x).epistemic.max()) < 1e-10


@pytest.mark.parametrize("count", [8, 40, 400])
@pytest.mark.parametrize("prior_std", [0.3, 1.0, 30.0])
def test_evidence_is_at_its_maximum(count, prior_std):
    x, y = examples(count, seed=1)
    found = BayesianLinearRegression.fit(x, y, prior_std=prior_std).noise_variance
    log_variance = torch.tensor(math.log(found), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(marginal(x, y, log_variance.exp(), prior_std), log_variance)
    assert float(slope) == pytest.approx(0, abs=1e-6 * count)
    best = marginal(x, y, found, prior_std)
    assert all(marginal(x, y, found * factor, prior_std) < best for factor in (0.5, 0.9, 1.1, 2.0))


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    noise=st.sampled_from([0.2, "target", "evidence"]),
    seed=st.integers(0, 99),
)
def test_federated_is_pooled(sizes, noise, seed):
    """Clients of a single row too, and so of a Gram matrix without full rank."""
    x, y = examples(sum(sizes) + 30, seed=seed)
    parts = zip(x.split([*sizes, 30]), y.split([*sizes, 30]))
    clients = [BayesianLinearRegression.fit(*part, noise=noise) for part in parts]
    assert_same(BayesianLinearRegression.conflate(clients), BayesianLinearRegression.fit(x, y, noise=noise), x[:5])


def test_clients_without_full_rank_and_with_constant_features():
    x, y = examples(40)
    x[:, 1], x[:, 2] = 2 * x[:, 0], 5.0
    clients = [BayesianLinearRegression.fit(x[k::20], y[k::20], noise=0.2) for k in range(20)]
    pooled = BayesianLinearRegression.fit(x, y, noise=0.2)
    assert_same(BayesianLinearRegression.conflate(clients), pooled, x[:5])
    assert float(pooled.predict(x).epistemic.max()) < 0.2
    unseen = torch.tensor([[2.0, -1.0, 0.0, 0.0]], dtype=torch.float64)  # orthogonal to what the data vary along
    assert float(pooled.predict(unseen).epistemic[0, 0]) > 4.9


GOOD = {"inputs": torch.ones(5, 2), "targets": torch.ones(5, 1)}
test_wrong_arguments = refusals(
    FedBayesError,
    ({"inputs": torch.full((5, 2), math.nan)}, "inputs are not finite in column 0, 1"),
    ({"inputs": torch.ones(4, 2)}, "as many examples"),
    ({"inputs": torch.ones(0, 2), "targets": torch.ones(0, 1)}, "at least one"),
    ({"prior_std": 0.0}, "prior_std=0"),
    ({"noise": -1.0}, "noise=-1"),
    ({"noise": "evidense"}, "did you mean 'evidence'"),
    call=lambda change: BayesianLinearRegression.fit(**{**GOOD, **change}),
)


@pytest.mark.parametrize("noise", ["target", "evidence"])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_targets_tell_no_noise(noise, value):
    x, _ = examples()
    model = BayesianLinearRegression.fit(x, torch.full((80, 1), value), noise=noise)
    with pytest.raises(FedBayesError, match="number"):
        model.predict(x)
    assert BayesianLinearRegression.fit(x, torch.full((80, 1), value), noise=0.1).predict(x).mean.isfinite().all()


def with_another(features=FEATURES, **other):
    second = BayesianLinearRegression.fit(*examples(features=features), **other)
    return BayesianLinearRegression.conflate([BayesianLinearRegression.fit(*examples()), second])


test_clients_that_differ_are_refused = refusals(
    FedBayesError,
    (lambda: with_another(prior_std=2.0), "prior_std is 1.0 in model 0 and 2.0"),
    (lambda: with_another(noise=0.1), "noise is 'evidence'"),
    (lambda: with_another(features=3), "add statistics of the same"),
    (lambda: BayesianLinearRegression.conflate([]), "no models"),
)
