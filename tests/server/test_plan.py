"""The plan of a round depends on (seed, round, client) alone, and is fair."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.server.plan import (
    Batching,
    batches_per_epoch,
    check_batches,
    choose_cohort,
    client_order,
    plan_round,
)
from lightning_fedbayes.server.schedule import Timeline
from tests.refusals import refusals

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


@st.composite
def timelines(draw):
    clients = draw(st.integers(1, 8))
    concurrency = draw(st.integers(1, clients))
    delays = fb.Delays(
        typical=draw(st.sampled_from([0.0, 1.0])),
        spread=draw(st.sampled_from([0.0, 0.5])),
        slow={0: draw(st.sampled_from([1.0, 20.0]))},
        network=draw(st.sampled_from([0.0, 0.3])),
        away=draw(st.sampled_from([(), ((0, 0.5, 3.0),)])),
    )
    schedule = fb.Asynchronous(
        concurrency,
        draw(st.integers(1, concurrency)),
        delays,
        max_staleness=draw(st.sampled_from([None, 2])) if delays.typical else None,
    )
    return Timeline(schedule, [10] * clients, draw(st.integers(0, 3)))


@settings(max_examples=60, deadline=None)
@given(timelines())
def test_every_turn_fuses_a_buffer_of_messages_of_clients_that_had_started(timeline):
    started, before, most = {}, 0.0, timeline.schedule.max_staleness or math.inf
    for round in range(12):
        turn = timeline.turn(round)
        assert list(turn.starts) == sorted(set(turn.starts))
        assert not started.keys() & set(turn.starts) - {each.client for each in turn.arrivals}
        counting = [each for each in turn.arrivals if each.client not in turn.refused]
        assert len(counting) == timeline.buffer
        assert len({each.client for each in turn.arrivals}) == len(turn.arrivals)
        started |= dict.fromkeys(turn.starts, round)
        for each in turn.arrivals:
            assert started.pop(each.client) == each.started
            assert before <= each.time <= turn.time
            too_late = round - each.started > most
            assert (each.client in turn.refused) == too_late
        before = turn.time
        assert {each.client for each in turn.waiting} == started.keys()
        assert sum(round - each.started <= most for each in turn.waiting) <= timeline.concurrency
        figures = turn.figures(round)
        assert figures["schedule/staleness"] == sum(round - each.started for each in counting) / timeline.buffer
        assert figures["schedule/under_way"] == len(turn.waiting)


@pytest.mark.parametrize(("concurrency", "fraction"), [(None, 1.0), (3, 0.5)])
def test_without_delays_a_buffer_of_all_is_a_round(concurrency, fraction):
    schedule = fb.Asynchronous(concurrency, concurrency or 6, fb.Delays(0.0))
    timeline = Timeline(schedule, [5] * 6, seed=4)
    for round in range(6):
        turn = timeline.turn(round)
        assert turn.starts == choose_cohort(round, 6, fraction, 4) == tuple(each.client for each in turn.arrivals)
        assert (turn.time, turn.waiting) == (0.0, ())
        plan = plan_round(round, [5] * 6, Batching(2, fraction=1.0), timeline)
        assert plan.heard.cohort == plan.cohort == turn.starts


def test_an_earlier_turn_is_worked_out_again():
    timeline, again = (Timeline(fb.Asynchronous(buffer=2), [5] * 4, 1) for _ in range(2))
    turns = [timeline.turn(round) for round in range(9)]
    assert again.turn(8) == turns[8]
    assert [again.turn(round) for round in (3, 4, 0)] == [turns[3], turns[4], turns[0]]
    assert Timeline(fb.Asynchronous(buffer=2), [5] * 4, 2).turn(8) != turns[8]


def test_logarithms_of_times_are_normal():
    delays = fb.Delays(typical=2.0, spread=0.5, slow={1: 10.0})
    logs = torch.tensor([[math.log(delays.duration(client, job, 1.0, 0)) for job in range(2000)] for client in (0, 1)])
    assert logs.mean(1).sub(torch.tensor([2.0, 20.0]).log()).abs().max() < 4 * 0.5 / 2000**0.5
    assert logs.std(1).sub(0.5).abs().max() < 4 * 0.5 / 4000**0.5
    assert abs(float(torch.corrcoef(logs)[0, 1])) < 4 / 2000**0.5


def test_times_follow_sizes_networks_and_traces():
    assert fb.Delays(2.0, 0.0, by_size=True).duration(0, 0, 1.5, 0) == 3.0
    assert fb.Delays(2.0, 0.0, network=0.5).duration(0, 0, 1.5, 0) == 2.5
    delays = fb.Delays(spread=0.0, trace={0: [3.0, 5.0], 1: [1.0]})
    assert [delays.duration(0, job, 1.0, 0) for job in range(3)] == [3.0, 5.0, 3.0]
    assert delays.duration(2, 0, 1.0, 0) == 1.0


def test_who_is_away_neither_starts_nor_sends():
    delays = fb.Delays(1.0, 0.0, away=((0, 0.5, 4.2), (0, 4.0, 6.2), (1, 0.0, 3.1)))
    timeline = Timeline(fb.Asynchronous(buffer=1, delays=delays), [5] * 3, 0)
    turns = [timeline.turn(round) for round in range(12)]
    arrivals = {k: [each.time for turn in turns for each in turn.arrivals if each.client == k] for k in range(3)}
    assert arrivals[0][0] == 6.2
    assert arrivals[1][0] == 5.0  # it is back at 3.1, and starts when the server fuses next
    assert arrivals[2][:5] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_one_that_never_answers_holds_a_place_until_it_is_given_up():
    delays = fb.Delays(1.0, 0.0, away=((0, 0.5, math.inf),))
    held, given_up = (Timeline(fb.Asynchronous(2, 1, delays, max_staleness=most), [5] * 4, 2) for most in (None, 3))
    assert math.inf in [each.time for each in held.turn(0).waiting]
    assert [len(timeline.turn(20).waiting) for timeline in (held, given_up)] == [1, 2]
    assert all(0 not in held.turn(round).starts for round in range(40))


test_impossible_schedules_are_refused = refusals(
    FederationError,
    (lambda: fb.Delays(typical=-1.0), "typical=-1"),
    (lambda: fb.Delays(trace={0: []}), r"trace\[0\]=\[\]: give times"),
    (lambda: fb.Delays(away=((0, 3.0, 1.0),)), r"away: \(0, 3\.0, 1\.0\): give \(client, from, until\)"),
    (lambda: fb.Asynchronous(buffer=0), "buffer=0"),
    (lambda: fb.Asynchronous(2, 3), "buffer=3 with concurrency=2: no more messages can arrive"),
    (lambda: fb.Asynchronous(delays=3.0), r"give fb\.Delays"),
    (lambda: fb.Asynchronous(late="fedbuff"), r"give fb\.methods\.FedBuff"),
    (lambda: Timeline(fb.Asynchronous(5), [1] * 4, 0), "concurrency=5, but there are 4 clients"),
    (lambda: Timeline(fb.Asynchronous(delays=fb.Delays(slow={4: 2.0})), [1] * 4, 0), "names client 4"),
    (lambda: Timeline(fb.Asynchronous(buffer=1), [1] * 4, 0, min_clients=2), "min_clients=2 with a buffer of 1"),
)
