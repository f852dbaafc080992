"""Late messages: what each method makes of what a client has trained from an older global model."""

import math

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.methods import Cavity, SiteMethod, get_method
from lightning_fedbayes.server.schedule import Timeline


def gaussian(mean, variance=None):
    mean = torch.tensor(mean, dtype=torch.float64)
    variance = torch.zeros_like(mean) if variance is None else torch.tensor(variance, dtype=torch.float64)
    return fb.GaussianPosterior({"w": mean}, {"w": variance})


START, NOW = gaussian([1.0, 2.0], [4.0, 0.0]), gaussian([10.0, 20.0], [9.0, 0.0])
SENT = gaussian([3.0, 1.0], [1.0, 0.0])


def test_fedbuff_adds_the_change_by_its_staleness():
    found = fb.FedBuff(exponent=1.0).taken(SENT, START, NOW, staleness=3)
    assert found.mean["w"].tolist() == [10 + 2 / 4, 20 - 1 / 4]
    assert found.variance["w"].tolist() == [9 * (1 / 4) ** 0.25, 0.0]
    assert fb.FedBuff().taken(SENT, START, START, 0) is SENT
    assert fb.FedBuff().weight(3) == 0.5


def test_fedasync_moves_towards_the_message():
    share = 0.6 / 2
    found = fb.FedAsync().taken(SENT, START, NOW, staleness=3)
    assert found.mean["w"].tolist() == pytest.approx([(1 - share) * 10 + share * 3, (1 - share) * 20 + share])
    assert found.variance["w"].tolist() == pytest.approx([(1 - share) * 9 + share, 0.0])
    fresh = fb.FedAsync().taken(SENT, NOW, NOW, 0)
    assert fresh.mean["w"].tolist() == pytest.approx([0.4 * 10 + 0.6 * 3, 0.4 * 20 + 0.6])


def test_a_variance_that_had_none_at_the_start_is_the_clients():
    found = fb.FedBuff().taken(gaussian([1.0], [0.5]), gaussian([0.0], [0.0]), gaussian([2.0], [0.0]), 1)
    assert found.variance["w"].tolist() == [0.5]


def test_buffers_are_between_the_present_and_the_clients():
    sent, now = {"m": torch.tensor([4.0]), "n": torch.tensor(7)}, {"m": torch.tensor([0.0]), "n": torch.tensor(2)}
    found = fb.FedBuff().buffers(sent, now, 3)
    assert (found["m"].item(), found["n"].item()) == (2.0, 7)


@pytest.mark.parametrize("name", ["scaffold", "fednova", "ditto", "population", "bayes_admm"])
def test_methods_of_one_round_are_refused(name):
    with pytest.raises(fb.FederationError, match="schedule= with"):
        fb.Server(START, fusion=name, late=fb.FedBuff())


def test_sums_of_a_round_are_refused_and_others_exact():
    sums, slopes = (fb.GaussianPosterior.point_mass({name: torch.zeros(2, 2)}) for name in ("sums.gram", "slopes.loss"))
    with pytest.raises(fb.FederationError, match=r"slopes\.loss are sums over one round's clients"):
        fb.Server(slopes, fusion="sums", late=fb.FedBuff())
    server = fb.Server(sums, fusion="sums", late=fb.FedBuff())
    for round, (client, started) in enumerate([(0, 0), (1, 0), (2, 1)]):
        server.begin(fb.RoundPlan(round, (client,), clients=3))
        before = server.versions.begun[started].posterior.mean["sums.gram"]
        sent = fb.GaussianPosterior.point_mass({"sums.gram": before + 10.0**client})
        assert server.admit(fb.ClientUpdate(client, 1, sent), started).error is None
        server.finish()
    assert server.posterior.mean["sums.gram"].tolist() == [[111.0, 111.0], [111.0, 111.0]]


def test_a_server_refuses_messages_about_rounds_that_nobody_waits_for():
    server = fb.Server(START, fusion="fedavg", late=fb.FedBuff())
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


# -- sites: conjugate clients, whose posterior is prior times likelihoods ----------------------------------------------


