"""Client facts in, client weights out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes import GaussianPosterior
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.server.weighting import (
    PER_CLIENT,
    PER_COHORT,
    SMALLEST_DISTANCE,
    BufferAverage,
    ClientFacts,
    KnownOverlap,
    client_weights,
)
from tests.refusals import refusals

NAMES = sorted([*PER_CLIENT, *PER_COHORT])


def normal(mean, variance=1.0):
    mean = torch.tensor(mean, dtype=torch.float64)
    return GaussianPosterior({"w": mean}, {"w": torch.tensor(variance, dtype=torch.float64).expand(mean.shape)})


def facts_of(posteriors, sizes=None, previous=None):
    sizes = sizes or [1] * len(posteriors)
    previous = previous or normal([0.0] * posteriors[0].num_parameters)
    return [ClientFacts(k, n, q, previous) for k, (n, q) in enumerate(zip(sizes, posteriors, strict=True))]


def shares(*values):
    return pytest.approx([value / sum(values) for value in values])


def kl(m, v, n, w):
    return 0.5 * (math.log(w / v) + (v + (m - n) ** 2) / w - 1)


def test_distance_is_from_the_previous_global_posterior_to_the_client():
    """KL(q_g‖q_k), which is not KL(q_k‖q_g) where variances differ."""
    clients = [normal([1.0], [4.0]), normal([3.0], [0.25])]
    expected = [1 / kl(0.0, 2.0, 1.0, 4.0), 1 / kl(0.0, 2.0, 3.0, 0.25)]
    assert client_weights("distance", facts_of(clients, previous=normal([0.0], [2.0]))) == shares(*expected)


MOVED = [(0.0, 1.0), (1.0, 2.0), (5.0, 0.5)]


@pytest.mark.parametrize(
    ("name", "clients", "expected"),
    [
        ("distance", [normal([1.0, 2.0]), normal([3.0, 0.0])], (1 / (5 / 2), 1 / (9 / 2))),  # sums over all parameters
        (
            "max_discrepancy",  # the largest reciprocal
            [normal([mean], [variance]) for mean, variance in MOVED],
            [max(1 / kl(*own, *other) for other in MOVED if other != own) for own in MOVED],
        ),
        ("distance", [normal([1.0, 2.0], 0.0), normal([0.0, 3.0], 0.0)], (1 / 5, 1 / 9)),
        ("max_discrepancy", [normal([0.0], 0.0), normal([1.0], 0.0), normal([4.0], 0.0)], (1, 1, 1 / 9)),
    ],
)
def test_weights_by_their_formulas(name, clients, expected):
    assert client_weights(name, facts_of(clients)) == shares(*expected)
    assert client_weights("train_size", facts_of(clients[:2], [10, 30])) == shares(10, 30)


@pytest.mark.parametrize("name", NAMES)
def test_identical_posteriors_have_equal_finite_weights(name):
    same = [normal([1.0, 2.0], [1.0, 0.5])] * 3
    assert client_weights(name, facts_of(same, previous=same[0])) == shares(1, 1, 1)


@pytest.mark.parametrize("variance", [0.0, 1.0])
def test_weight_of_a_client_that_did_not_move_is_bounded(variance):
    [still, moved] = facts_of([normal([0.0], variance), normal([1.0], variance)], previous=normal([0.0], variance))
    assert PER_CLIENT["distance"](still) == 1 / SMALLEST_DISTANCE
    assert client_weights("distance", [still, moved])[0] < 1


@pytest.mark.parametrize("name", ["distance", "max_discrepancy"])
def test_deterministic_parameters_of_a_hybrid_network_do_not_count(name):
    hybrid = [normal([float(k), 100.0 * k], [1.0, 0.0]) for k in (1, 2, 4)]
    probabilistic = [normal([float(k)]) for k in (1, 2, 4)]
    weights = client_weights(name, facts_of(hybrid, previous=normal([0.0, 0.0], [1.0, 0.0])))
    assert weights == pytest.approx(client_weights(name, facts_of(probabilistic)))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), count=st.integers(1, 5))
@settings(deadline=None, max_examples=30)
def test_weights_sum_to_one_and_follow_the_clients(name, data, count):
    numbers = st.lists(st.floats(-10, 10), min_size=count, max_size=count)
    means, spreads = data.draw(numbers), data.draw(numbers)
    sizes = data.draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))
    order = data.draw(st.permutations(range(count)))
    facts = facts_of([normal([m], [math.exp(s)]) for m, s in zip(means, spreads)], sizes)
    weights = client_weights(name, facts)
    assert sum(weights) == pytest.approx(1)
    assert all(0 <= weight <= 1 for weight in weights)
    assert client_weights(name, [facts[k] for k in order]) == pytest.approx([weights[k] for k in order])


def test_function_of_all_facts():
    still = normal([0.0])
    facts = [ClientFacts(k, n, still, still, {"loss": loss}) for k, n, loss in ((0, 10, 2.0), (1, 20, 0.5))]

    by_loss = client_weights(lambda cohort: [each.num_examples / each.metrics["loss"] for each in cohort], facts)
    assert by_loss == shares(5, 40)
    assert client_weights(lambda cohort: torch.tensor([1, 3]), facts) == shares(1, 3)
    assert client_weights(lambda cohort: [0.0, 2.0], facts) == [0, 1]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0], "gave 1 weights for 2 clients; give one per client"),
        ([1.0, -1.0], r"weights must be finite and at least 0, got -1\.0 among \[1\.0, -1\.0\]"),
        ([1.0, math.nan], "must be finite.*nan"),
        ([0.0, 0.0], "only zeros; at least one client needs a positive weight"),
        (None, "weights"),
        (["a", "b"], "weights"),
    ],
    ids=str,
)
def test_functions_that_give_no_weights_are_named(values, words):
    def mine(cohort):
        return values

    with pytest.raises(FusionError, match=f"weighting mine.*{words}"):
        client_weights(mine, facts_of([normal([0.0])] * 2))


def holders(*parts):
    """How many examples every two of the parts have in common, and which part holds which example."""
    held = torch.zeros(len(parts), 1 + max(map(max, parts)), dtype=torch.float64)
    for row, part in zip(held, parts):
        row[list(part)] = 1
    return held @ held.T, held


def test_known_overlap_is_generalised_least_squares():
    shared, held = holders(range(60), range(30, 130), range(100, 140))
    sizes = held.sum(1)
    covariance = shared / sizes[:, None] / sizes  # [Untrusted] eq. (5) with σ = 1
    expected = torch.linalg.solve(covariance, torch.ones(3, dtype=torch.float64))
    found = client_weights(KnownOverlap(shared), facts_of([normal([0.0])] * 3, [60, 100, 40]))
    assert found == pytest.approx((expected / expected.sum()).tolist())
    assert found != pytest.approx([0.3, 0.5, 0.2], abs=1e-2)
    among = client_weights(KnownOverlap(shared), facts_of([normal([0.0])] * 3)[1:])  # client 0 misses the round
    expected = torch.linalg.solve(covariance[1:, 1:], torch.ones(2, dtype=torch.float64))
    assert among == pytest.approx((expected / expected.sum()).tolist())


def test_clients_with_the_same_data_share_the_weight_of_one():
    shared, _ = holders(range(50), range(50), range(50, 100))
    assert client_weights(KnownOverlap(shared), facts_of([normal([0.0])] * 3)) == shares(1, 1, 2)
    shared, _ = holders(range(50), range(100))  # the first adds nothing
    assert client_weights(KnownOverlap(shared), facts_of([normal([0.0])] * 2)) == shares(0, 1)


test_what_is_no_overlap_is_refused = refusals(
    FusionError,
    ("many", "give a square matrix"),
    ([[1.0, 0.0]], "no square matrix"),
    ([[1.0, 0.0], [0.0, 0.0]], "sizes above 0"),
    ([[2.0, 1.0], [0.0, 2.0]], "have to be equal"),
    ([[2.0, 3.0], [3.0, 4.0]], "at most the sizes"),
    call=KnownOverlap,
)


def test_a_client_that_known_overlap_does_not_know_or_would_subtract_is_named():
    facts = facts_of([normal([0.0])] * 3)
    with pytest.raises(FusionError, match="client 2 is not in shared, with 2 rows"):
        client_weights(KnownOverlap([[1.0, 0.0], [0.0, 1.0]]), facts)
    shared, _ = holders([0, 1, 2, 3], [3, 4, 5, 6], [3])
    with pytest.raises(FusionError, match="client 2 has a negative weight"):
        client_weights(KnownOverlap(shared), facts)


def test_a_buffer_may_be_infinite_where_the_global_one_is_and_nowhere_else():
    """A mask of minus infinities is a buffer, too."""
    average = BufferAverage({"mask": torch.tensor([-torch.inf, 0.0])}, several=False)
    average.check({"mask": torch.tensor([-torch.inf, 1.0])}, "client 0")
    with pytest.raises(FusionError, match="client 1: buffer 'mask' is not finite"):
        average.check({"mask": torch.tensor([0.0, -torch.inf])}, "client 1")
    for _ in range(2):
        average.add({"mask": torch.tensor([-torch.inf, 1.0])}, 0.5)
    averaged = average.averages(average.reduction().own, 1.0)
    assert averaged["mask"].tolist() == [-torch.inf, 1.0]
