"""Sum-type rules need one client at a time, in any grouping; other rules get copies of all."""

import dataclasses
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes import GaussianPosterior, fuse, register_fusion
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.fusion import FusionAccumulator, SumRule, get_rule, unregister_fusion
from tests.federations import assert_close

from .strategies import ATOMS, RULES, assert_same, cohorts, posterior

SUM_RULES = [rule for rule in RULES if isinstance(get_rule(rule), SumRule)]
MANY = st.integers(2, 5)


@pytest.mark.parametrize("rule", SUM_RULES[:3])
def test_generator_is_consumed_one_client_at_a_time(rule):
    previous = posterior([0.0], [100.0])
    alive = weakref.WeakSet()
    most = 0

    def clients():
        nonlocal most
        for k in range(5):
            most = max(most, len(alive))
            client = posterior([float(k)], [1.0])
            alive.update(client.mean.values())
            yield client
            del client

    fused = fuse(rule, clients(), previous=previous)
    assert most <= 1
    assert_same(fused, fuse(rule, [posterior([float(k)], [1.0]) for k in range(5)], previous=previous), rtol=0)


@pytest.mark.parametrize("rule", SUM_RULES[:3])
def test_clients_may_change_after_they_were_added(rule):
    """The resident network is overwritten by the next client."""
    resident = posterior([1.0, 2.0], [0.5, 0.0])
    resident = GaussianPosterior(resident.mean, {"w": resident.variance["w"].clone()})
    previous = posterior([0.0, 0.0], [100.0, 100.0])
    accumulator = FusionAccumulator(get_rule(rule), previous)
    for _ in range(3):
        accumulator.add(resident, 2.0)
        resident.mean["w"].add_(1)
        resident.variance["w"].mul_(2)
    clients = [posterior([1.0 + k, 2.0 + k], [0.5 * 2**k, 0.0]) for k in range(3)]
    assert_same(accumulator.compute(), fuse(rule, clients, previous=previous))


def test_rule_that_sees_all_clients_gets_copies():
    @register_fusion("last_for_this_test")
    def last(posteriors, weights, previous):
        assert weights.tolist() == pytest.approx([1 / 3, 2 / 3])
        return posteriors[0]

    try:
        client = posterior([1.0], [2.0])
        accumulator = FusionAccumulator(get_rule("last_for_this_test"))
        for weight in (0.0, 1.0, 2.0):
            accumulator.add(client, weight)
            client.mean["w"].add_(1)
        assert accumulator.compute().mean["w"].item() == 2
    finally:
        unregister_fusion("last_for_this_test")


@pytest.mark.parametrize("rule", SUM_RULES)
@given(cohort=cohorts(clients=MANY, atoms=ATOMS), groups=st.lists(st.integers(0, 2), min_size=5, max_size=5))
@settings(deadline=None, max_examples=40)
def test_merged_partial_sums_are_the_sums(rule, cohort, groups):
    """Clients split over three processes in any way; a process may have none."""
    summing = get_rule(rule)
    assert isinstance(summing, SumRule)
    partial = [{}, {}, {}]
    for client, weight, group in zip(cohort.clients, cohort.weights, groups):
        summing.update(partial[group], *client.flatten(), weight)
    merged = {}
    for statistics in partial:
        if statistics:
            summing.merge(merged, statistics)
    like = cohort.clients[0]
    fused = like.unflatten(*summing.compute(merged, like, cohort.previous))
    weights = torch.tensor(cohort.weights, dtype=torch.float64)
    at_once = summing.fuse(cohort.clients, weights, cohort.previous)
    assert_same(fused, at_once, rtol=1e-12)
    assert_same(at_once, cohort.fuse(rule), rtol=1e-12)


@pytest.mark.parametrize("rule", SUM_RULES[:3])
def test_merging_leaves_the_other_sums_alone(rule):
    summing = get_rule(rule)
    assert isinstance(summing, SumRule)
    other, merged = {}, {}
    summing.update(other, *posterior([1.0, 3.0], [2.0, 0.0]).flatten(), 0.5)
    before = {key: value.clone() for key, value in other.items()}
    for _ in range(2):
        summing.merge(merged, other)
    summing.update(merged, *posterior([5.0, 3.0], [2.0, 1.0]).flatten(), 0.5)
    assert all(torch.equal(value, before[key]) for key, value in other.items())


