"""Rules inside a federation: the best of several in every round, and those that infer reliability."""

import copy
import math

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import GaussianVector
from lightning_fedbayes.clients.evaluation import predictive_nll
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.fusion import AutoFusion, Reliability, get_rule
from tests.federations import Plain, assert_equal, bayesian, blobs, federate, network, parameters, rule_state

CANDIDATES = ["reverse_kl_barycenter", "linear_pool", "weighted_sum"]


def validation():
    return DataLoader(blobs(60, seed=5), 25)


def choosing(rules=CANDIDATES, rounds=2, engine="auto", module=None, **options):
    fusion = AutoFusion(rules, **options) if rules != "auto" else "auto"
    made = fb.FederatedBayes(fb.IIDPartition(4), fusion=fusion, engine=engine, seed=3)
    model = bayesian() if module is None else module
    run = federate(model, made, rounds=rounds, val=validation())
    return made, model, run


def losses(figures):
    return {name.removeprefix("held_out_loss/"): value for name, value in figures.items() if "held_out_loss" in name}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_best_of_one_round_is_what_that_rule_alone_gives(engine):
    made, model, _ = choosing(rounds=1, engine=engine)
    scores = losses(made.history[0])
    assert set(scores) == set(CANDIDATES)
    best = min(scores, key=scores.get)
    alone = fb.FederatedBayes(fb.IIDPartition(4), fusion=best, engine=engine, seed=3)
    other = bayesian()
    federate(other, alone, rounds=1, val=validation())
    for name, value in parameters(model).items():
        torch.testing.assert_close(value, parameters(other)[name], msg=name)
        assert torch.equal(made.posterior.mean[name], alone.posterior.mean[name]) if name in alone.posterior.mean else 1


def test_a_rule_that_cannot_fuse_drops_out_of_the_round():
    """A trim of 2 of 4 clients leaves none."""
    made, _, _ = choosing([fb.fusion.TrimmedMean(2), "reverse_kl_barycenter"], rounds=2)
    assert [set(losses(figures)) for figures in made.history] == [{"reverse_kl_barycenter"}] * 2
    assert made.history[-1]["failed_rounds"] == 0


def test_no_rule_is_left():
    fusion = AutoFusion(CANDIDATES, score=lambda module, batch: math.nan)
    made = fb.FederatedBayes(fb.IIDPartition(4), fusion=fusion, safeguards=fb.Safeguards(max_failed_rounds=1))
    with pytest.raises(FederationError, match="no candidate has a finite loss"):
        federate(Plain(), made, rounds=1, val=validation())


def test_states_of_all_candidates_are_kept():
    """``icov_vb`` counts the second round less, by what the first has moved."""
    made, _, _ = choosing(["ivar_vb", "icov_vb", "weighted_average"], rounds=2)
    states = rule_state(made)
    assert set(states) == set(made.settings.method.rule.names)
    ivar, icov = (float(value["counts"][0, 0]) for name, value in states.items() if name.startswith(("ivar", "icov")))
    assert ivar == 2.0
    assert 1.0 < icov < 2.0


def test_candidates_are_scored_by_the_predictions_they_would_make():
    """A module that predicts with draws from the global posterior: each candidate's own, not the last round's."""
    module = fb.HybridBayesianClassifier(network(), predictive="omc", samples=50, learning_rate=0.1)
    made, _, _ = choosing(["gaussian_fit", "weighted_average"], module=module, rounds=1)
    spread, point = losses(made.history[0]).values()
    assert abs(spread - point) > 1e-3
    best = min(losses(made.history[0]).items(), key=lambda item: item[1])[0]
    assert bool(made.posterior.variance["network.0.weight"].any()) == (best == "gaussian_fit")


def test_score_is_the_nll_of_the_mean_prediction():
    model = bayesian().eval()
    batch = blobs(20).tensors
    torch.manual_seed(1)
    probs = model.predict_step(batch[0]).probs
    torch.manual_seed(1)
    expected = torch.nn.functional.nll_loss(probs.log(), batch[1])
    torch.testing.assert_close(predictive_nll(model, batch), expected)


def test_mistakes_are_found_before_training():
    with pytest.raises(FederationError, match="there are none"):
        federate(bayesian(), fb.FederatedBayes(fb.IIDPartition(4), fusion="auto"), rounds=1)
    with pytest.raises(FederationError, match="score a Plain"):
        federate(Plain(), fb.FederatedBayes(fb.IIDPartition(4), fusion="auto"), rounds=1, val=validation())


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

    def as_inferred(facts):
        return [made.federation.result.weights[each.client] for each in facts]

    alone = fb.FederatedBayes(fb.IIDPartition(CLIENTS), fusion="fedavg", weighting=as_inferred, seed=1)
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
