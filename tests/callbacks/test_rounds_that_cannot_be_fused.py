"""A rule that cannot fuse a round costs the round, not the run; the model stays finite and whole."""

from dataclasses import dataclass

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import NotANumber, ScaledUpdate, UpdateAttack
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.fusion import AutoFusion, MultiKrum, TrimmedMean
from tests.federations import Plain, assert_equal, bayesian, blobs, federate, parameters

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class OnlyOnce(UpdateAttack):
    """Sends what ``make`` gives, in the second round."""

    clients: object
    value: float = float("nan")

    def send_beside(self, tensors, knowledge):
        return dict(tensors)

    def falsify(self, mean, knowledge):
        OnlyOnce.rounds += 1
        return mean * 0 + self.value if OnlyOnce.rounds == 2 else mean


@pytest.mark.parametrize(("rule", "clients"), [("linear_pool", 2), ("weighted_average", 5), ("sites", 20)])
def test_a_client_that_no_training_explains_is_left_out_by_name(rule, clients, caplog):
    OnlyOnce.rounds = 0
    made = fb.FederatedBayes(fb.IIDPartition(clients), fusion=rule, adversaries=OnlyOnce([0], 1e30))
    federate(bayesian(), made, rounds=3)
    assert [row["failed_clients"] for row in made.history] == [0.0, 1.0, 0.0]
    assert "client 0: it moves the means by more than a factor of 1e+15" in caplog.text
    assert all(bool(torch.isfinite(value).all()) for value in made.posterior.variance.values())


@pytest.mark.parametrize("rule", [TrimmedMean(2), MultiKrum(1)])
def test_the_round_is_lost_and_the_run_goes_on(rule):
    OnlyOnce.rounds = 0
    made = fb.FederatedBayes(
        fb.IIDPartition(5), fusion=rule, adversaries=OnlyOnce([0]), weighting="equal", engine="sequential"
    )
    after = []

    class Keep(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            after.append(parameters(pl_module))

    federate(Plain(), made, rounds=3, callbacks=[Keep()])
    assert [row["failed_rounds"] for row in made.history] == [0.0, 1.0, 0.0]
    assert_equal(after[0], after[1])
    assert not any(torch.equal(value, after[1][name]) for name, value in after[2].items())
    assert all(bool(torch.isfinite(value).all()) for value in after[2].values())
    assert all(bool(torch.isfinite(value).all()) for value in made.posterior.variance.values())


def test_too_many_such_rounds_stop_it_with_the_rule_s_own_words():
    made = fb.FederatedBayes(fb.IIDPartition(3), fusion=TrimmedMean(2), safeguards=fb.Safeguards(max_failed_rounds=2))
    with pytest.raises(FederationError, match=r"2 rounds in a row could not be fused.*trimmed_mean: trim=2"):
        federate(Plain(), made, rounds=5)


@pytest.mark.parametrize("rule", ["icov_vb", "krum", "weighted_average"])
def test_the_model_stays_as_it_was_if_all_clients_send_nan(rule):
    made = fb.FederatedBayes(
        fb.IIDPartition(5), fusion=rule, adversaries=NotANumber(1.0), safeguards=fb.Safeguards(max_failed_rounds=2)
    )
    module = bayesian()
    before = {name: value.clone() for name, value in parameters(module).items()}
    with pytest.raises(FederationError, match=r"2 rounds in a row had fewer than min_clients=1 .* is not finite"):
        federate(module, made, rounds=5)
    for name, value in parameters(module).items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("rule", ["ivar_vb", "icov_mle", "geometric_median"])
def test_a_client_beyond_all_bounds_leaves_a_finite_model(rule):
    made = fb.FederatedBayes(
        fb.IIDPartition(5), fusion=rule, adversaries=ScaledUpdate([2], factor=1e24), weighting="equal"
    )
    module = bayesian()
    federate(module, made, rounds=2)
    assert made.history[-1]["failed_rounds"] == 0
    assert all(float(value.abs().max()) < 100 for value in parameters(module).values())
    assert made.federation.result.weights[2] < 1e-6


@pytest.mark.parametrize("rule", ["ivar_vb", "multi_krum"])
def test_bootstrap_leaves_out_the_clients_that_the_rule_leaves_out(rule):
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
    model = fb.HybridBayesianRegressor(nn.Linear(3, 1), noise="residual", predictive="bootstrap", learning_rate=0.05)
    made = fb.FederatedBayes(fb.IIDPartition(5), fusion=rule, adversaries=ScaledUpdate([0], factor=1e3))
    federate(model, made, rounds=2, train=data)
    assert 0 in made.federation.result.excluded
    assert len(model.global_round.clients) == 5 - len(made.federation.result.excluded)
    assert float(model.eval().predict_step(x).samples.abs().max()) < 50


def test_interrupted_choice_leaves_the_last_good_posterior():
    calls = []

    def score(module, batch):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return 0.0

    made = fb.FederatedBayes(fb.IIDPartition(3), fusion=AutoFusion(["fedavg", "linear_pool"], score=score))
    module = Plain()
    before = []

    class Keep(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            before.append(parameters(pl_module))

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        federate(module, made, rounds=3, val=DataLoader(blobs(20), 10), callbacks=[Keep()])
    assert len(before) == 2
    assert_equal(parameters(module), before[1])