@pytest.mark.parametrize("rule", ["linear_pool", "gaussian_fit"])
def test_disagreement_of_merged_groups_does_not_cancel(rule):
    """Means of 10⁶ whose spread is 10⁻³: E[μ²] − E[μ]² would keep no digit of it."""
    summing = get_rule(rule)
    assert isinstance(summing, SumRule)
    means = 1e6 + 1e-3 * np.random.default_rng(1).normal(size=(12, 50))
    merged = {}
    for group in np.array_split(means, 4):
        statistics = {}
        for row in group:
            summing.update(statistics, torch.tensor(row), torch.zeros(50, dtype=torch.float64), 1.0)
        summing.merge(merged, statistics)
    _, variance = summing.compute(merged, posterior(means[0], 0.0), None)
    np.testing.assert_allclose(variance.numpy(), means.var(0), rtol=1e-5)


LARGE = {"first": (3, 50_000), "empty": (0,), "bias": (7,), "atom": (140_000,), "last": (2, 5)}


def gaussian(k, name, draws):
    return 0.1 + draws


def large(k, variance=gaussian):
    """A client of more parameters than one piece has; "atom" is a point mass."""
    draws = torch.Generator().manual_seed(k)
    mean = {name: torch.randn(shape, generator=draws) for name, shape in LARGE.items()}
    sent = {name: variance(k, name, torch.rand(shape, generator=draws)) for name, shape in LARGE.items()}
    atom = GaussianPosterior.point_mass(mean).variance
    return GaussianPosterior(mean, {name: atom[name] if name == "atom" else sent[name] for name in mean})


VARIANCES = {"gaussian": gaussian, "mixed": lambda k, name, draws: draws * 0 if k == 2 else 0.1 + draws, "atoms": None}


@pytest.mark.parametrize("variance", VARIANCES.values(), ids=VARIANCES)
@pytest.mark.parametrize("rule", SUM_RULES)
def test_a_large_network_is_fused_piece_by_piece_as_in_one_vector(rule, variance):
    clients = [large(k, variance or gaussian) for k in range(4)]
    previous = GaussianPosterior(clients[0].mean, {n: torch.full(shape, 10.0) for n, shape in LARGE.items()})
    if variance is None:
        clients = [GaussianPosterior.point_mass(client.mean) for client in clients]
    weights = [1.0, 3.0, 0.5, 2.0]
    accumulator = FusionAccumulator(get_rule(rule), previous)
    for client, weight in zip(clients, weights):
        accumulator.add(client, weight)
    fused, at_once = accumulator.compute(), accumulator.finish(accumulator.statistics, {}, {}).posterior
    # the whole as one vector, without a shortcut for point masses: variances of 0 that fill their tensors
    vectors = [(mean, variance.contiguous()) for mean, variance in (client.flatten() for client in clients)]
    sums = {}
    for (mean, spread), weight in zip(vectors, weights):
        get_rule(rule).update(sums, mean, spread, weight)
    expected = clients[0].unflatten(*get_rule(rule).compute(sums, clients[0], previous))
    for result in (fused, at_once):
        assert_close(result, expected)


def point_masses(count, dtype=torch.float32):
    clients = [GaussianPosterior.point_mass({n: m.to(dtype) for n, m in large(k).mean.items()}) for k in range(count)]
    return clients, [1.0 + k % 7 for k in range(count)]


@pytest.mark.parametrize("weight", [0.0, 2.0])
@pytest.mark.parametrize("rule", SUM_RULES[:2])
def test_a_value_of_a_large_network_that_is_not_finite_is_found_in_a_list(rule, weight):
    clients, _ = point_masses(3)
    clients[1].mean["last"][0, 0] = torch.nan
    with pytest.raises(FusionError, match="client 1: mean of 'last' is not finite at 1 of 10 entries"):
        fuse(rule, clients, [1.0, weight, 3.0], clients[0])


def test_a_rule_with_a_state_advances_once_for_a_whole_large_network():
    class Counts(type(get_rule("weighted_average"))):
        def advance(self, statistics, like, previous, state, weights):
            fused = super().advance(statistics, like, previous, state, weights)
            return dataclasses.replace(fused, state={"rounds": state.get("rounds", 0) + 1})

    accumulator, (first, second) = FusionAccumulator(Counts()), point_masses(2)[0]
    accumulator.add_all([(first, 1.0), (second, 1.0)])
    fused = accumulator.result({"rounds": 4}, {})
    assert fused.state == {"rounds": 5}
    torch.testing.assert_close(fused.posterior.mean["last"], (first.mean["last"] + second.mean["last"]) / 2)
