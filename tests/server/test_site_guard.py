"""Bounds on sites: what a lie can do, that honest clients arrive, and that both ends keep the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes import ClientUpdate, GaussianPosterior, RoundPlan, Server
from lightning_fedbayes.fusion import Sites
from lightning_fedbayes.server.guard import FEWEST
from lightning_fedbayes.server.schedule import Timeline
from lightning_fedbayes.server.site_guard import BEYOND, SETTLED, SiteLimits
from tests.federations import bayesian, federate

SIZE, CLIENTS = 40, 9
RULE = Sites(1.0, 0.4, "pvi")
START = GaussianPosterior({"w": torch.zeros(SIZE).double()}, {"w": torch.ones(SIZE).double()})


def likelihood(client: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Natural parameters of a client's Gaussian likelihood, around a truth that all have in common."""
    draws = torch.Generator().manual_seed(client)
    truth = torch.randn(SIZE, generator=torch.Generator().manual_seed(99)).double()
    precision = scale * (1 + torch.rand(SIZE, generator=draws).double())
    return precision, precision * (truth + 0.3 * torch.randn(SIZE, generator=draws).double())


def pooled(clients, scale=lambda client: 1.0):
    parts = [likelihood(client, scale(client)) for client in clients]
    precision, shift = 1 + sum(part[0] for part in parts), sum(part[1] for part in parts)
    return GaussianPosterior({"w": shift / precision}, {"w": 1 / precision})


class Conjugate:
    """A federation whose clients solve their problems exactly, and keep what the server has counted."""

    def __init__(self, lies=None, clients=range(CLIENTS), scale=lambda client: 1.0, weight=lambda client: 10):
        self.server = Server(START, fusion=RULE)
        self.clients, self.lies, self.scale, self.weight = tuple(clients), lies or {}, scale, weight

    @property
    def phase(self) -> int:
        return self.server.rounds

    def update(self, client: int) -> ClientUpdate:
        server = self.server
        base = RULE.natural_of(RULE.base(server.posterior, server.rule_state), torch.zeros(0))
        kept = server.sites.get(client)
        site = None if kept is None else (kept["precision"], kept["shift"])
        own = (torch.zeros(SIZE).double(), torch.zeros(SIZE).double()) if site is None else site
        trained = [old + new - mine for old, new, mine in zip(base, likelihood(client, self.scale(client)), own)]
        steps = torch.ones(SIZE).double()
        precision, shift = RULE.changed(base, site, tuple(trained), steps, 1 / len(self.clients), self.phase)
        sent = GaussianPosterior({"w": shift / precision}, {"w": 1 / precision})
        if client in self.lies:
            sent = self.lies[client](sent, server.posterior)
        return ClientUpdate(client, self.weight(client), sent)

    def run(self, rounds: int) -> GaussianPosterior:
        for number in range(self.server.rounds, self.server.rounds + rounds):
            self.server.begin(RoundPlan(number, self.clients, clients=len(self.clients)))
            for client in self.clients:
                assert self.server.admit(self.update(client)).error is None
            self.result = self.server.finish()
            assert self.result.success
        return self.server.posterior


class WithoutRounds(Conjugate):
    """The same without rounds: every message is late by what the others have been fused meanwhile."""

    phase = 0  # damping stays

    def __init__(self, delays=None, buffer=2, **options):
        super().__init__(**options)
        self.server = Server(START, fusion=RULE, late=fb.FedBuff())
        schedule = fb.Asynchronous(buffer=buffer, delays=delays or fb.Delays())
        self.timeline = Timeline(schedule, [10] * CLIENTS, 0, first=FEWEST)
        self.heard = [0] * CLIENTS

    def run(self, rounds: int) -> GaussianPosterior:
        under_way: dict[int, ClientUpdate] = {}
        for number in range(rounds):
            turn = self.timeline.turn(number)
            self.server.begin(RoundPlan(number, turn.starts, clients=CLIENTS, turn=turn).heard)
            under_way |= {client: self.update(client) for client in turn.starts}
            for arrival in turn.arrivals:
                assert self.server.admit(under_way.pop(arrival.client), arrival.started).error is None
                self.heard[arrival.client] += 1
            assert self.server.finish().success
        return self.server.posterior


def lie(mean=1.0, variance=1.0):
    """Return what makes an update one of ``mean`` times the change and ``variance`` times the variance."""
    return lambda sent, before: GaussianPosterior(
        {n: before.mean[n] + mean * (m - before.mean[n]) for n, m in sent.mean.items()},
        {n: variance * v for n, v in sent.variance.items()},
    )


def off(posterior, wanted):
    """Return the error of the mean in standard deviations, root mean square."""
    return float(((posterior.mean["w"] - wanted.mean["w"]).square() / wanted.variance["w"]).mean().sqrt())


LIES = {"flipped × 10": lie(-10), "× 1e6": lie(1e6), "sure": lie(variance=1e-6), "sure, flipped": lie(-1, 1e-9),
        "vague": lie(variance=1e6), "flipped": lie(-1)}


