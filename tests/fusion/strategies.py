"""Cohorts of client posteriors, drawn and compared."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from lightning_fedbayes import GaussianPosterior, fuse
from lightning_fedbayes.fusion import ServerOptimizer, SumRule, available_fusions, get_rule

RULES = [name for name in available_fusions() if name != "first_client"]
WEIGHTED = [name for name in RULES if get_rule(name).uses_weights]
STEPS = [name for name in RULES if isinstance(get_rule(name), ServerOptimizer)]
KINDS = ["linear_pool", "distributed_weight_consolidation", "coordinate_median", "krum", "icov_mle", "fedadam"]
"""One rule of each kind: sum, with the previous posterior, by columns, by distances, inferred, with steps."""
CLOSED_FORMS = [name for name in RULES if isinstance(get_rule(name), SumRule) and name not in STEPS]
UP_TO_FIVE = st.integers(1, 5)
ATOMS = ("none", "tensors", "entries", "everything")
SHAPES = ((), (1,), (3,), (2, 2), (1, 3, 2), (0,), (2, 0))


@dataclass(frozen=True)
class Cohort:
    """Clients, their weights and the vaguer global posterior that they started from."""

    clients: list[GaussianPosterior]
    weights: list[float]
    previous: GaussianPosterior

    def fuse(self, rule, clients=None, weights=None):
        return fuse(rule, clients or self.clients, weights or self.weights, self.previous)


def posterior(mean, variance):
    """A posterior with one parameter "w" from lists or arrays, in float64."""
    mean = torch.as_tensor(mean, dtype=torch.float64)
    return GaussianPosterior({"w": mean}, {"w": torch.as_tensor(variance, dtype=torch.float64).expand(mean.shape)})


@st.composite
def cohorts(draw, clients=UP_TO_FIVE, dtype=torch.float64, atoms=("none",), orders=(-20, 6)):
    """Cohorts of any shapes with point masses by one of :data:`ATOMS`, variances and weights log-uniform."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))
    count, kind = draw(clients), draw(st.sampled_from(atoms))
    weights = draw(st.lists(st.floats(-3, 3).map(lambda power: 10.0**power), min_size=count, max_size=count))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    deterministic = {
        f"p{i}": kind == "everything" or (kind == "tensors" and random.random() < 0.5) for i in range(len(shapes))
    }

    def client():
        means, variances = {}, {}
        for (name, point_mass), shape in zip(deterministic.items(), shapes, strict=True):
            variance = 10 ** random.uniform(*orders, shape)
            if point_mass:
                variance = np.zeros(shape)
            elif kind == "entries":
                variance = np.where(random.random(shape) < 0.4, 0.0, variance)
            means[name] = torch.tensor(random.normal(0, 3, shape), dtype=dtype)
            variances[name] = torch.tensor(variance, dtype=dtype)
        return GaussianPosterior(means, variances)

    posteriors, previous = [client() for _ in range(count)], client()
    vaguest = {name: torch.stack([each.variance[name] for each in posteriors]).amax(0) for name in deterministic}
    previous = GaussianPosterior(previous.mean, {name: 10 * value for name, value in vaguest.items()})
    return Cohort(posteriors, weights, previous)


def assert_same(actual, expected, rtol=1e-9, atol=0.0):
    """Two posteriors are equal: variances relative to themselves, means relative to the largest mean or 1."""
    assert actual.mean.keys() == expected.mean.keys()
    for name, mean in expected.mean.items():
        scale = max(1.0, float(mean.abs().max())) if mean.numel() else 1.0
        torch.testing.assert_close(actual.mean[name], mean, rtol=rtol, atol=max(rtol * scale, atol))
        torch.testing.assert_close(actual.variance[name], expected.variance[name], rtol=rtol, atol=atol)


def assert_at_most(smaller, larger):
    """Every variance of ``smaller`` is at most that of ``larger``, but for rounding."""
    for name, bound in larger.variance.items():
        assert bool((smaller.variance[name] <= bound * (1 + 1e-9)).all())
