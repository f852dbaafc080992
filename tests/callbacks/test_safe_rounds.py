"""Clients and rules that fail cost a round, never what the federation has learnt; the model stays finite."""

import logging
from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import ScaledUpdate, UpdateAttack
from lightning_fedbayes.clients.vectorized import engine as vectorized
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.fusion import AutoFusion, MultiKrum, TrimmedMean
from tests import federations
from tests.federations import Plain, assert_equal, federate, hears, loader, models_after_rounds, parameters, trainer


class Faulty(Plain):
    """Client 1 fails in the way of ``fault``, in the rounds given."""

    def __init__(self, fault: str, rounds=(0,), clients=(1,), **options) -> None:
        super().__init__(**options)
        self.fault, self.rounds, self.clients = fault, rounds, clients
        self.step = 0

    def on_client_start(self, client) -> None:
        self.client, self.step = client, 0

    def training_step(self, batch, batch_idx):
        self.step += 1
        loss = super().training_step(batch, batch_idx)
        if self.client.number not in self.clients or self.client.round not in self.rounds:
            return loss
        if self.fault == "raises late" and self.step == 2:
            raise RuntimeError("disk on fire")
        if self.fault == "raises in backward":
            loss.register_hook(lambda gradient: (_ for _ in ()).throw(RuntimeError("disk on fire")))
        if self.fault == "nan loss":
            return loss * float("nan")
        if self.fault == "infinite parameter":
            with torch.no_grad():
                self.net[0].bias[0] = float("inf")
        if self.fault == "new shape" and self.step == 4:  # its last batch
            self.net[2].bias.data = torch.zeros(7)
            return self.net[0].weight.sum() * 0
        return loss


FAULTS = ["raises late", "raises in backward", "nan loss", "infinite parameter"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("weighting", "options"), [("train_size", {}), ("max_discrepancy", {"gradient_clip_val": 1e9})]
)
def test_a_failing_client_is_left_out_and_the_others_count(fault, weighting, options, caplog):
    """The result is that of the others alone: same data, same seeds."""
    module = Faulty(fault)
    federation = fb.FederatedBayes(fb.IIDPartition(3), fusion="rklb", weighting=weighting, engine="sequential")
    with caplog.at_level(logging.INFO):
        federate(module, federation, 1, **options)
    assert sum("client 1 is left out" in line for line in caplog.messages) == 1
    row = federation.history[0]
    assert (row["valid_clients"], row["failed_clients"]) == (2, 1)

    start, honest = fb.read_posterior(Plain()).clone(), Plain()
    sent = hears(honest)
    federate(honest, fb.FederatedBayes(fb.IIDPartition(3), fusion="rklb", engine="sequential"), 1, **options)
    server = fb.Server(start, weighting=weighting)
    server.begin(fb.RoundPlan(0, (0, 2)))
    for client in (0, 2):
        server.admit(fb.ClientUpdate(client, 30, sent[client]))
    expected = server.finish().posterior
    assert_equal(dict(federation.posterior.mean), dict(expected.mean))
    assert_equal(parameters(module), dict(expected.mean))


@pytest.mark.parametrize("client", [0, 2])
def test_a_parameter_that_changed_its_shape_excludes_its_client(client, caplog):
    module = Faulty("new shape", clients=(client,))
    federation = fb.FederatedBayes(fb.IIDPartition(3), fusion="rklb")
    with caplog.at_level(logging.INFO):
        federate(module, federation, 2)
    assert [row["failed_clients"] for row in federation.history] == [1, 0]
    assert module.net[2].bias.shape == (3,)
    assert any("'net.2.bias' has shape" in line for line in caplog.messages)


def test_too_few_valid_updates_keep_the_old_posterior():
    module = Faulty("raises late", rounds=(1,), clients=(0, 1))
    federation = fb.FederatedBayes(fb.IIDPartition(3), safeguards=fb.Safeguards(min_clients=2))
    after = []
    federate(module, federation, 3, callbacks=[models_after_rounds(after)])
    assert_equal(after[0], after[1])
    assert not torch.equal(after[1]["net.0.weight"], after[2]["net.0.weight"])
    assert [row["failed_rounds"] for row in federation.history] == [0, 1, 0]


