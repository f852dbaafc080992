"""Sites against the theorems: conjugate models, any order and partition, absence, removal, and the guard."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_fedbayes as fb
from lightning_fedbayes import ClientUpdate, FusionError, GaussianPosterior, RoundPlan, Server
from lightning_fedbayes.fusion import BayesADMM, PartitionedVI, Reliability, Sites
from lightning_fedbayes.fusion.sites import LEAST_SHARE, Natural
from lightning_fedbayes.methods.sites import without_site
from tests.federations import bayesian, federate

PRIOR = (0.5, 2.0)
LIKELIHOODS = [
    (torch.tensor(precision, dtype=torch.float64), torch.tensor(shift, dtype=torch.float64))
    for precision, shift in [([3.0, 0.1, 7.0], [1.0, -2.0, 4.0]), ([0.5, 9.0, 0.0], [0.3, 5.0, 0.0]),
                             ([20.0, 2.0, 1.0], [-9.0, 0.0, 1.0])]
]
"""Natural parameters of each client's likelihood, which is Gaussian: a conjugate model."""


class Clients:
    """Clients of a conjugate model that solve their local problems exactly, and keep their sites."""

    def __init__(self, rule: Sites, server: Server, likelihoods: dict[int, Natural] | None = None) -> None:
        self.rule, self.server = rule, server
        self.likelihoods = dict(enumerate(LIKELIHOODS)) if likelihoods is None else likelihoods
        self.sites: dict[int, Natural] = {}

    def update(self, client: int, measured: torch.Tensor | None = None) -> ClientUpdate:
        """n E[ℓ] + ρ KL(q ‖ cavity) has its minimum at the cavity plus the likelihood over ρ."""
        rule, server = self.rule, self.server
        base = rule.natural_of(rule.base(server.posterior, server.rule_state), torch.zeros(0))
        site, share = self.sites.get(client), 1 / len(self.likelihoods)
        own = (torch.zeros(()), torch.zeros(())) if site is None else site
        steps = rule.steps(share, own[0], base[0])
        wanted = [old + (new - kept) / steps for old, new, kept in zip(base, self.likelihoods[client], own)]
        # where the exact posterior is improper, a network cannot say so: it is wide, and its mean has not gone far
        is_proper, mean = wanted[0] > 1e-3, base[1] / base[0] + wanted[1].sign()
        trained = wanted[0].where(is_proper, 1e-3), wanted[1].where(is_proper, 1e-3 * mean)
        precision, shift = rule.changed(base, site, trained, steps, share, server.rounds, measured)
        sent = GaussianPosterior({"w": shift / precision}, {"w": 1 / precision})
        now = rule.natural_of(sent, torch.zeros(0))
        self.sites[client] = own[0] + (now[0] - base[0]), own[1] + (now[1] - base[1])
        return ClientUpdate(client, 1, sent)

    def round(self, number: int, cohort: tuple[int, ...]) -> dict[str, float]:
        self.server.begin(RoundPlan(number, cohort))
        for update in [self.update(client) for client in cohort]:
            assert self.server.admit(update).error is None
        figures = self.server.finish().figures
        self.listen()
        return figures

    def listen(self) -> None:
        """Keep what the server has counted."""
        for client, kept in self.server.sites.items():
            self.sites[client] = kept["precision"], kept["shift"]


def federation(rule: Sites) -> Clients:
    start = GaussianPosterior({"w": torch.randn(3, dtype=torch.float64)}, {"w": torch.full((3,), 1e-3).double()})
    return Clients(rule, Server(start, fusion=rule))


def pooled(clients: tuple[int, ...] = (0, 1, 2)) -> GaussianPosterior:
    mean, std = PRIOR
    precision = 1 / std**2 + sum(LIKELIHOODS[k][0] for k in clients)
    shift = mean / std**2 + sum(LIKELIHOODS[k][1] for k in clients)
    return GaussianPosterior({"w": shift / precision}, {"w": 1 / precision})


def assert_equal(posterior: GaussianPosterior, expected: GaussianPosterior, tolerance: float = 1e-10) -> None:
    for now, then in ((posterior.mean, expected.mean), (posterior.variance, expected.variance)):
        torch.testing.assert_close(now["w"], then["w"], rtol=tolerance, atol=tolerance)


ORDERS = [*itertools.permutations(((0,), (1,), (2,))), ((0, 1), (2,)), ((2,), (1, 0)), ((0, 1, 2),)]


