"""Identities that hold for fusion rules whatever the clients are."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes import GaussianPosterior, fuse
from lightning_fedbayes.fusion import get_rule

from .strategies import CLOSED_FORMS, RULES, STEPS, WEIGHTED, Cohort, assert_at_most, assert_same, cohorts

TO_THE_LAST_DIGIT = [rule for rule in RULES if rule != "ivar_mle" and not rule.startswith("icov")]
"""All but those whose search may pass a saddle, where rounding decides which way it goes on: see their own tests."""
NARROWING = [rule for rule in CLOSED_FORMS if get_rule(rule).narrows]
MANY = st.integers(2, 5)
FEW = settings(deadline=None, max_examples=25)


def scaled(posterior, scale, shift):
    """The posterior of scale · θ + shift."""
    return GaussianPosterior(
        {name: scale * mean + shift for name, mean in posterior.mean.items()},
        {name: scale**2 * variance for name, variance in posterior.variance.items()},
    )


ROUNDING = 1e-7
"""Relative error that the order of a rule's sums may make."""


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("gaussian_fit", *STEPS)])
@given(cohort=cohorts(clients=st.just(1), atoms=("none", "tensors", "entries", "everything")))
@FEW
def test_one_client_is_returned(rule, cohort):
    assert_same(cohort.fuse(rule), cohort.clients[0])


SHRINKING = ("gaussian_fit", "distributed_weight_consolidation", *NARROWING)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in (*SHRINKING, *STEPS)])
@given(cohort=cohorts(clients=MANY, atoms=("none", "tensors", "entries")))
@FEW
def test_identical_clients_are_returned(rule, cohort):
    identical = cohort.clients[:1] * len(cohort.weights)
    assert_same(cohort.fuse(rule, identical), cohort.clients[0])


@given(cohort=cohorts(clients=st.just(1)), count=MANY)
@FEW
def test_dwc_of_clients_that_learned_nothing_is_the_previous_posterior(cohort, count):
    assert_same(fuse("dwc", [cohort.previous] * count, previous=cohort.previous), cohort.previous)


@pytest.mark.parametrize("rule", TO_THE_LAST_DIGIT)
@given(cohort=cohorts(clients=MANY, atoms=("none", "tensors", "entries", "everything")), data=st.data())
@FEW
def test_order_of_clients_does_not_matter(rule, cohort, data):
    order = data.draw(st.permutations(range(len(cohort.clients))))
    shuffled = cohort.fuse(rule, [cohort.clients[k] for k in order], [cohort.weights[k] for k in order])
    assert_same(shuffled, cohort.fuse(rule), rtol=ROUNDING)


@pytest.mark.parametrize("rule", [rule for rule in TO_THE_LAST_DIGIT if rule not in STEPS])
@given(
    cohort=cohorts(clients=MANY, atoms=("none", "tensors", "entries", "everything")),
    scale=st.sampled_from([-8.0, -0.5, 0.25, 16.0]),
    shift=st.floats(-10, 10),
)
@FEW
def test_shift_and_scale_of_the_parameters_carry_over(rule, cohort, scale, shift):
    clients = [scaled(client, scale, shift) for client in cohort.clients]
    moved = Cohort(clients, cohort.weights, scaled(cohort.previous, scale, shift))
    assert_same(moved.fuse(rule), scaled(cohort.fuse(rule), scale, shift), rtol=ROUNDING)


@pytest.mark.parametrize("rule", WEIGHTED)
@given(cohort=cohorts(clients=MANY, atoms=("none", "tensors", "entries")), place=st.integers(0, 4))
@FEW
def test_client_of_weight_zero_changes_nothing(rule, cohort, place):
    place = place % len(cohort.clients)
    weights = [*cohort.weights[:place], 0.0, *cohort.weights[place + 1 :]]
    others = [client for k, client in enumerate(cohort.clients) if k != place]
    without = cohort.fuse(rule, others, [weight for weight in weights if weight])
    assert_same(cohort.fuse(rule, weights=weights), without, rtol=0)


@pytest.mark.parametrize("rule", WEIGHTED)
@pytest.mark.parametrize("factor", [1e-200, 7.0, 1e200])
@given(cohort=cohorts(clients=MANY, atoms=("none", "entries")))
@settings(deadline=None, max_examples=5)
def test_only_ratios_of_weights_matter(rule, factor, cohort):
    assert_same(cohort.fuse(rule, weights=[factor * weight for weight in cohort.weights]), cohort.fuse(rule))


@given(cohort=cohorts(clients=MANY, atoms=("none", "tensors", "entries")))
@FEW
def test_variances_are_ordered_as_power_means(cohort):
    names = "rklb", "log_variance_average", "wasserstein_barycenter", "weighted_average", "linear_pool"
    fused = [cohort.fuse(name) for name in names]
    for smaller, larger in itertools.pairwise(fused):
        assert_at_most(smaller, larger)
    assert_at_most(cohort.fuse("weighted_sum"), cohort.fuse("weighted_average"))