@pytest.mark.parametrize("falsify", LIES.values(), ids=LIES)
def test_one_of_nine_moves_the_posterior_by_little_and_nothing_is_left_of_it_after_removal(falsify):
    without, wanted = Conjugate(clients=range(1, CLIENTS)).run(40), pooled(range(1, CLIENTS))
    assert off(without, wanted) < 1e-3
    federation = Conjugate({0: falsify})
    assert off(federation.run(40), wanted) < 1.5
    assert off(fb.remove_client(federation.server, 0), wanted) < 0.35
    federation.lies = {}
    assert off(federation.run(60), pooled(range(CLIENTS))) < 1e-3  # an honest client is heard again


def test_the_size_of_a_bounded_change_is_what_the_page_says():
    """In the first round a site is its change: of one s times as large as the bound, 1 / s³ counts."""
    honest = Conjugate()
    honest.run(1)
    moves = [site["shift"].norm() for site in honest.server.sites.values()]  # the prior is N(0, 1)
    for factor in (20.0, 1000.0):
        federation = Conjugate({0: lambda sent, before, factor=factor: GaussianPosterior(
            {"w": factor * sent.mean["w"]}, sent.variance)})
        federation.run(1)
        middle = torch.stack([*moves[1:], moves[0] * factor]).sort().values[CLIENTS // 2]
        bound = 2 * float(middle) * (1 + 2 / SIZE**0.5)
        size = float((honest.server.sites[0]["shift"] * factor).norm())
        found = float(federation.server.sites[0]["shift"].norm())
        assert federation.result.aggregate.outlying == (0,)
        assert found == pytest.approx(bound * (bound / size) ** (BEYOND - 1), rel=1e-6)
        for client in range(1, CLIENTS):
            assert torch.equal(federation.server.sites[client]["shift"], honest.server.sites[client]["shift"])


def test_honest_clients_are_counted_bit_for_bit_as_sent():
    """Those that are within the bounds; what the server works out is what they would keep themselves."""
    federation = Conjugate()
    federation.run(30)
    assert all(row["outlying_clients"] == 0 for row in federation.server.history)
    total = [sum(site[name] for site in federation.server.sites.values()) for name in ("precision", "shift")]
    assert torch.equal(federation.server.rule_state["precision"], 1 + total[0])
    assert torch.equal(federation.server.rule_state["shift"], total[1])
    assert off(federation.server.posterior, pooled(range(CLIENTS))) < 1e-3


@pytest.mark.parametrize("count", [3, CLIENTS, 30])
def test_a_client_that_is_left_out_is_not_counted(count):
    """Also where it is the last one to come, beside whom nobody waits."""
    federation = Conjugate(clients=range(count))
    federation.run(2)
    federation.server.begin(RoundPlan(2, federation.clients, clients=count))
    for client in federation.clients:
        update = federation.update(client)
        if client == count - 1:
            update = ClientUpdate(client, 10, GaussianPosterior({"w": torch.full((SIZE,), 1e30).double()},
                                                                update.posterior.variance))
        assert federation.server.admit(update).error is None
    result = federation.server.finish()
    assert "moves the means by more" in str(result.outcomes[-1].error)
    assert count - 1 not in result.weights
    assert federation.server.accepted[count - 1] == 2
    for name, start in (("precision", 1.0), ("shift", 0.0)):
        total = start + sum(site[name] for site in federation.server.sites.values())
        assert torch.equal(federation.server.rule_state[name], total)


@pytest.mark.parametrize("many", [1.0, 30.0])
def test_a_client_that_has_far_to_go_arrives(many):
    """One of much more data than the others, and as many examples more; and one that is alone far away."""
    scale = lambda client: many if client == 3 else 1.0  # noqa: E731
    federation = Conjugate(scale=scale, weight=lambda client: int(10 * scale(client)))
    assert off(federation.run(200), pooled(range(CLIENTS), scale)) < 1e-3
    alone = Conjugate(scale=lambda client: 1e-3 if client else 1.0)
    assert off(alone.run(30), pooled(range(CLIENTS), alone.scale)) > 1  # bounded at first: nobody says that it is right
    assert 0 < SETTLED < 1


def test_nobody_takes_more_of_the_prior_than_its_share():
    federation = Conjugate({0: lie(variance=50.0), 1: lie(variance=50.0)}, clients=range(4))
    federation.run(20)
    assert float(federation.server.rule_state["precision"].min()) >= 0.7
    assert all(row["sites/held_back"] == 0 for row in federation.server.history)
    least = min(float(site["precision"].min()) for site in federation.server.sites.values())
    assert least == pytest.approx(-0.3 / 4, rel=1e-5)


@pytest.mark.parametrize("lies", [fb.SignFlip([0], scale=10.0), fb.FalseVariance([1], factor=1e-6)], ids=str)
def test_in_process_clients_keep_what_is_counted_in_memory_and_on_disk_by_both_engines(tmp_path: Path, lies):
    """Prior plus the sites that clients keep is the server's state, to the bit, whatever they have sent."""
    found = {}
    for name, engine, keep in (("memory", "sequential", ()), ("disk", "sequential", fb.Kept(folder=tmp_path / "s")),
                               ("stack", "vectorized", fb.Kept(folder=tmp_path / "v"))):
        made = fb.FederatedBayes(fb.IIDPartition(9), fusion="sites", adversaries=lies, engine=engine, keep=keep)
        federate(bayesian(), made, 4)
        rule, state = Sites(), made.state_dict()
        (kept,) = state["rule_states"].values()
        posterior = made.posterior
        assert sum(row["outlying_clients"] for row in made.history) > 0
        if name == "memory":
            prior = rule.natural(*rule.base(posterior, {}).flatten())
            random = posterior.flatten()[1] > 0
            for part, start in zip(("precision", "shift"), prior, strict=True):
                total = sum((each["kept"][part] for each in state["clients"].values()), start[random])
                assert torch.equal(total, kept[part][random])
        without = fb.remove_client(made, 0)
        found[name] = posterior, without
    for ours, theirs in zip(found["memory"], found["disk"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.flatten(), theirs.flatten(), strict=True))
    for ours, theirs in zip(found["memory"], found["stack"], strict=True):
        torch.testing.assert_close(ours.flatten()[0], theirs.flatten()[0], rtol=0, atol=0.01)  # as without attacks


def test_a_checkpoint_without_a_clients_site_is_refused(tmp_path: Path):
    made = fb.FederatedBayes(fb.IIDPartition(3), fusion="sites")
    trainer = federate(bayesian(), made, 2)
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=False)
    (state,) = (each for each in content["callbacks"].values() if "rule_states" in each)
    del state["clients"][1]
    torch.save(content, path)
    with pytest.raises(fb.FederationError, match="no state of 1, and each keeps its site"):
        federate(bayesian(), fb.FederatedBayes(fb.IIDPartition(3), fusion="sites"), 3, ckpt_path=path)