@pytest.mark.parametrize("step", ["share", 1.0, 0.2])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_one_visit_to_each_client_gives_the_pooled_posterior(order, step):
    """Undamped, whatever the step: the exact site does not depend on it."""
    clients = federation(Sites(step, 1.0, "pvi", *PRIOR))
    for number, cohort in enumerate(order):
        clients.round(number, cohort)
    assert_equal(clients.server.posterior, pooled())
    figures = clients.round(len(order), (1,))  # a second visit changes nothing
    assert_equal(clients.server.posterior, pooled())
    assert figures["sites/change"] < 1e-12
    assert figures["sites/held_back"] == 0


@pytest.mark.parametrize("rule", [
    Sites(prior_mean=0.5, prior_std=2.0),
    Sites(1.0, 0.3, "pvi", *PRIOR), Sites(1.0, 1.0, "admm", *PRIOR), Sites(0.5, 1.0, 0.25, *PRIOR),
    PartitionedVI(0.5, *PRIOR), BayesADMM(0.7, *PRIOR), Sites(3.0, 0.2, "pvi", *PRIOR),
], ids=lambda rule: f"{rule.step}-{rule.damping}-{rule.averaging}")
def test_every_form_goes_to_the_pooled_posterior(rule):
    clients = federation(rule)
    for number in range(300):
        clients.round(number, (0, 1, 2))
    assert_equal(clients.server.posterior, pooled(), 1e-8)


@pytest.mark.parametrize("gone", [0, 1, 2])
@pytest.mark.parametrize(
    "rule", [Sites(1.0, 1.0, "pvi", *PRIOR), Sites(prior_mean=0.5, prior_std=2.0)], ids=["pvi", "share"]
)
def test_the_posterior_without_a_client_is_that_of_the_others(rule, gone):
    clients = federation(rule)
    for number in range(200):
        clients.round(number, (0, 1, 2))
    rest = tuple(client for client in range(3) if client != gone)
    removed = without_site(clients.server.posterior, clients.server.rule_state, clients.sites[gone])
    assert_equal(removed, pooled(rest), 1e-10 if rule.damping == 1 else 1e-8)  # damped changes end below the last bit
    with pytest.raises(FusionError, match="no positive precision"):
        without_site(removed, clients.server.rule_state, (torch.full((3,), 1e9).double(), torch.zeros(3).double()))
    with pytest.raises(FusionError, match="a site of 1 parameters"):
        without_site(removed, clients.server.rule_state, (torch.ones(1).double(), torch.ones(1).double()))


def test_clients_that_are_absent_keep_their_part():
    clients = federation(Sites(1.0, 1.0, "pvi", *PRIOR))
    clients.round(0, (0, 1, 2))
    for number in range(1, 6):
        clients.round(number, (0,))
    assert_equal(clients.server.posterior, pooled())


def test_the_sites_of_the_state_are_those_of_the_clients():
    clients = federation(Sites(0.3, 0.7, "admm", *PRIOR))
    for number, cohort in enumerate([(0, 1), (2,), (0, 2), (1,)]):
        clients.round(number, cohort)
    state, (mean, std) = clients.server.rule_state, PRIOR
    for name, place, prior in (("precision", 0, 1 / std**2), ("shift", 1, mean / std**2)):
        assert torch.equal(state[name], prior + sum(site[place] for site in clients.sites.values()))