def test_failed_rounds_in_a_row_stop_the_run_with_the_first_cause_and_the_last_good_model():
    module = Faulty("raises late", rounds=range(2, 99), clients=range(3))
    federation = fb.FederatedBayes(fb.IIDPartition(3), safeguards=fb.Safeguards(max_failed_rounds=2))
    good = []
    with pytest.raises(FederationError, match=r"2 rounds in a row .*min_clients=1.*disk on fire") as info:
        federate(module, federation, 9, callbacks=[models_after_rounds(good)])
    assert isinstance(info.value.__cause__, RuntimeError)
    assert_equal(good[1], parameters(module))


def test_a_rule_that_cannot_fuse_stops_the_run_with_the_last_good_model():
    module = federations.bayesian(posterior_std=1e-3, learning_rate=0.1)
    before = parameters(module)
    safeguards = fb.Safeguards(max_failed_rounds=2)
    made = fb.FederatedBayes(fb.IIDPartition(3), fusion="dwc", local_epochs=5, safeguards=safeguards)
    with pytest.raises(FederationError, match=r"2 rounds in a row could .* precision is not positive: 'network\.2"):
        federate(module, made, 4)
    assert_equal(before, parameters(module))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_round_leaves_the_last_global_model_and_a_clean_trainer(interrupt, engine, monkeypatch):
    monkeypatch.setattr(vectorized, "STEPS_PER_BATCH", 1)
    module, fused = Plain(), []

    def stop():
        raise interrupt

    federation = fb.FederatedBayes(fb.IIDPartition(3), engine=engine)
    made = trainer(3, [federation, models_after_rounds(fused), federations.Interrupt(1, 2, stop)])
    with pytest.raises((interrupt, SystemExit)):
        made.fit(module, loader())
    assert_equal(fused[0], parameters(module))
    assert "run" not in vars(made.fit_loop.epoch_loop.automatic_optimization)
    assert not {"advance", "on_advance_end"} & vars(made.fit_loop.epoch_loop).keys()
    assert type(made.fit_loop._data_source).__name__ == "_DataLoaderSource"
    assert not {"log", "on_save_checkpoint"} & set(vars(module))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_stopping_inside_a_round_drops_it_and_validates_the_global_model(engine, monkeypatch):
    monkeypatch.setattr(vectorized, "STEPS_PER_BATCH", 1)
    module, fused, validated = Plain(), [], []
    federation = fb.FederatedBayes(fb.IIDPartition(3), engine=engine)
    spy = LambdaCallback(on_validation_batch_start=lambda *_: validated.append(parameters(module)))
    stop = federations.Interrupt(1, 2, lambda: setattr(made, "should_stop", True))
    made = trainer(5, [federation, models_after_rounds(fused), spy, stop])
    made.fit(module, loader(), loader(shuffle=False))
    assert_equal(fused[0], parameters(module))
    assert_equal(fused[0], validated[-1])
    assert len(federation.history) == 1


def test_a_second_federation_with_one_callback_starts_afresh():
    federation = fb.FederatedBayes(fb.IIDPartition(3))
    first, second = Plain(), Plain()
    federate(first, federation)
    federate(second, federation)
    assert_equal(parameters(first), parameters(second))
    assert len(federation.history) == 2


def test_early_stopping_and_checkpoints_monitor_the_round(tmp_path):
    def note(trainer, module):
        scores.append(float(trainer.callback_metrics["val/nll"]))
        models.append(parameters(module))

    scores, models = [], []
    best = ModelCheckpoint(tmp_path, monitor="val/nll", mode="max")
    callbacks = [LambdaCallback(on_train_epoch_end=note), best, EarlyStopping("val/nll", patience=1, min_delta=10.0)]
    options = {"val": loader(shuffle=False), "callbacks": callbacks, "enable_checkpointing": True}
    made = federate(Plain(), fb.FederatedBayes(fb.IIDPartition(3)), 9, **options)
    assert made.current_epoch == 2
    assert float(best.best_model_score) == pytest.approx(max(scores))
    assert scores[1] < scores[0], "the best round is to be another than the last"
    assert_equal(torch.load(best.best_model_path, weights_only=False)["state_dict"], models[0])


