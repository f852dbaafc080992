"""Inverse-variance weighting against slow references, the evidence, and known noise."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes import fuse
from lightning_fedbayes.fusion import InverseVarianceMLE, InverseVarianceVB
from lightning_fedbayes.fusion.inferred import coordinate_ascent, gram_about_last

from .untrusted import distances_of, error, independent, normal, origin, point_masses

RULES = ("ivar_mle", "ivar_vb")
NOISE = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0]


def evidence(distances, noise, signal):
    """Log evidence per parameter, of N(x; 0, τ² 11ᵀ + diag σ²)."""
    covariance = signal + torch.diag(noise)
    quadratic = (torch.linalg.inv(covariance) * gram_about_last(distances)).sum()
    constant = len(noise) * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))
    return -(constant + torch.logdet(covariance) + quadratic) / 2


def slow_geometric_median(x):
    y = x.mean(0)
    for _ in range(5000):
        weights = 1 / (x - y).norm(dim=1)
        y = (weights[:, None] * x).sum(0) / weights.sum()
    return y


def slow_mle(x):
    """Eq. (6) and (7) on the data themselves, with the floor that belongs to the method."""
    y = slow_geometric_median(x)
    floor = 0.01 * (x - y).square().mean(1).sort().values[len(x) // 4]
    for _ in range(2000):
        variance = (x - y).square().mean(1).clamp_min(floor)
        y = (x / variance[:, None]).sum(0) / (1 / variance).sum()
    return y


def slow_vb(x):
    """Eq. (10) to (13) on the data themselves."""
    y = slow_geometric_median(x)
    signal, noise = y.square().mean(), (x - y).square().mean(1)
    for _ in range(5000):
        posterior_variance = 1 / (1 / signal + (1 / noise).sum())
        y = posterior_variance * (x / noise[:, None]).sum(0)
        signal = posterior_variance + y.square().mean()
        noise = posterior_variance + (x - y).square().mean(1)
    return y


@pytest.mark.parametrize(("rule", "reference"), [("ivar_mle", slow_mle), ("ivar_vb", slow_vb)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_agrees_with_the_slow_reference(rule, reference, seed, shift):
    _, updates = independent(NOISE, 400, seed)
    fused = fuse(rule, point_masses(updates + shift), previous=origin(400, shift))
    torch.testing.assert_close(fused.mean["w"] - shift, reference(updates), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_order_shift_and_scale_do_not_matter_far_from_saddles(rule, seed):
    _, updates = independent(NOISE, 400, seed)
    fused = fuse(rule, point_masses(updates), previous=origin(400)).mean["w"]
    moved = fuse(rule, point_masses(3 - 2 * updates.flip(0)), previous=origin(400, 3)).mean["w"]
    torch.testing.assert_close((3 - moved) / 2, fused, rtol=0, atol=1e-9)


@given(st.integers(0, 1000), st.integers(1, 8), st.integers(1, 50), st.floats(-3, 3))
@settings(deadline=None, max_examples=50)
def test_evidence_never_falls(seed, clients, size, order):
    spread = 10 ** (order * normal(clients, 1, seed=seed))
    distances = distances_of(normal(size, seed=seed + 1) + spread * normal(clients, size, seed=seed + 2))
    noise, signal = distances[:-1, -1] + 1e-3, distances[:-1, -1].mean() + 1e-3
    reached = [float(evidence(distances, noise, signal))]
    for _ in range(30):
        _, noise, signal = coordinate_ascent(distances, noise, signal)
        reached.append(float(evidence(distances, noise, signal)))
    assert all(later >= earlier - 1e-9 * abs(earlier) for earlier, later in pairwise(reached))


def test_where_it_stops_the_evidence_is_stationary():
    _, updates = independent(NOISE, 300)
    distances = distances_of(updates)
    noise, signal = distances[:-1, -1], distances[:-1, -1].mean()
    for _ in range(3000):
        _, noise, signal = coordinate_ascent(distances, noise, signal)
    free = torch.cat([noise, signal[None]]).log().requires_grad_()
    evidence(distances, free[:-1].exp(), free[-1].exp()).backward()
    torch.testing.assert_close(free.grad, torch.zeros(len(free), dtype=torch.float64), rtol=0, atol=1e-8)


def test_evidence_is_the_density_of_the_updates():
    _, updates = independent(NOISE, 5)
    noise, signal = torch.tensor(NOISE, dtype=torch.float64) ** 2, torch.tensor(0.7, dtype=torch.float64)
    density = torch.distributions.MultivariateNormal(torch.zeros(6, dtype=torch.float64), signal + torch.diag(noise))
    expected = density.log_prob(updates.T).mean()
    torch.testing.assert_close(evidence(distances_of(updates), noise, signal), expected)


def test_shares_approach_the_oracle_as_parameters_grow():
    precision = 1 / torch.tensor(NOISE, dtype=torch.float64) ** 2
    oracle = precision / precision.sum()
    worst = []
    for size in (100, 10_000, 1_000_000):
        _, updates = independent(NOISE, size)
        _, shares = InverseVarianceVB().infer(distances_of(updates), size)
        worst.append(float((shares - oracle).abs().max()))
    assert worst[0] > worst[1] > worst[2]
    assert worst[2] < 0.003


def test_maximum_likelihood_believes_the_best_client_too_much():
    """Its likelihood is unbounded there; the floor is what stops it."""
    _, updates = independent(NOISE, 10_000)
    shares = InverseVarianceMLE().infer(distances_of(updates), 10_000)[1]
    assert shares[0] > 1.3 * InverseVarianceVB().infer(distances_of(updates), 10_000)[1][0]
    assert shares[0] < 0.99
    assert InverseVarianceMLE(floor=1e-6).infer(distances_of(updates), 10_000)[1][0] > 0.99


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("adversaries", [1, 5, 10])
def test_error_is_that_of_the_genuine_clients_whatever_the_others_send(rule, adversaries):
    truth, updates = independent([0.1] * 5, 2000)
    sent = torch.cat([updates, 10 * normal(adversaries, 2000, seed=9)])
    alone = error(fuse(rule, point_masses(updates), previous=origin(2000)), truth)
    assert error(fuse(rule, point_masses(sent), previous=origin(2000)), truth) < 1.3 * alone


def test_prior_pulls_an_update_that_noise_drowns_to_the_previous_model():
    _, updates = independent([30.0] * 3, 2000)
    fused = fuse("ivar_vb", point_masses(updates), previous=origin(2000))
    assert fused.mean["w"].norm() < 0.2 * updates.mean(0).norm()