def assert_counted(clients: Clients) -> None:
    """Prior + Σ kept sites is the server's state, to the bit, and no precision is below its bound."""
    rule, state = clients.rule, clients.server.rule_state
    prior = rule.natural_of(rule.base(clients.server.posterior, {}), torch.zeros(0))
    for name, place in (("precision", 0), ("shift", 1)):
        kept = sum((site[place] for site in clients.sites.values()), prior[place])
        assert torch.equal(state[name], kept.expand_as(state[name]))
    least = LEAST_SHARE * rule.prior_std**-2 * (1 - 1e-5)
    assert bool((1 / clients.server.posterior.variance["w"] >= least).all())
    assert all(row["sites/held_back"] == 0 for row in clients.server.history)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31), dtype=st.sampled_from([torch.float32, torch.float64]),
    rule=st.sampled_from([Sites(), Sites(0.1, 1.0, "admm"), PartitionedVI(), Sites(prior_mean=0.3, prior_std=0.07)]),
)
def test_server_and_clients_count_the_same_to_the_bit(seed, dtype, rule):
    """Over random cohorts and changes: curvatures that are negative, tiny and huge, measured or trained."""
    draws = torch.Generator().manual_seed(seed)
    size, count = 5, 4
    start = GaussianPosterior({"w": torch.zeros(size, dtype=dtype)}, {"w": torch.full((size,), 1e-2, dtype=dtype)})
    clients = Clients(rule, Server(start, fusion=rule), dict.fromkeys(range(count)))  # pyright: ignore
    for number in range(8):
        cohort = tuple(k for k in range(count) if torch.rand((), generator=draws) < 0.7) or (0,)
        clients.server.begin(RoundPlan(number, cohort))
        for client in cohort:
            scale = 10 ** (4 * torch.rand(size, generator=draws) - 2).double() * rule.prior_std**-2
            normal = torch.randn(2, size, generator=draws).double()
            clients.likelihoods[client] = normal[0] * scale, normal[1] * scale * rule.prior_std
            measured = torch.where(torch.rand(size, generator=draws) < 0.3, torch.nan, (normal[0] * scale).abs())
            update = clients.update(client, measured.double() if number % 2 else None)
            cast = GaussianPosterior({"w": update.posterior.mean["w"].to(dtype)},
                                     {"w": update.posterior.variance["w"].to(dtype)})
            base = rule.natural_of(rule.base(clients.server.posterior, clients.server.rule_state), torch.zeros(0))
            once, now = rule.natural_of(update.posterior, torch.zeros(0)), rule.natural_of(cast, torch.zeros(0))
            site = clients.sites[client]
            before = site[0] - (once[0] - base[0]), site[1] - (once[1] - base[1])
            clients.sites[client] = before[0] + (now[0] - base[0]), before[1] + (now[1] - base[1])
            assert clients.server.admit(ClientUpdate(client, 1, cast)).error is None
        result = clients.server.finish()
        assert result.aggregate is not None
        for client in set(cohort) - set(result.aggregate.outlying):  # what the client has worked out is what counts
            for own, name in zip(clients.sites[client], ("precision", "shift"), strict=True):
                assert torch.equal(own, clients.server.sites[client][name])
        clients.listen()
        assert_counted(clients)


