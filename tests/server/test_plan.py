"""The plan of a round depends on (seed, round, client) alone, and is fair."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.server.plan import (
    Batching,
    batches_per_epoch,
    check_batches,
    choose_cohort,
    client_order,
    plan_round,
)

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)
MANY = settings(deadline=None)


@st.composite
def batchings(draw):
    return Batching(
        batch_size=draw(st.integers(1, 12)),
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        local_epochs=draw(st.integers(1, 3)),
        fraction=draw(st.floats(0.01, 1.0)),
        seed=draw(st.integers(0, 2**31)),
    )


@pytest.mark.parametrize(
    ("clients", "fraction", "size"),
    [
        (10, 1.0, 10),
        (10, 0.5, 5),
        (10, 0.25, 3),
        (10, 0.24, 2),
        (10, 0.05, 1),
        (10, 0.01, 1),
        (10, 0.99, 10),
        (3, 0.5, 2),
        (1, 0.1, 1),
        (100, 0.1, 10),
        (7, 0.3, 2),
    ],
)
def test_cohort_has_the_rounded_size(clients, fraction, size):
    """max(⌊C·K + ½⌋, 1)."""
    cohort = choose_cohort(0, clients, fraction, seed=0)
    assert len(cohort) == len(set(cohort)) == size
    assert list(cohort) == sorted(cohort)
    assert set(cohort) <= set(range(clients))


def test_cohorts_are_exchangeable():
    """Every client, and every pair of clients, is drawn equally often, whatever the round before drew."""
    clients, rounds, fraction = 8, 4000, 0.375
    cohorts = [choose_cohort(round, clients, fraction, seed=1) for round in range(rounds)]
    present = np.zeros((rounds, clients))
    for round, cohort in enumerate(cohorts):
        present[round, list(cohort)] = 1
    single = 3 / 8
    assert np.abs(present.mean(0) - single).max() < 5 * (single * (1 - single) / rounds) ** 0.5
    pair = 3 / 8 * 2 / 7
    together = (present.T @ present / rounds)[~np.eye(clients, dtype=bool)]
    assert np.abs(together - pair).max() < 5 * (pair * (1 - pair) / rounds) ** 0.5
    next_round = present[:-1].T @ present[1:] / (rounds - 1)
    assert np.abs(next_round - single**2).max() < 5 * single / rounds**0.5


@given(round=st.integers(0, 1000), sizes=SIZES, batching=batchings())
@MANY
def test_plan_is_the_same_every_time_and_counts_batches(round, sizes, batching):
    plan = plan_round(round, sizes, batching)
    torch.rand(1)
    assert plan == plan_round(round, sizes, batching)
    assert plan.cohort == choose_cohort(round, len(sizes), batching.fraction, batching.seed)
    counted = [batching.local_epochs * batches_per_epoch(sizes[client], batching) for client in plan.cohort]
    assert plan.starts == (0, *np.cumsum(counted).tolist())
    assert plan.num_batches == sum(counted)


@given(round=st.integers(0, 1000), client=st.integers(0, 50), size=st.integers(1, 60), batching=batchings())
@MANY
def test_every_local_epoch_is_a_permutation(round, client, size, batching):
    orders = client_order(round, client, size, batching)
    assert len(orders) == batching.local_epochs
    for order, again in zip(orders, client_order(round, client, size, batching), strict=True):
        assert sorted(order.tolist()) == list(range(size))
        assert torch.equal(order, again)
        if not batching.shuffle:
            assert order.tolist() == list(range(size))


def test_orders_of_rounds_clients_epochs_and_seeds_all_differ():
    orders = [
        tuple(order.tolist())
        for seed in range(3)
        for round in range(3)
        for client in range(3)
        for order in client_order(round, client, 50, Batching(batch_size=4, local_epochs=3, seed=seed))
    ]
    assert len(set(orders)) == len(orders) == 81


def test_all_orders_are_equally_likely():
    rounds = 3000
    counts = Counter(tuple(client_order(round, 0, 3, Batching(batch_size=1))[0].tolist()) for round in range(rounds))
    assert len(counts) == 6
    share = 1 / 6
    assert max(abs(n / rounds - share) for n in counts.values()) < 5 * (share * (1 - share) / rounds) ** 0.5


def test_clients_that_would_never_train_are_named():
    batching = Batching(batch_size=4, drop_last=True)
    check_batches(["a", "b"], [4, 9], batching)
    check_batches(["a", "b"], [1, 2], Batching(batch_size=4))
    with pytest.raises(FederationError, match=r"batch of 4, and drop_last=True: b \(3\), c \(1\).*drop_last=False"):
        check_batches(["a", "b", "c"], [4, 3, 1], batching)
