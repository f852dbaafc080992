"""Mixing and clipping equal the rule that follows, applied to mixed or clipped clients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes import GaussianPosterior, fuse
from lightning_fedbayes.fusion import Cohort, Fused, NearestNeighbourMixing, NormClipping, ReliabilityRule, get_rule

from .strategies import assert_same, posterior

SEEDS = st.integers(0, 2**32 - 1)
INNER = (
    *("nwa", "rklb", "linear_pool", "gaussian_fit"),
    *("coordinate_median", "trimmed_mean", "geometric_median", "krum", "multi_krum"),
)


def draw(count, seed):
    """Means, variances, the previous mean and weights."""
    random = np.random.default_rng(seed)
    means = random.normal(0, 1, (count, 4)) * 10 ** random.uniform(-1, 1, (count, 1))
    return means, random.uniform(0.1, 1, (count, 4)), random.normal(0, 1, 4), random.dirichlet(np.ones(count)).tolist()


def clients_of(means, variances):
    """Two parameters each, so that their order counts."""
    parts = (
        [{"a": torch.tensor(row[:3]).view(1, 3), "b": torch.tensor(row[3])} for row in rows]
        for rows in (means, variances)
    )
    return [GaussianPosterior(m, v) for m, v in zip(*parts, strict=True)]


def mixed(means, variances, byzantine):
    """Allouah et al. 2023, Algorithm 2, without a Gram matrix; variances stay."""
    near = [np.argsort(((means - mean) ** 2).sum(1))[: len(means) - byzantine] for mean in means]
    return clients_of([means[n].mean(0) for n in near], variances)


def clipped(means, variances, origin, radius):
    """Each update on its own."""
    norms = np.linalg.norm(means - origin, axis=1)
    radius = np.median(norms) if radius is None else radius
    shorter = [origin + min(1, radius / norm) * (mean - origin) for mean, norm in zip(means, norms, strict=True)]
    return clients_of(shorter, variances)


@pytest.mark.parametrize("then", INNER)
@given(count=st.integers(1, 7), seed=SEEDS, data=st.data())
@settings(deadline=None, max_examples=10)
def test_mixing_is_the_rule_on_mixed_clients(then, count, seed, data):
    byzantine = data.draw(st.none() | st.integers(0, (count - 1) // 2))
    means, variances, origin, weights = draw(count, seed)
    (previous,) = clients_of([origin], [np.ones(4)])
    rule = NearestNeighbourMixing(then, byzantine)
    expected = mixed(means, variances, (count - 1) // 2 if byzantine is None else byzantine)
    fused = fuse(rule, clients_of(means, variances), weights, previous)
    by_hand = fuse(then, expected, weights, previous)
    if isinstance(get_rule(then), ReliabilityRule):
        # clients of the same neighbours have the same mean: rounding decides which of them, and whose variance, counts
        fused, by_hand = (GaussianPosterior.point_mass(each.mean) for each in (fused, by_hand))
    assert_same(fused, by_hand, rtol=1e-6, atol=1e-20)


@pytest.mark.parametrize("then", INNER)
@given(count=st.integers(1, 7), seed=SEEDS, radius=st.none() | st.floats(0.01, 10))
@settings(deadline=None, max_examples=10)
def test_clipping_is_the_rule_on_clipped_clients(then, count, seed, radius):
    means, variances, origin, weights = draw(count, seed)
    (previous,) = clients_of([origin], [np.ones(4)])
    fused = fuse(NormClipping(then, radius), clients_of(means, variances), weights, previous)
    assert_same(fused, fuse(then, clipped(means, variances, origin, radius), weights, previous), rtol=1e-6, atol=1e-20)


@pytest.mark.parametrize("far", [1e3, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_huge_update_is_clipped_to_its_direction(far, dtype):
    origin = torch.tensor([1e3, -1e3], dtype=dtype)
    updates = ([3.0, 4.0], [0.3, 0.4], [0.0, -far])
    clients = [GaussianPosterior.point_mass({"w": origin + torch.tensor(u, dtype=dtype)}) for u in updates]
    fused = fuse(NormClipping(radius=1.0), clients, previous=GaussianPosterior.point_mass({"w": origin}))
    torch.testing.assert_close(fused.mean["w"], origin + torch.tensor([0.3, 0.2 / 3], dtype=dtype))


class Counting(ReliabilityRule):
    """Gives the first client all reliability, leaves the second out, and counts rounds."""

    def init(self):
        return {"rounds": 0}

    def apply(self, cohort, state):
        first, second, *_ = cohort.clients
        return Fused(cohort.posteriors[0], {first: 1.0}, {second: "for a test"}, {"rounds": state["rounds"] + 1})


@pytest.mark.parametrize("make", [NearestNeighbourMixing, NormClipping])
def test_state_and_reliability_are_those_of_the_rule_inside(make):
    rule = make(Counting())
    clients = tuple(posterior([value], 0.0) for value in (0.0, 1.0, 5.0))
    cohort = Cohort(clients, torch.full((3,), 1 / 3, dtype=torch.float64), clients[0], (4, 9, 2))
    state = rule.init()
    first = rule.apply(cohort, state)
    second = rule.apply(replace(cohort, clients=(9, 4, 2)), first.state)
    assert state == {"rounds": 0}
    assert [first.state, second.state] == [{"rounds": 1}, {"rounds": 2}]
    shared = {4: 0.5, 9: 0.5, 2: 0.0} if make is NearestNeighbourMixing else {4: 1.0, 9: 0.0, 2: 0.0}
    assert first.reliability == shared
    assert set(first.excluded) == {client for client, share in shared.items() if share == 0}
    assert first.excluded.get(9, "for a test") == "for a test"


def test_point_masses_stay_point_masses_and_take_no_memory():
    clients = [GaussianPosterior.point_mass({"w": torch.tensor([float(k), 1.0])}) for k in range(5)]
    for then in ("geometric_median", "coordinate_median", "rklb"):
        fused = fuse(NearestNeighbourMixing(then), clients)
        assert not any(fused.variance["w"].stride())


@pytest.mark.parametrize("then", ["geometric_median", "coordinate_median", "multi_krum"])
def test_three_of_ten_false_variances_leave_every_variance_between_honest_ones(then):
    means, variances, origin, _ = draw(10, 3)
    means = np.random.default_rng(3).normal(0, 1, means.shape)
    variances[:3] = 1e10
    (previous,) = clients_of([origin], [np.ones(4)])
    fused = fuse(NearestNeighbourMixing(then), clients_of(means, variances), previous=previous)
    for value, honest in zip(fused.flatten()[1], variances[3:].T, strict=True):
        assert honest.min() <= value <= honest.max()