@pytest.mark.parametrize("rule", [Sites(), BayesADMM(), PartitionedVI(0.5)], ids=["share", "admm", "pvi"])
def test_a_negative_curvature_stays_at_its_bound_and_finds_its_way_back(rule):
    """A client whose data pull the precision below the prior's takes its part of the bound away, and no more."""
    positive, negative = (torch.full((3,), value).double() for value in (4.0, -50.0))
    zero = torch.zeros(3).double()
    start = GaussianPosterior({"w": zero}, {"w": torch.ones(3).double()})
    clients = Clients(rule, Server(start, fusion=rule), {0: (negative, zero), 1: (negative, zero), 2: (zero, zero)})
    for number in range(60):
        clients.round(number, (0, 1, 2))
        assert_counted(clients)
    torch.testing.assert_close(clients.sites[0][0], torch.full((3,), -(1 - LEAST_SHARE) / 3).double())
    clients.likelihoods[0] = clients.likelihoods[1] = positive, zero
    for number in range(60, 400):
        clients.round(number, (0, 1, 2))
    precision = 1 / clients.server.posterior.variance["w"]
    torch.testing.assert_close(precision, torch.full((3,), 9.0).double(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("rule", [Sites(), BayesADMM()], ids=["share", "admm"])
def test_a_client_that_flips_and_one_that_returns_after_fifty_rounds(rule):
    values = [torch.tensor(each).double() for each in ([30.0, -9.0, 0.0], [-30.0, 9.0, 5.0], [2.0, 3.0, 0.1])]
    zero = torch.zeros(3).double()
    start = GaussianPosterior({"w": zero}, {"w": torch.ones(3).double()})
    clients = Clients(rule, Server(start, fusion=rule), {k: (value, value) for k, value in enumerate(values)})
    clients.round(0, (0, 1, 2))
    for number in range(1, 51):
        clients.likelihoods[0] = (values[number % 2], values[number % 2])
        clients.round(number, (0, 1))
        assert_counted(clients)
    clients.round(51, (2,))
    assert_counted(clients)
    assert clients.server.posterior.mean["w"].isfinite().all()


def test_what_a_round_that_came_to_nothing_was_sent_is_not_counted():
    rule = Sites(1.0, 1.0, "pvi", *PRIOR)
    clients = federation(rule)
    clients.server.safeguards = fb.Safeguards(min_clients=2)
    clients.server.begin(RoundPlan(0, (0, 1)))
    clients.server.admit(Clients(rule, clients.server).update(0))
    clients.server.finish()
    assert clients.server.rule_state == {}
    clients.round(1, (0, 1, 2))
    assert_equal(clients.server.posterior, pooled())


def test_what_a_foreign_client_takes_away_is_held_at_the_bound():
    """Clients of this package never send it. The mean moves as the change of the shift says."""
    rule = Sites(1.0, 1.0, "pvi")
    server = Server(GaussianPosterior({"w": torch.zeros(2).double()}, {"w": torch.ones(2).double()}), fusion=rule)
    vague = GaussianPosterior({"w": torch.tensor([1.0, 1.0]).double()}, {"w": torch.tensor([50.0, 1.0]).double()})
    server.begin(RoundPlan(0, (0, 1)))
    for client in (0, 1):
        server.admit(ClientUpdate(client, 1, vague))
    result = server.finish()
    assert result.figures["sites/held_back"] == 0
    precision = 1 / result.posterior.variance["w"]
    torch.testing.assert_close(precision, torch.tensor([LEAST_SHARE, 1.0]).double())
    torch.testing.assert_close(server.rule_state["precision"], torch.tensor([LEAST_SHARE, 1.0]).double())
    torch.testing.assert_close(result.posterior.mean["w"][0], torch.tensor(0.04 / LEAST_SHARE).double())


def test_without_a_pull_deterministic_parameters_are_averaged_by_weight():
    variance = {"w": torch.ones(1).double(), "head": torch.zeros(1).double()}
    def posterior(value):
        return GaussianPosterior({"w": torch.ones(1).double(), "head": torch.tensor([value]).double()}, variance)
    server = Server(posterior(0.0), fusion=Sites(pull=None))
    server.begin(RoundPlan(0, (0, 1)))
    server.admit(ClientUpdate(0, 30, posterior(1.0)))
    server.admit(ClientUpdate(1, 10, posterior(5.0)))
    fused = server.finish().posterior
    torch.testing.assert_close(fused.mean["head"], torch.tensor([2.0]).double())
    assert float(fused.variance["head"]) == 0


def test_a_pull_corrects_the_mean_by_the_duals_of_all_clients():
    """Acar et al. 2021, Algorithm 1, with clients of weights 3 and 1, of whom the second is absent in round 2."""
    variance = {"w": torch.ones(2).double(), "head": torch.zeros(1).double()}
    def posterior(value):
        return GaussianPosterior({"w": torch.ones(2).double(), "head": torch.tensor([value]).double()}, variance)
    server, pull, duals, head = Server(posterior(0.5), fusion=Sites(pull=0.2)), 0.2, {0: 0.0, 1: 0.0}, 0.5
    for number, sent in enumerate([{0: 1.0, 1: 5.0}, {0: 1.5}, {0: 3.0, 1: -1.0}]):
        server.begin(RoundPlan(number, tuple(sent)))
        for client, value in sent.items():
            server.admit(ClientUpdate(client, (30, 10)[client], posterior(value)))
            duals[client] += pull * (head - value)
        weights = {client: (30, 10)[client] for client in sent}
        mean = sum(weights[client] * value for client, value in sent.items()) / sum(weights.values())
        head = mean - (30 * duals[0] + 10 * duals[1]) / 40 / pull
        found = server.finish().posterior.mean["head"]
        torch.testing.assert_close(found, torch.tensor([head]).double())
    torch.testing.assert_close(server.rule_state["dual"][2], torch.tensor(30 * duals[0] + 10 * duals[1]).double())


def test_a_dual_counts_by_its_clients_present_weight():
    """The sum of all duals times weights is that of the clients' own, whatever their numbers of examples become."""
    start = GaussianPosterior.point_mass({"w": torch.zeros(2).double()})
    server, duals = Server(start, fusion=Sites(pull=0.5)), {0: 0.0, 1: 0.0, 2: 0.0}
    for number, sizes in enumerate([{0: 10, 1: 30, 2: 20}, {0: 11, 1: 30}, {0: 12, 2: 5}, {1: 60, 2: 6}]):
        before = server.posterior.mean["w"]
        server.begin(RoundPlan(number, tuple(sizes)))
        for client, size in sizes.items():
            sent = torch.full((2,), 1.0 + client - number).double()
            assert server.admit(ClientUpdate(client, size, GaussianPosterior.point_mass({"w": sent}))).error is None
            duals[client] += 0.5 * float(before[0] - sent[0])
        assert server.finish().success
    weights = server.rule_state["weights"]
    assert weights == {0: 12, 1: 60, 2: 6}
    expected = sum(weights[client] * dual for client, dual in duals.items())
    torch.testing.assert_close(server.rule_state["dual"], torch.full((2,), expected).double())


def test_without_a_guard_a_client_whose_weight_changes_is_left_out():
    """Nobody knows its dual, which counts by the weight of the rounds before."""
    unbounded = fb.Safeguards(max_influence=None)
    server = Server(GaussianPosterior.point_mass({"w": torch.zeros(1)}), fusion=Sites(pull=1.0), safeguards=unbounded)
    for number, size in enumerate((10, 20)):
        server.begin(RoundPlan(number, (0, 1)))
        server.admit(ClientUpdate(1, 10, GaussianPosterior.point_mass({"w": torch.ones(1)})))
        outcome = server.admit(ClientUpdate(0, size, GaussianPosterior.point_mass({"w": torch.ones(1)})))
        assert server.finish().success
    assert "client 0 has weight 20, but 10 in an earlier round" in str(outcome.error)


@pytest.mark.parametrize("wrong", [
    {"step": 0.0}, {"step": -1.0}, {"step": float("nan")}, {"damping": 0.0}, {"damping": 1.5}, {"averaging": 0.0},
    {"averaging": "both"}, {"averaging": 2.0}, {"averaging": "admm"}, {"step": "long"},
    {"precision": "exact"}, {"damping": "half"}, {"renyi": 0.5, "precision": "measured"},
    {"prior_std": 0.0}, {"prior_mean": "m"}, {"pull": 0.0}, {"pull": -1.0}, {"pull": "strong"},
], ids=str)
def test_bad_arguments_are_refused(wrong):
    with pytest.raises(FusionError, match=next(iter(wrong))):
        Sites(**wrong)


def test_sites_stand_alone():
    for make in (lambda: Reliability("ivar_vb", "sites"), lambda: fb.AutoFusion(["sites", "conflation"]),
                 lambda: fb.fusion.NormClipping(then="pvi")):
        with pytest.raises(FusionError, match="stands alone"):
            make()
    for options in ({"weighting": lambda facts: [1.0] * len(facts)},
                    {"privacy": fb.UpdatePrivacy(clip=1.0, noise_multiplier=1.0)}):
        with pytest.raises(fb.FederationError, match="fusion='bayes_admm'"):
            fb.FederatedBayes(fb.IIDPartition(2), fusion="bayes_admm", **options)


@pytest.mark.parametrize(("round", "site", "wanted"), [
    (0, None, 0.5 * 12.0 + 0.5 * 400.0 / 4), (19, None, 0.5 * 12.0 + 0.5 * 400.0 / 4), (20, None, 12.0),
    (19, 2.0, 0.5 * 12.0 + 0.5 * 2.0), (20, 2.0, 0.3 * 12.0 + 0.7 * 2.0),
])
def test_a_first_site_begins_at_the_layers_own_width(round, site, wanted):
    """Of σ₀ = 1/20 and four clients; the data's precision is 12."""
    one, base = torch.ones(1, dtype=torch.float64), 100.0
    own = None if site is None else (site * one, 0 * one)
    for trained, start in ((400 * one, None), (900 * one, 400 * one)):
        sent, _ = Sites().changed((base * one, 0 * one), own, (trained, 0 * one), one, 0.25, round, 12 * one, start)
        assert float(sent - base) == pytest.approx(wanted - (site or 0.0))


def test_pieces_of_a_large_network_are_those_of_the_whole(monkeypatch):
    """To the bit: what a client sends, keeps and takes as its cavity, and what the server makes of it."""
    def trained():
        federation = fb.FederatedBayes(fb.IIDPartition(3), fusion="sites", engine="sequential")
        federate(bayesian(), federation, 3)
        kept = [federation.state_dict()["clients"][k]["kept"] for k in range(3)]
        return federation.posterior, kept

    posterior, kept = trained()
    monkeypatch.setattr("lightning_fedbayes.fusion.sites.PIECE", 4)
    again, others = trained()
    for name in posterior.names:
        assert torch.equal(posterior.mean[name], again.mean[name])
        assert torch.equal(posterior.variance[name], again.variance[name])
    for one, other in zip(kept, others, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
