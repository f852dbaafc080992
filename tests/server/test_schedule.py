"""Schedules without rounds: who starts when, and whose message arrives."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.server.plan import Batching, choose_cohort, plan_round
from lightning_fedbayes.server.schedule import Timeline


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


def test_times_follow_sizes_networks_and_traces(tmp_path):
    assert fb.Delays(2.0, 0.0, by_size=True).duration(0, 0, 1.5, 0) == 3.0
    assert fb.Delays(2.0, 0.0, network=0.5).duration(0, 0, 1.5, 0) == 2.5
    file = tmp_path / "trace.csv"
    file.write_text("client,seconds\n0,3\n1,1\n0,5\n")
    delays = fb.Delays.from_file(file, spread=0.0)
    assert [delays.duration(0, job, 1.0, 0) for job in range(3)] == [3.0, 5.0, 3.0]
    assert delays.duration(2, 0, 1.0, 0) == 1.0
    file.write_text("client,minutes\n0,3\n")
    with pytest.raises(FederationError, match=r"trace\.csv is no trace: KeyError\('seconds'\)"):
        fb.Delays.from_file(file)


def test_who_is_away_neither_starts_nor_sends():
    delays = fb.Delays(1.0, 0.0, away=((0, 0.5, 4.2), (0, 4.0, 6.2), (1, 0.0, 3.1)))
    timeline = Timeline(fb.Asynchronous(buffer=1, delays=delays), [5] * 3, 0)
    turns = [timeline.turn(round) for round in range(12)]
    arrivals = {
        client: [each.time for turn in turns for each in turn.arrivals if each.client == client] for client in range(3)
    }
    assert arrivals[0][0] == 6.2
    assert arrivals[1][0] == 5.0  # it is back at 3.1, and starts when the server fuses next
    assert arrivals[2][:5] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_one_that_never_answers_holds_a_place_until_it_is_given_up():
    delays = fb.Delays(1.0, 0.0, away=((0, 0.5, math.inf),))
    held, given_up = (Timeline(fb.Asynchronous(2, 1, delays, max_staleness=most), [5] * 4, 2) for most in (None, 3))
    assert math.inf in [each.time for each in held.turn(0).waiting]
    assert [len(timeline.turn(20).waiting) for timeline in (held, given_up)] == [1, 2]
    assert all(0 not in held.turn(round).starts for round in range(40))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: fb.Delays(typical=-1.0), "typical=-1"),
        (lambda: fb.Delays(slow={0: 0.0}), r"slow\[0\]=0"),
        (lambda: fb.Delays(trace={0: []}), r"trace\[0\]=\[\]: give times"),
        (lambda: fb.Delays(away=((0, 3.0, 1.0),)), r"away: \(0, 3\.0, 1\.0\): give \(client, from, until\)"),
        (lambda: fb.Asynchronous(buffer=0), "buffer=0"),
        (lambda: fb.Asynchronous(2, 3), "buffer=3 with concurrency=2: no more messages can arrive"),
        (lambda: fb.Asynchronous(delays=3.0), r"give fb\.Delays"),
        (lambda: fb.Asynchronous(late="fedbuff"), r"give fb\.methods\.FedBuff"),
        (lambda: fb.Asynchronous(max_staleness=-1), "max_staleness=-1"),
        (lambda: Timeline(fb.Asynchronous(5), [1] * 4, 0), "concurrency=5, but there are 4 clients"),
        (lambda: Timeline(fb.Asynchronous(buffer=5), [1] * 4, 0), "buffer=5, but there are 4 clients"),
        (lambda: Timeline(fb.Asynchronous(delays=fb.Delays(slow={4: 2.0})), [1] * 4, 0), "names client 4"),
        (lambda: Timeline(fb.Asynchronous(buffer=1), [1] * 4, 0, min_clients=2), "min_clients=2 with a buffer of 1"),
    ],
)
def test_impossible_schedules_are_refused(wrong, message):
    with pytest.raises(FederationError, match=message):
        wrong()