class Clients:
    """Clients with Gaussian likelihoods, solved exactly, that keep their sites."""

    def __init__(self, count, size, server):
        draws = torch.Generator().manual_seed(0)
        self.precision = 5 * torch.rand(count, size, generator=draws, dtype=torch.float64) + 0.5
        self.shift = 3 * torch.randn(count, size, generator=draws, dtype=torch.float64)
        self.kept = [{} for _ in range(count)]
        self.heard = [0] * count
        self.server = server

    def train(self, client, shared):
        """Return the update of a client: natural parameters of its solution are λ + (likelihood − site) / ρ."""
        method, kept = self.server.method, self.kept[client]
        participant = fb.Participant(client, 10, kept, gaussian=frozenset({"w"}), takes_gradients=False)
        cavity = method.problem(shared, participant).cavity
        assert isinstance(cavity, Cavity)
        base_precision, base_shift = method.rule.natural_of(cavity.base, cavity.step)
        site = [kept.get(name, torch.zeros_like(cavity.step)) for name in ("precision", "shift")]
        precision = base_precision + (self.precision[client] - site[0]) / cavity.step
        shift = base_shift + (self.shift[client] - site[1]) / cavity.step
        report = method.report(shared, participant, fb.Trained(gaussian((shift / precision).tolist(),
                                                                        (1 / precision).tolist())))
        return report.update(client, 10)

    def pooled(self, clients):
        precision = 1 + self.precision[clients].sum(0)
        return self.shift[clients].sum(0) / precision, 1 / precision


def run(schedule, turns, clients=6, size=4, safeguards=None):
    start = gaussian([0.0] * size, [1.0] * size)
    server = fb.Server(start, fusion=fb.Sites(precision="trained"), late=schedule.late,
                       safeguards=fb.Safeguards() if safeguards is None else safeguards)
    made, timeline, under_way = Clients(clients, size, server), Timeline(schedule, [10] * clients, 0), {}
    for round in range(turns):
        turn = timeline.turn(round)
        shared = server.begin(fb.RoundPlan(round, tuple(sorted(each.client for each in turn.arrivals)),
                                           clients=clients, turn=turn))
        under_way |= {client: made.train(client, shared) for client in turn.starts}
        for each in turn.arrivals:
            assert server.admit(under_way.pop(each.client), each.started).error is None
            made.heard[each.client] += 1
        result = server.finish()
        for client, kept in result.aggregate.counted.items():
            made.kept[client] = dict(kept)
        server.versions.forget({each.started for each in turn.waiting})
        heard = [kept for kept in made.kept if kept]
        state = server.rule_state  # prior times sites, each once, to the bit
        assert torch.equal(state["precision"], 1 + sum(kept["precision"] for kept in heard))
        assert torch.equal(state["shift"], sum(kept["shift"] for kept in heard))
    return server, made


@pytest.mark.parametrize(("delays", "missing"), [
    (fb.Delays(), ()),
    (fb.Delays(slow={0: 20.0}), ()),
    (fb.Delays(away=((1, 1.5, 12.0),)), ()),
    (fb.Delays(away=((2, 0.01, math.inf),)), (2,)),
])
@pytest.mark.parametrize("buffer", [1, 3])
def test_late_sites_end_at_the_posterior_of_all_that_were_heard(delays, missing, buffer):
    server, made = run(fb.Asynchronous(buffer=buffer, delays=delays), 240 // buffer)
    others = [client for client in range(6) if client not in missing]
    assert sorted(server.accepted) == others
    for client in others:  # one that is heard a few times has come as far as its damping lets it, and is not held back
        part = made.kept[client]["precision"] / made.precision[client]
        assert (part - (1 - 0.6 ** made.heard[client])).abs().max() < 1e-6
    if not delays.slow:
        for found, true in zip(server.posterior.flatten(), made.pooled(others)):
            torch.testing.assert_close(found, true, rtol=1e-6, atol=1e-6)


def test_a_site_is_counted_alike_without_a_bound():
    run(fb.Asynchronous(buffer=2), 30, safeguards=fb.Safeguards(max_influence=None))


def test_a_late_site_changes_the_present_posterior_by_its_own_change():
    method = get_method("sites")
    assert isinstance(method, SiteMethod)
    before, after, sent = (gaussian(mean, variance) for mean, variance in (
        ([0.5, -1.0], [0.5, 0.0]), ([2.0, 3.0], [0.125, 0.0]), ([1.0, 4.0], [0.25, 0.0])))
    shared = [fb.Shared(each, is_new=False) for each in (before, after)]
    found = method.late(sent, *shared, 4, fb.FedBuff())
    precision = 1 / 0.25 - 1 / 0.5 + 1 / 0.125
    assert found.variance["w"].tolist() == pytest.approx([1 / precision, 0.0])
    assert found.mean["w"].tolist() == pytest.approx([(1.0 / 0.25 - 0.5 / 0.5 + 2.0 / 0.125) / precision, 3 + 4 + 1])
    wide = gaussian([0.0, 0.0], [1e6, 0.0])
    with pytest.raises(fb.FusionError, match="takes more of a precision away than there is"):
        method.late(wide, shared[1], shared[0], 4, fb.FedBuff())
