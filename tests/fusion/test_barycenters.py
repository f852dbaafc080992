"""Each barycenter minimises its own objective, and dwc is the posterior of the pooled data."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from lightning_fedbayes import fuse

from .strategies import assert_same, cohorts, posterior


def reverse_kl(q, client):
    """KL(q‖q_k) summed over parameters."""
    return kl_divergence(q, client).sum()


def forward_kl(q, client):
    """KL(q_k‖q)."""
    return kl_divergence(client, q).sum()


def wasserstein(q, client):
    """W₂²(q_k, q)."""
    return ((q.mean - client.mean) ** 2 + (q.stddev - client.stddev) ** 2).sum()


OBJECTIVES = {"reverse_kl_barycenter": reverse_kl, "wasserstein_barycenter": wasserstein, "linear_pool": forward_kl}


def objective(rule, cohort, mean, log_std):
    """The rule's Σ_k ω_k D(q, q_k)."""
    weights = np.array(cohort.weights) / sum(cohort.weights)
    q = Normal(mean, log_std.exp())
    flat = [client.flatten() for client in cohort.clients]
    return sum(w * OBJECTIVES[rule](q, Normal(m, v.sqrt())) for w, (m, v) in zip(weights, flat, strict=True))


PROBABILISTIC = cohorts(clients=st.integers(1, 5), orders=(-2, 2)).filter(lambda c: c.previous.num_parameters > 0)


@pytest.mark.parametrize("rule", OBJECTIVES)
@given(cohort=PROBABILISTIC)
@settings(deadline=None, max_examples=40)
def test_gradient_of_its_objective_is_zero(rule, cohort):
    mean, variance = cohort.fuse(rule).flatten()
    leaves = mean.requires_grad_(), (variance.log() / 2).requires_grad_()
    gradients = torch.autograd.grad(objective(rule, cohort, *leaves), leaves)
    moved = mean.detach() + variance.sqrt(), variance.log() / 2 + 1
    scale = objective(rule, cohort, *moved).detach()
    for gradient in gradients:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-8 * float(1 + scale))


@pytest.mark.parametrize("rule", OBJECTIVES)
@given(cohort=PROBABILISTIC, seed=st.integers(0, 2**32 - 1), size=st.sampled_from([1e-3, 0.1, 1.0]))
@settings(deadline=None, max_examples=40)
def test_every_perturbation_raises_its_objective(rule, cohort, seed, size):
    mean, variance = cohort.fuse(rule).flatten()
    draws = torch.Generator().manual_seed(seed)
    best = objective(rule, cohort, mean, variance.log() / 2)
    for _ in range(4):
        noise = torch.randn(2, len(mean), generator=draws, dtype=mean.dtype)
        moved = objective(rule, cohort, mean + size * variance.sqrt() * noise[0], variance.log() / 2 + size * noise[1])
        assert moved > best


@given(
    shards=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    parameters=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=60)
def test_dwc_of_conjugate_posteriors_is_the_posterior_of_the_pooled_data(shards, parameters, seed):
    """Linear regression y = Xθ + ε with orthogonal columns, prior q_o, known noise precision."""
    random = np.random.default_rng(seed)
    prior_mean, prior_variance = random.normal(0, 2, parameters), 10 ** random.uniform(-2, 2, parameters)
    noise_precision = 10 ** random.uniform(-1, 1)

    def regression(x, y):
        precision = np.diag(1 / prior_variance) + noise_precision * x.T @ x
        assert np.allclose(precision, np.diag(np.diag(precision)))
        mean = np.linalg.solve(precision, prior_mean / prior_variance + noise_precision * x.T @ y)
        return posterior(mean, 1 / np.diag(precision))

    data = []
    for examples in shards:
        x = np.zeros((examples, parameters))
        x[np.arange(examples), random.integers(0, parameters, examples)] = random.normal(0, 2, examples)
        data.append((x, random.normal(0, 3, examples)))
    pooled = regression(np.concatenate([x for x, _ in data]), np.concatenate([y for _, y in data]))
    clients = [regression(x, y) for x, y in data]
    assert_same(fuse("dwc", clients, previous=posterior(prior_mean, prior_variance)), pooled)
