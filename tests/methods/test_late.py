"""Late messages: what each method makes of what a client has trained from an older global model."""

import math

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.methods import FedAsync, FedBuff, Shared, get_method
from lightning_fedbayes.methods.method import split
from lightning_fedbayes.server.schedule import Timeline

from .conjugate import Conjugate


def gaussian(mean, variance=None):
    mean = torch.tensor(mean, dtype=torch.float64)
    variance = torch.zeros_like(mean) if variance is None else torch.tensor(variance, dtype=torch.float64)
    return fb.GaussianPosterior({"w": mean}, {"w": variance})


START, NOW = gaussian([1.0, 2.0], [4.0, 0.0]), gaussian([10.0, 20.0], [9.0, 0.0])
SENT = gaussian([3.0, 1.0], [1.0, 0.0])


def test_fedbuff_adds_the_change_by_its_staleness():
    found = FedBuff(exponent=1.0).taken(SENT, START, NOW, staleness=3)
    assert found.mean["w"].tolist() == [10 + 2 / 4, 20 - 1 / 4]
    assert found.variance["w"].tolist() == [9 * (1 / 4) ** 0.25, 0.0]
    assert FedBuff().taken(SENT, START, START, 0) is SENT
    assert FedBuff().weight(3) == 0.5


def test_fedasync_moves_towards_the_message():
    share = 0.6 / 2
    found = FedAsync().taken(SENT, START, NOW, staleness=3)
    assert found.mean["w"].tolist() == pytest.approx([(1 - share) * 10 + share * 3, (1 - share) * 20 + share])
    assert found.variance["w"].tolist() == pytest.approx([(1 - share) * 9 + share, 0.0])
    fresh = FedAsync().taken(SENT, NOW, NOW, 0)
    assert fresh.mean["w"].tolist() == pytest.approx([0.4 * 10 + 0.6 * 3, 0.4 * 20 + 0.6])


@pytest.mark.parametrize("name", ["scaffold", "fednova", "ditto", "population"])
def test_methods_of_one_round_are_refused(name):
    with pytest.raises(FederationError, match="schedule= with"):
        fb.Server(START, fusion=name, late=FedBuff())


def test_sums_of_a_round_are_refused_and_others_exact():
    sums, slopes = (fb.GaussianPosterior.point_mass({name: torch.zeros(2, 2)}) for name in ("sums.gram", "slopes.loss"))
    with pytest.raises(FederationError, match=r"slopes\.loss are sums over one round's clients"):
        fb.Server(slopes, fusion="sums", late=FedBuff())
    server = fb.Server(sums, fusion="sums", late=FedBuff())
    for round, (client, started) in enumerate([(0, 0), (1, 0), (2, 1)]):
        server.begin(fb.RoundPlan(round, (client,), clients=3))
        before = server.versions.begun[started].posterior.mean["sums.gram"]
        sent = fb.GaussianPosterior.point_mass({"sums.gram": before + 10.0**client})
        assert server.admit(fb.ClientUpdate(client, 1, sent), started).error is None
        server.finish()
    assert server.posterior.mean["sums.gram"].tolist() == [[111.0, 111.0], [111.0, 111.0]]


def test_a_server_refuses_messages_about_rounds_that_nobody_waits_for():
    server = fb.Server(START, fusion="fedavg", late=FedBuff())
    for round in range(2):
        server.begin(fb.RoundPlan(round, (0,), clients=2))
        server.admit(fb.ClientUpdate(0, 1, SENT), round)
        server.finish()
    server.versions.forget({1})
    server.begin(fb.RoundPlan(2, (0, 1), clients=2))
    assert "round 1, which nobody waits for any more" in str(server.admit(fb.ClientUpdate(1, 1, SENT), 0).error)
    assert server.admit(fb.ClientUpdate(0, 1, SENT), 1).error is None
    server.finish()
    assert server.accepted == {0: 2}  # the round that it has trained in, from 1


def run(schedule, turns):
    made = Conjugate.drawn([10] * 6, unlike=0.2, effort=0.5)
    server = fb.Server(made.posterior(), fusion="sites", late=schedule.late)
    timeline, under_way = Timeline(schedule, [10] * 6, 0), {}
    for round in range(turns):
        turn = timeline.turn(round)
        cohort = tuple(sorted(each.client for each in turn.arrivals))
        shared = server.begin(fb.RoundPlan(round, cohort, clients=6, turn=turn))
        under_way |= {client: made.train(server.method, shared, client) for client in turn.starts}
        for each in turn.arrivals:
            report = under_way.pop(each.client)
            assert server.admit(report.update(each.client, 10), each.started).error is None
            made.kept[each.client] = dict(report.kept)
        counted = server.finish().aggregate.counted
        made.kept |= {client: dict(counted[client]) for client in counted.keys() & server.untold}
        server.versions.forget({each.started for each in turn.waiting})
        tensors = split(server.buffers)[1]
        for name, total in made.totals().items():  # every site once
            torch.testing.assert_close(total, tensors[name], rtol=0, atol=1e-12)
    return server, made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delays", "missing"),
    [
        (fb.Delays(), ()),
        (fb.Delays(slow={0: 20.0}), ()),
        (fb.Delays(away=((1, 1.5, 12.0),)), ()),
        (fb.Delays(away=((2, 0.01, math.inf),)), (2,)),
    ],
)
@pytest.mark.parametrize("buffer", [1, 3])
def test_late_sites_end_at_the_posterior_of_all_that_were_heard(delays, missing, buffer):
    """One that is never heard counts as the mean of those that are."""
    server, made = run(fb.Asynchronous(buffer=buffer, delays=delays), 480 // buffer)
    others = [client for client in range(6) if client not in missing]
    assert sorted(server.accepted) == others
    for client in others:
        kept, curvature = made.kept[client]["precision"], made.curvatures[client]
        torch.testing.assert_close(kept, curvature, rtol=1e-6 if not delays.slow else 0.3, atol=0)
    if not delays.slow:
        made.curvatures = made.curvatures * (6 / len(others))
        for found, true in zip(server.posterior.flatten(), made.pooled(clients=others).flatten()):
            torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-4)


def test_a_late_client_moves_the_present_means_as_far_as_its_own():
    before, after = gaussian([0.5, -1.0], [0.5, 0.0]), gaussian([2.0, 3.0], [0.125, 0.0])
    shared = [Shared(each, is_new=False) for each in (before, after)]
    sent = fb.GaussianPosterior.point_mass({"w": torch.tensor([1.0, 4.0]).double()})
    found = get_method("sites").late(sent, *shared, 4, FedBuff())
    assert found.mean["w"].tolist() == [2.5, 8.0]
    assert found.is_point_mass
    assert get_method("sites").late(sent, *shared, 0, FedBuff()) is sent
