"""What cannot be trained as a stack is said before training; a client that fails costs itself a round."""

from __future__ import annotations

import logging
import random

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import Dataset

import lightning_fedbayes as fb
from lightning_fedbayes.engines.vectorized import engine as vectorized
from tests.federations import CLASSES, FEATURES, Plain, assert_equal, blobs, federate, loader, parameters


class Metric(Plain):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)

    def training_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)


class Branch(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss > 0.5 else loss


class Keeps(Plain):
    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss


class Counts(Plain):
    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)


class Mixup(Plain):
    def training_step(self, batch, batch_idx):
        share = np.random.beta(0.4, 0.4)
        return super().training_step(batch, batch_idx) * (1 + share)


class Coin(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * random.random()


class AfterBackward(Plain):
    def on_after_backward(self):
        pass


class Names(Plain):
    def on_client_start(self, client):
        self.weight = {"0": 1.0, "1": 2.0}[client.name]


class NormedSGD(torch.optim.SGD):
    """Steps by the gradient over its norm, taken over each whole tensor."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


class Recurrent(Plain):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, CLASSES))
        self.lstm = nn.LSTM(FEATURES, 4, batch_first=True)

    def forward(self, x):
        return self.net(self.lstm(x.unsqueeze(1))[0][:, -1])


class FromOptimizer(Plain):
    def training_step(self, batch, batch_idx):
        held = self.optimizers().param_groups[0]["params"]
        return super().training_step(batch, batch_idx) + 0.05 * sum(p.square().sum() for p in held)


class KeepsParameters(Plain):
    def __init__(self):
        super().__init__()
        self.decay = list(self.net.parameters())

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.05 * sum(p.square().sum() for p in self.decay)


class InPlace(Plain):
    def __init__(self):
        super().__init__()
        self.seen = {"steps": {"all": 0}, "sum": torch.zeros(())}

    def training_step(self, batch, batch_idx):
        self.seen["steps"]["all"] += 1
        return super().training_step(batch, batch_idx)


class TensorInPlace(Plain):
    def __init__(self):
        super().__init__()
        self.count = torch.zeros(())

    def training_step(self, batch, batch_idx):
        self.count += 1
        return super().training_step(batch, batch_idx)


class Rate(Plain):
    def training_step(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] *= 0.99
        return super().training_step(batch, batch_idx)


class ClipsInside(torch.optim.SGD):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class Late(torch.optim.SGD):
    """Normalises from its fourth step on."""

    taken = 0

    def step(self, closure=None):
        self.taken += 1
        if self.taken > 3:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad /= parameter.grad.norm()
        return super().step(closure)


def backward_hook() -> Plain:
    module = Plain()
    module.net[0].register_full_backward_hook(lambda layer, inputs, outputs: tuple(2 * each for each in inputs))
    return module


class Vector(Plain):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")


def hooked() -> Plain:
    module = Plain()
    module.net[0].weight.register_hook(lambda gradient: gradient * 2)
    return module


class GradientNorms(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pass


REFUSED = {
    "metric": (Metric, {}, "changes self.accuracy."),
    "branch": (Branch, {}, "data-dependent control flow"),
    "keeps a tensor": (Keeps, {}, "changes self.losses"),
    "counts": (Counts, {}, "changes self.steps"),
    "numpy": (Mixup, {}, "draws from Python's or NumPy's generator"),
    "python": (Coin, {}, "draws from Python's or NumPy's generator"),
    "hook": (AfterBackward, {}, "AfterBackward has a hook on_after_backward"),
    "callback": (Plain, {"callbacks": [GradientNorms()]}, "GradientNorms has a hook on_before_optimizer_step"),
    "name": (Names, {}, "reads the client's name"),
    "optimizer": (lambda: Plain(optimizer=NormedSGD), {}, "NormedSGD does not treat every entry"),
    "parameter hook": (hooked, {}, "net.0.weight has a hook"),
    "backward hook": (backward_hook, {}, "net.0 has a backward hook"),
    "parameters of the optimizer": (FromOptimizer, {}, "reads parameters from elsewhere"),
    "kept parameters": (KeepsParameters, {}, "keeps the parameter net.0.weight elsewhere"),
    "nested container": (InPlace, {}, "changes self.seen"),
    "tensor in place": (TensorInPlace, {}, "changes self.count"),
    "rate": (Rate, {}, "changes the optimizer's options"),
    "clipping optimizer": (lambda: Plain(optimizer=ClipsInside), {}, "ClipsInside does not treat every entry"),
    "late optimizer": (lambda: Plain(optimizer=Late), {}, "Late"),
    "lstm": (Recurrent, {}, "cannot run for several clients at once"),
    "vector loss": (Vector, {}, "must be one number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stacked_is_named_and_auto_goes_one_by_one(case, caplog):
    make, options, reason = REFUSED[case]
    with pytest.raises(fb.FederationError, match="engine='vectorized' cannot be used") as refusal:
        federate(make(), fb.FederatedBayes(fb.IIDPartition(2), engine="vectorized"), 1, **options)
    assert reason in str(refusal.value)
    if case == "vector loss":  # which no engine takes
        return
    results = []
    for engine in ("auto", "sequential"):
        module, federation = make(), fb.FederatedBayes(fb.IIDPartition(2), engine=engine)
        with caplog.at_level(logging.INFO):
            federate(module, federation, 1, **options)
        assert federation.federation.engine.name == "sequential"
        assert federation.settings()["engine"] == "sequential"
        results.append(module)
    lines = [line for line in caplog.messages if line.startswith("Engine: sequential, because")]
    assert len(lines) == 1
    assert reason in lines[0]
    assert_equal(parameters(results[0]), parameters(results[1]))
    if case == "keeps a tensor":
        assert len(results[0].losses) == len(results[1].losses)
        assert torch.equal(torch.stack(results[0].losses), torch.stack(results[1].losses))
    if case == "counts":
        assert results[0].steps == results[1].steps


def test_auto_says_what_it_took_and_stays_alone_with_one_client_or_long_steps(caplog):
    wide = nn.Sequential(nn.Linear(FEATURES, 2000), nn.ReLU(), nn.Linear(2000, 2000), nn.Linear(2000, CLASSES))
    for module, clients, line in (
        (Plain(), 3, "Engine: vectorized, 3 clients at once."),
        (Plain(), 1, "Engine: sequential, because a round has one client."),
        (Plain(wide), 3, "Engine: sequential, because a step is long"),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            federate(module, fb.FederatedBayes(fb.IIDPartition(clients)), 1)
        assert sum(message.startswith(line) for message in caplog.messages) == 1


@pytest.mark.parametrize("clients_at_once", [0, -3])
def test_a_stack_holds_at_least_one_client(clients_at_once):
    with pytest.raises(fb.FederationError, match="clients_at_once"):
        fb.FederatedBayes(fb.IIDPartition(2), clients_at_once=clients_at_once)


class Torn(Dataset):
    """Example 7 cannot be read; example 3 has a label that the network has not."""

    def __init__(self, fault: str) -> None:
        self.inner, self.fault = blobs(24), fault

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if self.fault == "torn" and index == 7:
            raise OSError("truncated file")
        x, y = self.inner[index]
        if self.fault == "label" and index == 3:
            y = torch.tensor(CLASSES + 5)
        if self.fault == "nan" and index == 3:
            x = x * float("nan")
        return x, y


@pytest.mark.parametrize("fault", ["torn", "label", "nan"])
def test_a_client_with_bad_data_is_left_out_and_the_others_end_as_without_it(fault, caplog):
    names = ("first", "bad", "last")
    parts = {name: Torn(fault if name == "bad" else "none") for name in names}
    federation = fb.FederatedBayes(engine="vectorized", optimizer_state="keep")
    module = Plain()
    with caplog.at_level(logging.INFO):
        federate(module, federation, 2, loader(fb.ClientDatasets(parts)))
    assert [row["failed_clients"] for row in federation.history] == [1, 1]
    assert sum("client bad is left out" in line for line in caplog.messages) == 2

    class OnlyGood(Plain):  # the same by the reference, which trains the good clients under their own numbers
        def training_step(self, batch, batch_idx):
            if self.client.number == 1:
                raise RuntimeError("left out")
            return super().training_step(batch, batch_idx)

        def on_client_start(self, client):
            self.client = client

    reference = OnlyGood()
    federate(reference, fb.FederatedBayes(engine="sequential", optimizer_state="keep"), 2,
             loader(fb.ClientDatasets(parts)))
    for (name, value), other in zip(reference.named_parameters(), module.parameters()):
        torch.testing.assert_close(other, value, rtol=1e-5, atol=1e-6, msg=name)


def test_a_client_that_has_failed_comes_back_in_the_next_round():
    class Later(Plain):
        def training_step(self, batch, batch_idx):
            if self.current_epoch == 1:
                raise RuntimeError("a bad day")
            return super().training_step(batch, batch_idx)

    federation = fb.FederatedBayes(fb.IIDPartition(3), engine="vectorized")
    federate(Later(), federation, 3)
    assert [row["failed_clients"] for row in federation.history] == [0, 3, 0]


def test_the_module_holds_the_global_model_during_a_round_and_the_optimizer_its_own_parameters_after_it(monkeypatch):
    monkeypatch.setattr(vectorized, "STEPS_PER_BATCH", 1)
    seen = []

    class Spy(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx + 1 < trainer.num_training_batches:
                seen.append((trainer.current_epoch, parameters(pl_module)))

        def on_train_epoch_end(self, trainer, pl_module):
            held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
            assert all(a is b for a, b in zip(held, pl_module.parameters(), strict=True))
            assert not trainer.optimizers[0].state

    module = Plain()
    start = parameters(module)
    federate(module, fb.FederatedBayes(fb.IIDPartition(3), engine="vectorized"), 2, callbacks=[Spy()])
    assert_equal(seen[0][1], start)
    assert_equal(seen[-1][1], next(p for epoch, p in seen if epoch == 1))
    assert "log" not in vars(module)
