"""Bounds on sites: what a lie can do, that honest clients arrive, and that both ends keep the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes import ClientUpdate, GaussianPosterior, RoundPlan, Server
from lightning_fedbayes.fusion import Sites
from lightning_fedbayes.server.site_guard import BEYOND, SETTLED
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

    def update(self, client: int) -> ClientUpdate:
        server = self.server
        base = RULE.natural_of(RULE.base(server.posterior, server.rule_state), torch.zeros(0))
        kept = server.sites.get(client)
        site = None if kept is None else (kept["precision"], kept["shift"])
        own = (torch.zeros(SIZE).double(), torch.zeros(SIZE).double()) if site is None else site
        trained = [old + new - mine for old, new, mine in zip(base, likelihood(client, self.scale(client)), own)]
        steps = torch.ones(SIZE).double()
        precision, shift = RULE.changed(base, site, tuple(trained), steps, 1 / len(self.clients), server.rounds)
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