@pytest.mark.parametrize("buffer", [1, 4])
@pytest.mark.parametrize("slow", [{}, {0: 20.0}, {0: 20.0, 5: 0.2}])
def test_without_rounds_nobody_honest_is_held_up(slow, buffer):
    """However seldom a client is heard, each time its site comes as near to its likelihood as damping lets it."""
    made = WithoutRounds(fb.Delays(slow=slow), buffer)
    made.run(360 // buffer)
    assert all(made.heard)
    for client, heard in enumerate(made.heard):
        part = made.server.sites[client]["precision"] / likelihood(client)[0]
        assert (part - (1 - 0.6**heard)).abs().max() < 1e-6
    assert not any(row["outlying_clients"] for row in made.server.history)


@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("buffer", [1, 3])
def test_without_rounds_a_liar_has_about_the_influence_of_a_client(lies, buffer):
    """Few messages are compared with the last ones of all others, also those of one that is three times as fast."""
    made = WithoutRounds(fb.Delays(slow={3: 0.3}), buffer, lies={3: LIES[lies]})
    honest = pooled([client for client in range(CLIENTS) if client != 3])
    assert off(made.run(200 // buffer), honest) < 2  # the prior is at 4.1


def test_without_rounds_limits_follow_a_clients_pace_and_its_beginning():
    """Of a change: times the passes that it took, and at least 2⁻ⁿ of a whole site for one that was heard n times."""
    sizes = torch.tensor([0.1, 0.2, 10.0, 20.0, 1.0], dtype=torch.float64)[:, None]
    limits = SiteLimits(sizes, 1.0, lambda client: False, lambda client: [1.0, 4.0][client],
                        lambda client: [0.5, 0.0][client])
    found = limits.of({0: 1.0, 1: 1.0})[:, :, 0]
    assert found.tolist() == [[5.0, 10.0, 10.0, 20.0, 1.0], [0.4, 0.8, 10.0, 20.0, 1.0]]


def test_without_rounds_a_guard_knows_how_far_each_client_is():
    made = WithoutRounds(buffer=3)
    made.run(12)
    made.server.begin(RoundPlan(12, (4, 5, 6), clients=CLIENTS))
    made.server._started = {4: 2}
    guard = next(iter(made.server._aggregations.values())).guard
    assert guard._passes_of(4) == pytest.approx(11 * 3 / CLIENTS)
    assert guard._passes_of(5) == 1
    assert [guard._begins_of(client) for client in range(CLIENTS)] == [0.5**heard for heard in made.heard]
    guard.remember(torch.ones(2, 5, 1, dtype=torch.float64), [10.0, 10.0], [4, 5])
    known = dict(zip(guard.memory["clients"].tolist(), guard.memory["known"][:, :, 0].tolist()))
    passes = 11 * 3 / CLIENTS
    assert known[4] == pytest.approx([1 / passes, 1 / passes, 1, 1, 1])
    assert known[5] == [1, 1, 1, 1, 1]
    assert len(known) == CLIENTS
    assert guard._begins_of(4) == 0.5 ** (made.heard[4] + 1)
