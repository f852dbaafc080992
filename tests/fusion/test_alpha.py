"""The α-barycenters against numerical integration, their limits, and the divergence that they minimise."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate

from lightning_fedbayes import fuse
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.fusion import AlphaBarycenter

from .strategies import assert_same, posterior

ALPHAS = (-1.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.5)


def by_integration(means, variances, weights, alpha):
    """Moments of the normalised power mean, by adaptive quadrature."""
    means, deviations = np.asarray(means), np.sqrt(variances)

    def log_power_mean(x):
        logs = -0.5 * ((x - means) / deviations) ** 2 - np.log(deviations) - 0.5 * math.log(2 * math.pi)
        return np.logaddexp.reduce(np.log(weights) + alpha * logs) / alpha

    ends = (means - 12 * deviations).min(), (means + 12 * deviations).max()
    top = max(log_power_mean(x) for x in np.linspace(*ends, 20_001))
    moments = [
        integrate.quad(
            lambda x, n=n: x**n * np.exp(log_power_mean(x) - top),
            *ends,
            limit=2000,
            epsabs=1e-12,
            points=np.unique([*means, *(means - deviations), *(means + deviations)]),
        )[0]
        for n in range(3)
    ]
    mean = moments[1] / moments[0]
    return mean, moments[2] / moments[0] - mean**2


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("seed", range(6))
def test_moments_are_those_of_the_normalised_power_mean(alpha, seed):
    random = np.random.default_rng(seed)
    clients = int(random.integers(2, 5))
    means, variances = random.normal(0, 1.5, clients), np.exp(random.uniform(-1, 1, clients))
    weights = random.dirichlet(np.ones(clients))
    fused = fuse(AlphaBarycenter(alpha), [posterior([m], [v]) for m, v in zip(means, variances, strict=True)], weights)
    mean, variance = by_integration(means, variances, weights, alpha)
    loose = 1 if 0 <= alpha <= 1 else 25
    assert float(fused.mean["w"]) == pytest.approx(mean, abs=loose * 2e-3)
    assert float(fused.variance["w"]) == pytest.approx(variance, rel=loose * 5e-3)


@pytest.mark.parametrize(("alpha", "rule"), [(1e-4, "reverse_kl_barycenter"), (1 - 1e-5, "linear_pool")])
def test_family_is_continuous_at_its_ends(alpha, rule):
    clients = [posterior([0.0, 1.0, -2.0], [1.0, 0.5, 2.0]), posterior([1.0, 1.2, 2.0], [0.3, 0.5, 1.0])]
    assert_same(fuse(AlphaBarycenter(alpha), clients, [0.3, 0.7]), fuse(rule, clients, [0.3, 0.7]), rtol=2e-3)


@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.75])
def test_no_other_density_has_a_smaller_divergence(alpha):
    """The power mean itself, on a grid: perturbing it raises Σω D_α(q_k‖q). The rule has its moments."""
    grid = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    step = float(grid[1] - grid[0])
    gaussians = ((-1.0, 0.7), (0.5, 1.5), (2.0, 1.0))
    clients = torch.stack([torch.distributions.Normal(m, s).log_prob(grid).exp() for m, s in gaussians])
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)

    def objective(q):
        q = q / (q.sum() * step)
        overlap = (clients**alpha * q ** (1 - alpha)).sum(1) * step
        return float((weights * (1 - overlap) / (alpha * (1 - alpha))).sum())

    best = (weights[:, None] * clients**alpha).sum(0) ** (1 / alpha)
    for seed in range(10):
        bump = torch.sin(grid * (seed + 1) / 2 + seed)
        assert objective(best * (1 + 0.1 * bump)) > objective(best)
    mass = best / best.sum()
    mean = float((mass * grid).sum())
    fused = fuse(AlphaBarycenter(alpha), [posterior([m], [s**2]) for m, s in gaussians], weights)
    assert float(fused.mean["w"]) == pytest.approx(mean, abs=2e-3)
    assert float(fused.variance["w"]) == pytest.approx(float((mass * (grid - mean) ** 2).sum()), rel=5e-3)


def test_hellinger_is_the_half_way_one():
    clients = [posterior([0.0, 3.0], [1.0, 0.1]), posterior([1.0, -3.0], [2.0, 0.1])]
    assert_same(fuse("hellinger_barycenter", clients), fuse(AlphaBarycenter(0.5), clients))
    widths = [fuse(AlphaBarycenter(alpha), clients).variance["w"] for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert all(bool((wider > narrower).all()) for narrower, wider in pairwise(widths))


def test_alpha_is_finite():
    with pytest.raises(FusionError, match="alpha=nan"):
        AlphaBarycenter(math.nan)
