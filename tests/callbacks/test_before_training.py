"""What cannot be scored or calibrated is refused before training, with Lightning's check of a batch and without."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import Plain, assert_equal, bayesian, clients, federate, loader, network, parameters, trainer
from tests.trainer.test_checks import Scheduled

pytestmark = pytest.mark.filterwarnings("ignore:the temperature ends at its limit")
STEPS = pytest.mark.parametrize("steps", [0, 2])


class Untrained(Plain):
    """It fails if training begins; one output for each example leaves two answers."""

    def __init__(self, known=None, outputs=1):
        super().__init__(torch.nn.Linear(4, outputs))
        if known is not None:
            self.likelihood = known

    def validation_step(self, batch, number):
        pass

    def training_step(self, batch, number):
        pytest.fail("training has begun")


class Foreign(Untrained):
    def predict_step(self, batch, number=0):
        return batch[0]


def parts(targets):
    return fb.ClientDatasets({name: TensorDataset(torch.randn(9, 4), targets(9)) for name in "ab"})


def intervals():
    return fb.FederatedConformal(kind="interval")


def binary(count):
    return torch.randint(0, 2, (count,))


REFUSED = {
    "one logit, scored": (Untrained, binary, fb.UncertaintyReport, "yes or no, or numbers"),
    "one logit, scaled": (Untrained, binary, fb.FederatedTemperature, "yes or no, or numbers"),
    "its own predictions": (Foreign, binary, fb.ClientReport, "Foreign.predict_step returns"),
    "numbers": (Untrained, torch.randn, intervals, "noise is not known"),
    "other classes": (
        lambda: Untrained(None, 2),
        lambda count: torch.full((count,), 5),
        fb.FederatedTemperature,
        "there are 2 classes",
    ),
    "sets of numbers": (lambda: Untrained(fb.Gaussian(1.0)), torch.randn, fb.FederatedConformal, "kind='interval'"),
    "intervals of classes": (lambda: Untrained("categorical", 2), binary, intervals, "predicts no mean and variance"),
}


@STEPS
@pytest.mark.parametrize(("module", "targets", "callback", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_scored_or_calibrated_is_refused(module, targets, callback, says, steps):
    data = parts(targets)
    options = {"callbacks": [callback()], "num_sanity_val_steps": steps}
    with pytest.raises(fb.FedBayesError, match=says):
        federate(module(), fb.FederatedBayes(engine="sequential"), 1, loader(data), DataLoader(data, 8), **options)


def test_sets_before_the_temperature_are_refused():
    calibrations = [fb.FederatedConformal(0.8), fb.FederatedTemperature()]
    with pytest.raises(fb.FedBayesError, match="put FederatedTemperature first"):
        federate(Plain(), fb.FederatedBayes(), 1, loader(clients(9, 9)), loader(clients(9, 9)), callbacks=calibrations)


@pytest.mark.slow
@STEPS
@pytest.mark.parametrize("callbacks", [(), (fb.UncertaintyReport(None),), (fb.ClientReport(),)])
def test_reports_that_nobody_has_given_refuse_nothing(callbacks, steps):
    """Nor does a given one without clients."""

    class Fits(Untrained):
        def training_step(self, batch, number):
            return self(batch[0]).square().mean()

    data = parts(binary)
    held_out = DataLoader(data.datasets[0] if callbacks else data, 8)
    options = {"callbacks": list(callbacks), "num_sanity_val_steps": steps}
    assert federate(Fits(), fb.FederatedBayes(), 1, loader(data), held_out, **options).current_epoch == 1


class Traced(Plain):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)
        self.seen, self.count, self.at = [], 0, []
        self.register_buffer("total", torch.zeros(()))

    def on_validation_epoch_start(self):
        self.outputs = []

    def validation_step(self, batch, number):
        logits = self(batch[0]) + 0 * torch.randn(1)
        self.accuracy.update(logits, batch[1])
        self.seen.append(len(batch[0]))
        self.outputs.append(logits)
        self.count += 1
        self.total += 1
        self.log("val/acc", self.accuracy)

    def on_validation_epoch_end(self):
        self.later = torch.cat(self.outputs)

    def on_train_epoch_start(self):
        self.at = [len(self.seen), self.count, float(self.total), hasattr(self, "later"), self.accuracy.update_count]


@pytest.mark.slow
@pytest.mark.parametrize("federated", [False, True])
def test_the_check_leaves_no_trace(federated):
    ends = []
    for callbacks in ([], [fb.FederatedTemperature(), fb.FederatedConformal(0.8)]):
        torch.manual_seed(5)
        module, calls = Traced(), []
        watch = LambdaCallback(
            on_validation_batch_end=lambda made, *_, calls=calls: calls.append(made.sanity_checking),
            on_sanity_check_start=lambda *_: pytest.fail("the user has turned it off"),
        )
        module.net.load_state_dict(network(1).state_dict())
        federation = [fb.FederatedBayes(engine="sequential")] if federated else []
        torch.manual_seed(5)
        made = trainer(1, [*callbacks, watch, *federation], num_sanity_val_steps=0)
        made.fit(module, loader(clients(40, 30)), DataLoader(clients(9, 12), 8))
        ends.append((parameters(module), torch.rand(3), calls, module.at, made.num_sanity_val_steps))
    (plain, draws, calls, at, _), (same, others, others_calls, now, steps) = ends
    assert_equal(plain, same)
    assert torch.equal(draws, others)
    assert calls == others_calls == [False] * 3
    assert at == now == [0, 0, 0.0, False, 0]
    assert steps == 0


@pytest.mark.parametrize("make", [Plain, bayesian])
def test_a_fit_that_was_checked_is_the_fit(make):
    def fitted(checks: int) -> L.LightningModule:
        L.seed_everything(1, verbose=False)
        module, made = make(), trainer(2, [fb.FederatedBayes(fb.IIDPartition(3))])
        for _ in range(checks):
            before = parameters(module)
            assert fb.check(made, module, loader()) == []
            assert_equal(parameters(module), before)
        made.fit(module, loader(), loader(shuffle=False))
        assert made.current_epoch == 2
        return module

    assert_equal(parameters(fitted(0)), parameters(fitted(2)))


def test_all_reasons_are_told_at_once():
    made = trainer(2, [fb.FederatedBayes(fb.IIDPartition(3), fusion="auto")], max_steps=3, val_check_interval=0.5)
    module = Scheduled()
    before = parameters(module)
    reasons = fb.check(made, module, loader())
    for word in ("max_steps=3", "val_check_interval=0.5", "interval='step'", "fusion='auto' chooses a rule"):
        assert sum(word in reason for reason in reasons) == 1, (word, reasons)
    assert_equal(parameters(module), before)
    with pytest.raises(FederationError, match="max_steps=3"):
        made.fit(module, loader())


def test_data_and_engine_are_checked_too():
    class OwnStep(Plain):
        def training_step(self, batch, batch_idx):
            self.seen = [batch_idx]
            return super().training_step(batch, batch_idx)

    made = trainer(2, [fb.FederatedBayes(fb.IIDPartition(3), engine="vectorized")])
    (reason,) = fb.check(made, OwnStep(), loader())
    assert "engine='vectorized' cannot be used" in reason
    (reason,) = fb.check(trainer(2, [fb.FederatedBayes(fb.IIDPartition(3000))]), Plain(), loader())
    assert "3000" in reason
    (reason,) = fb.check(trainer(2, [fb.FederatedBayes()]), Plain(), loader())
    assert "who are the clients" in reason
    with pytest.raises(FederationError, match="has no FederatedBayes"):
        fb.check(trainer(2), Plain(), loader())