def test_a_client_that_is_left_out_keeps_nothing_of_the_round():
    class Personal(Faulty):
        def on_client_start(self, client):
            super().on_client_start(client)
            if client.number == 1:
                self.heads = [*getattr(self, "heads", []), self.net[2].weight.detach().clone()]

    module = Personal("infinite parameter", rounds=(1,))
    federation = fb.FederatedBayes(fb.IIDPartition(3), local_parameters=["net.2.*"], keep=["optimizer"])
    federate(module, federation, 4)
    first, second, third, fourth = module.heads
    assert not torch.equal(first, second)
    assert torch.equal(second, third), "what it learnt in the failed round 1 is forgotten"
    assert not torch.equal(third, fourth)


def test_figures_that_a_left_out_client_logged_do_not_count():
    class Logging(Faulty):
        def training_step(self, batch, batch_idx):
            value = 100.0 if self.client.number == 1 else 1.0
            self.log("train/value", value, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    for rounds, mean in (((), 34.0), ((0,), 1.0)):
        made = federate(Logging("infinite parameter", rounds=rounds), fb.FederatedBayes(fb.IIDPartition(3)), 1)
        assert float(made.callback_metrics["train/value"]) == pytest.approx(mean)


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


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "clients"), [("linear_pool", 2), ("weighted_average", 5), ("sites", 20)])
def test_a_client_that_no_training_explains_is_left_out_by_name(rule, clients, caplog):
    OnlyOnce.rounds = 0
    made = fb.FederatedBayes(fb.IIDPartition(clients), fusion=rule, adversaries=OnlyOnce([0], 1e30))
    federate(federations.bayesian(), made, rounds=3)
    assert [row["failed_clients"] for row in made.history] == [0.0, 1.0, 0.0]
    assert "client 0: it moves the means by more than a factor of 1e+15" in caplog.text
    assert all(bool(torch.isfinite(value).all()) for value in made.posterior.variance.values())


@pytest.mark.slow
@pytest.mark.parametrize("rule", [TrimmedMean(2), MultiKrum(1)])
def test_the_round_is_lost_and_the_run_goes_on(rule):
    OnlyOnce.rounds = 0
    settings = {"adversaries": OnlyOnce([0]), "weighting": "equal", "engine": "sequential"}
    made = fb.FederatedBayes(fb.IIDPartition(5), fusion=rule, **settings)
    after = []
    federate(Plain(), made, rounds=3, callbacks=[models_after_rounds(after)])
    assert [row["failed_rounds"] for row in made.history] == [0.0, 1.0, 0.0]
    assert_equal(after[0], after[1])
    assert not any(torch.equal(value, after[1][name]) for name, value in after[2].items())
    assert all(bool(torch.isfinite(value).all()) for value in after[2].values())
    assert all(bool(torch.isfinite(value).all()) for value in made.posterior.variance.values())


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["ivar_vb", "multi_krum"])
def test_bootstrap_leaves_out_the_clients_that_the_rule_leaves_out(rule):
    x = torch.randn(60, 3)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
    model = fb.HybridBayesianRegressor(nn.Linear(3, 1), noise="residual", predictive="bootstrap", learning_rate=0.05)
    made = fb.FederatedBayes(fb.IIDPartition(5), fusion=rule, adversaries=ScaledUpdate([0], factor=1e3))
    federate(model, made, rounds=2, train=data)
    assert 0 in made.federation.result.excluded
    assert len(model.global_round.clients) == 5 - len(made.federation.result.excluded)
    assert float(model.eval().predict_step(x).samples.abs().max()) < 50


@pytest.mark.slow
def test_interrupted_choice_leaves_the_last_good_posterior():
    calls = []

    def score(module, batch):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return 0.0

    made = fb.FederatedBayes(fb.IIDPartition(3), fusion=AutoFusion(["fedavg", "linear_pool"], score=score))
    module = Plain()
    before = [parameters(module)]
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        federate(module, made, 3, val=DataLoader(federations.blobs(20), 10), callbacks=[models_after_rounds(before)])
    assert len(before) == 2
    assert_equal(parameters(module), before[1])
