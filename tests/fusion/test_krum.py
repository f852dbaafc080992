"""Krum against its definition, written out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes import fuse
from lightning_fedbayes.fusion import Cohort, Krum, MultiKrum

from .strategies import assert_same, posterior

SEEDS = st.integers(0, 2**32 - 1)


def scores(rows, byzantine):
    """Blanchard et al. 2017, §4, without a Gram matrix."""
    found = []
    for k, row in enumerate(rows):
        others = sorted(float(np.sum((row - other) ** 2)) for j, other in enumerate(rows) if j != k)
        found.append(sum(others[: len(rows) - byzantine - 2]))
    return np.array(found)


def draw(count, size, seed):
    random = np.random.default_rng(seed)
    rows = random.normal(0, 1, (count, size)) * 10 ** random.uniform(-1, 1, (count, 1))
    return rows, [posterior(row, random.uniform(0.1, 1, size)) for row in rows]


@given(count=st.integers(4, 12), size=st.integers(2, 20), seed=SEEDS, data=st.data())
@settings(deadline=None, max_examples=60)
def test_the_client_of_the_least_score(count, size, seed, data):
    byzantine = data.draw(st.integers(0, (count - 4) // 2))
    rows, clients = draw(count, size, seed)
    least = int(scores(rows, byzantine).argmin())
    assert_same(fuse(Krum(byzantine=byzantine), clients), clients[least], rtol=1e-14)


@given(count=st.integers(4, 12), size=st.integers(2, 20), seed=SEEDS, data=st.data())
@settings(deadline=None, max_examples=60)
def test_the_average_of_the_least_scores(count, size, seed, data):
    byzantine = data.draw(st.integers(0, (count - 4) // 2))
    keep = data.draw(st.none() | st.integers(1, count))
    rows, clients = draw(count, size, seed)
    kept = scores(rows, byzantine).argsort()[: count - byzantine if keep is None else keep]
    expected = fuse("nwa", [clients[k] for k in kept])
    assert_same(fuse(MultiKrum(byzantine=byzantine, keep=keep), clients), expected, rtol=1e-12)


@pytest.mark.parametrize(("count", "most"), [(3, 0), (4, 0), (5, 1), (6, 1), (7, 2), (8, 2), (20, 8)])
def test_the_default_is_the_most_that_is_allowed(count, most):
    _, clients = draw(count, 5, count)
    assert 2 * most + 2 < count <= 2 * (most + 1) + 2
    assert_same(fuse("multi_krum", clients), fuse(MultiKrum(byzantine=most, keep=count - most), clients), rtol=0)
    assert_same(fuse("krum", clients), fuse(Krum(byzantine=most), clients), rtol=0)


@pytest.mark.parametrize("rule", ["krum", "multi_krum", Krum(byzantine=3)])
@pytest.mark.parametrize("count", [1, 2])
def test_too_few_to_judge_are_averaged(rule, count):
    _, clients = draw(count, 3, 0)
    assert_same(fuse(rule, clients), fuse("nwa", clients), rtol=1e-15)


def test_the_nearest_two_of_three_are_told_apart_by_the_third():
    """With one neighbour each they score the same."""
    a, b, c = (posterior([value], value) for value in (0.0, 1.0, 5.0))
    for order in ((a, b, c), (b, a, c), (c, a, b), (c, b, a)):
        assert_same(fuse("krum", order), b, rtol=0)


def test_the_reason_has_the_figures():
    clients = tuple(posterior([value, 0.0], 0.0) for value in (0.0, 1.0, 3.0, 100.0, 101.5))
    weights = torch.full((5,), 0.2, dtype=torch.float64)
    outcome = Krum().apply(Cohort(clients, weights, None, (7, 3, 8, 1, 2)), {})
    assert outcome.reliability == {7: 0.0, 3: 1.0, 8: 0.0, 1: 0.0, 2: 0.0}
    assert outcome.excluded[1] == (
        "squared distances to its 2 nearest clients sum to 9411; those kept have at most 5"
    )
    assert set(outcome.excluded) == {7, 8, 1, 2}
