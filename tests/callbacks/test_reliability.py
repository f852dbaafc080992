"""Inferred reliability inside a federation: fused posteriors, state of the rule, tables and pictures."""

import copy

import pytest
import torch

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import GaussianVector
from lightning_fedbayes.fusion import Reliability, get_rule
from tests.federations import Plain, assert_equal, bayesian, federate, network, rule_state

RULES = ["ivar_mle", "ivar_vb", "icov_mle", "icov_vb", "geometric_median", "multi_krum"]
CLIENTS = 6


def federation(fusion, **options):
    attack = GaussianVector(clients=[4])
    return fb.FederatedBayes(fb.IIDPartition(CLIENTS), fusion=fusion, adversaries=attack, **options)


@pytest.mark.parametrize("rule", RULES)
def test_adversary_is_found_out(rule):
    made = federation(rule, weighting="equal")
    federate(Plain(), made, rounds=3)
    weights = made.federation.result.weights
    assert sum(weights.values()) == pytest.approx(1)
    assert weights[4] == min(weights.values()) < 0.1
    assert made.history[-1]["effective_clients"] <= CLIENTS


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["ivar_vb", "icov_vb", Reliability("ivar_vb", then="wasserstein_barycenter")])
def test_state_is_that_of_all_rounds(rule):
    """The rule applied by hand to what the clients sent in each round."""
    made = federation(rule, fraction=0.8, seed=3)
    by_hand, state, fused, seen = get_rule(rule), get_rule(rule).init(), [], []
    original = type(made.settings.method.rule).apply

    def watch(self, cohort, before):
        seen.append(copy.deepcopy(cohort))
        return original(self, cohort, before)

    made.settings.method.rule.apply = watch.__get__(made.settings.method.rule)
    federate(bayesian(), made, rounds=3)
    for cohort in seen:
        fused.append(original(by_hand, cohort, state))
        state = fused[-1].state
    assert len(fused) == 3
    assert len({cohort.clients for cohort in seen}) > 1
    assert_equal(dict(made.posterior.mean), dict(fused[-1].posterior.mean))
    assert made.federation.result.weights == pytest.approx(fused[-1].reliability)


@pytest.mark.slow
def test_buffers_of_an_adversary_count_as_little_as_its_parameters():
    made = federation("multi_krum", seed=1)
    federate(Plain(network(batch_norm=True)), made, rounds=1)
    alone = fb.FederatedBayes(
        fb.IIDPartition(CLIENTS),
        fusion="fedavg",
        weighting=lambda facts: [made.federation.result.weights[each.client] for each in facts],
        seed=1,
    )
    module, again = Plain(network(batch_norm=True)), Plain(network(batch_norm=True))
    federate(module, alone, rounds=1)
    federate(again, federation("multi_krum", seed=1), rounds=1)
    torch.testing.assert_close(dict(module.named_buffers()), dict(again.named_buffers()))


def test_round_without_enough_clients_keeps_the_rule_s_state():
    class FailsLater(Plain):
        def on_client_start(self, client):
            if (client.number, client.round) == (0, 1):
                raise RuntimeError("out of order")

    one, two = (federation("ivar_vb", safeguards=fb.Safeguards(min_clients=6), engine="sequential") for _ in range(2))
    federate(Plain(), one, rounds=1)
    federate(FailsLater(), two, rounds=2)
    assert [row["failed_rounds"] for row in two.history] == [0, 1]
    assert rule_state(one)
    torch.testing.assert_close(rule_state(two), rule_state(one), rtol=0, atol=0)
    assert two.federation.result.weights == {}


@pytest.mark.slow
def test_table_goes_on_after_a_resumed_run(tmp_path):
    whole, first = federation("ivar_vb", seed=2), federation("ivar_vb", seed=2)
    federate(Plain(), whole, rounds=3)
    federate(Plain(), first, rounds=2).save_checkpoint(tmp_path / "half.ckpt")
    resumed = federation("ivar_vb", seed=2)
    federate(Plain(), resumed, rounds=3, ckpt_path=tmp_path / "half.ckpt")
    assert resumed._report.reliabilities == whole._report.reliabilities
    assert len(whole._report.reliabilities) == 3
