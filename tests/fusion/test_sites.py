"""Sites against the theorems: conjugate models, any order and partition, absence, removal, and the guard."""

from __future__ import annotations

import itertools

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes import ClientUpdate, FusionError, GaussianPosterior, RoundPlan, Server
from lightning_fedbayes.fusion import BayesADMM, PartitionedVI, Reliability, Sites
from lightning_fedbayes.fusion.sites import LEAST_SHARE, Natural, natural_of, without_site

PRIOR = (0.5, 2.0)
LIKELIHOODS = [
    (torch.tensor(precision, dtype=torch.float64), torch.tensor(shift, dtype=torch.float64))
    for precision, shift in [([3.0, 0.1, 7.0], [1.0, -2.0, 4.0]), ([0.5, 9.0, 0.0], [0.3, 5.0, 0.0]),
                             ([20.0, 2.0, 1.0], [-9.0, 0.0, 1.0])]
]
"""Natural parameters of each client's likelihood, which is Gaussian: a conjugate model."""


class Clients:
    """Clients of a conjugate model that solve their local problems exactly, and keep their sites."""

    def __init__(self, rule: Sites, server: Server) -> None:
        self.rule, self.server = rule, server
        self.sites: dict[int, Natural] = {}

    def update(self, client: int) -> ClientUpdate:
        """n E[ℓ] + ρ KL(q ‖ cavity) has its minimum at the cavity plus the likelihood over ρ."""
        base = natural_of(self.rule.base(self.server.posterior, self.server.rule_state), torch.zeros(0))
        site = self.sites.get(client, (torch.zeros(3), torch.zeros(3)))
        steps = self.rule.steps(1 / 3, site[0], base[0])
        trained = [old + (own - kept) / steps for old, own, kept in zip(base, LIKELIHOODS[client], site)]
        precision, shift = self.rule.sent(base, (trained[0], trained[1]), steps)
        self.sites[client] = site[0] + precision - base[0], site[1] + shift - base[1]
        return ClientUpdate(client, 1, GaussianPosterior({"w": shift / precision}, {"w": 1 / precision}))

    def round(self, number: int, cohort: tuple[int, ...]) -> dict[str, float]:
        self.server.begin(RoundPlan(number, cohort))
        for update in [self.update(client) for client in cohort]:
            assert self.server.admit(update).error is None
        return self.server.finish().figures


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
    for number in range(40):
        clients.round(number, (0, 1, 2))
    rest = tuple(client for client in range(3) if client != gone)
    removed = without_site(clients.server.posterior, clients.server.rule_state, clients.sites[gone])
    assert_equal(removed, pooled(rest))
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
        kept = prior + sum(site[place] for site in clients.sites.values())
        torch.testing.assert_close(state[name], kept, rtol=1e-12, atol=1e-12)


def test_what_a_round_that_came_to_nothing_was_sent_is_not_counted():
    rule = Sites(1.0, 1.0, "pvi", *PRIOR)
    clients = federation(rule)
    clients.server.min_clients = 2
    clients.server.begin(RoundPlan(0, (0, 1)))
    clients.server.admit(Clients(rule, clients.server).update(0))
    clients.server.finish()
    assert clients.server.rule_state == {}
    clients.round(1, (0, 1, 2))
    assert_equal(clients.server.posterior, pooled())


def test_no_precision_falls_below_a_quarter_and_the_sites_stay_exact():
    rule = Sites(1.0, 1.0, "pvi")
    server = Server(GaussianPosterior({"w": torch.zeros(2).double()}, {"w": torch.ones(2).double()}), fusion=rule)
    vague = GaussianPosterior({"w": torch.tensor([1.0, 1.0]).double()}, {"w": torch.tensor([50.0, 1.0]).double()})
    server.begin(RoundPlan(0, (0, 1)))
    for client in (0, 1):
        server.admit(ClientUpdate(client, 1, vague))
    result = server.finish()
    assert result.figures["sites/held_back"] == 1
    precision = 1 / result.posterior.variance["w"]
    torch.testing.assert_close(precision, torch.tensor([LEAST_SHARE, 1.0]).double())
    torch.testing.assert_close(server.rule_state["precision"], torch.tensor([1 - 2 * 0.98, 1.0]).double())
    # on the way from the old natural parameters to the new ones, (1, 0) to (-0.96, 0.04)
    share = (1 - LEAST_SHARE) / 1.96
    torch.testing.assert_close(result.posterior.mean["w"][0], torch.tensor(share * 0.04 / LEAST_SHARE).double())


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


def test_a_client_whose_weight_changes_is_refused():
    """Its dual counts by the weight of the rounds before."""
    server = Server(GaussianPosterior.point_mass({"w": torch.zeros(1)}), fusion=Sites(pull=1.0))
    for number, size in enumerate((10, 20)):
        server.begin(RoundPlan(number, (0,)))
        server.admit(ClientUpdate(0, size, GaussianPosterior.point_mass({"w": torch.ones(1)})))
        result = server.finish()
    assert "client 0 has weight 20, but 10 in an earlier round" in str(result.refusal)


@pytest.mark.parametrize("wrong", [
    {"step": 0.0}, {"step": -1.0}, {"step": float("nan")}, {"damping": 0.0}, {"damping": 1.5}, {"averaging": 0.0},
    {"averaging": "both"}, {"averaging": 2.0}, {"averaging": "admm"}, {"step": "long"},
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
    for options in ({"prior": "global"}, {"weighting": lambda facts: [1.0] * len(facts)},
                    {"privacy": fb.UpdatePrivacy(clip=1.0, noise_multiplier=1.0)}):
        with pytest.raises(fb.FederationError, match="fusion='sites'"):
            fb.FederatedBayes(fb.IIDPartition(2), fusion="bayes_admm", **options)
