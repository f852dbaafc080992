"""The probe names what cannot be trained as a stack, before training."""

import copy
import logging

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

import lightning_fedbayes as fb
from lightning_fedbayes.clients import setup
from lightning_fedbayes.clients.vectorized.optimizer import check_elementwise, counts_by_row
from lightning_fedbayes.clients.vectorized.stack import ClientStack
from tests.clients.vectorized.modules import assert_goes_one_by_one
from tests.federations import CLASSES, FEATURES, Plain, federate


class Changed(Plain):
    """Its step returns a function of (module, loss, batch); ``attributes`` are set before."""

    def __init__(self, change, optimizer=torch.optim.SGD, **attributes):
        super().__init__(optimizer=optimizer)
        self.change = [change]
        for name, value in attributes.items():
            setattr(self, name, value)

    def training_step(self, batch, batch_idx):
        return self.change[0](self, super().training_step(batch, batch_idx), batch)


def keeps(module, loss, batch):
    module.losses.append(loss.detach())
    return loss


def counts(module, loss, batch):
    module.count += 1
    return loss


def slows(module, loss, batch):
    module.optimizers().param_groups[0]["lr"] *= 0.99
    return loss


def decayed(parameters, loss):
    return loss + 0.05 * sum(p.square().sum() for p in parameters)


def keeps_parameters():
    module = Changed(lambda module, loss, _: decayed(module.decay, loss))
    module.decay = list(module.net.parameters())
    return module


class AfterBackward(Plain):
    def on_after_backward(self):
        pass


class Names(Plain):
    def on_client_start(self, client):
        self.weight = {"0": 1.0, "1": 2.0}[client.name]


class NormedSGD(torch.optim.SGD):
    """Steps by the gradient over its norm, taken over each whole tensor, from some step on."""

    taken, first = 0, 1

    def step(self, closure=None):
        self.taken += 1
        if self.taken >= self.first:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad /= parameter.grad.norm()
        return super().step(closure)


class Late(NormedSGD):
    first = 4


class Recurrent(Plain):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, CLASSES))
        self.gru = nn.GRU(2, 4, 2, batch_first=True, dropout=0.1)

    def forward(self, x):
        return self.net(self.gru(x.view(-1, 3, 2))[0][:, -1])


def backward_hook() -> Plain:
    module = Plain()
    module.net[0].register_full_backward_hook(lambda layer, inputs, outputs: tuple(2 * each for each in inputs))
    return module


def hooked() -> Plain:
    module = Plain()
    module.net[0].weight.register_hook(lambda gradient: gradient * 2)
    return module


ACCURACY = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
GRADIENT_NORMS = LambdaCallback(on_before_optimizer_step=lambda *_: None)
REFUSED = {
    "metric": (
        lambda: Changed(lambda m, loss, batch: loss * m.accuracy(m(batch[0]), batch[1]), accuracy=ACCURACY.clone()),
        {},
        "computes with what self.accuracy returns of a batch",
    ),
    "branch": (
        lambda: Changed(lambda m, loss, batch: loss * 2 if loss > 0.5 else loss),
        {},
        "decides by the value of a tensor: use torch.where, at line",
    ),
    "keeps a tensor": (lambda: Changed(keeps, losses=[]), {}, "changes self.losses"),
    "numpy": (
        lambda: Changed(lambda m, loss, batch: loss * (1 + np.random.beta(0.4, 0.4))),
        {},
        "draws from Python's or NumPy's generator",
    ),
    "hook": (AfterBackward, {}, "AfterBackward has a hook on_after_backward"),
    "callback": (Plain, {"callbacks": [GRADIENT_NORMS]}, "LambdaCallback has a hook on_before_optimizer_step"),
    "name": (Names, {}, "reads the client's name"),
    "optimizer": (lambda: Plain(optimizer=NormedSGD), {}, "NormedSGD does not treat every entry"),
    "parameter hook": (hooked, {}, "net.0.weight has a hook"),
    "backward hook": (backward_hook, {}, "net.0 has a backward hook"),
    "parameters of the optimizer": (
        lambda: Changed(lambda m, loss, _: decayed(m.optimizers().param_groups[0]["params"], loss)),
        {},
        "reads parameters from elsewhere",
    ),
    "kept parameters": (keeps_parameters, {}, "keeps the parameter net.0.weight elsewhere"),
    "tensor in place": (lambda: Changed(counts, count=torch.zeros(())), {}, "changes self.count"),
    "rate": (lambda: Changed(slows), {}, "changes the optimizer's options"),
    "late optimizer": (lambda: Plain(optimizer=Late), {}, "Late"),
    "gru": (Recurrent, {}, "runs an LSTM, or a recurrent layer with dropout between layers"),
    "vector loss": (lambda: Changed(lambda m, loss, batch: loss.expand(8)), {}, "must be one number"),
}


FAIL_ALONE = dict.fromkeys(("optimizer", "backward hook"), "1 round in a row had fewer than min_clients=1")
FAIL_ALONE["vector loss"] = None
"""Cases whose clients fail one by one, too → with which error; None: which no engine takes."""


@pytest.mark.whole
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stacked_is_named_and_auto_goes_one_by_one(case, caplog):
    make, options, reason = REFUSED[case]
    with caplog.at_level(logging.INFO):
        results = assert_goes_one_by_one(make, fb.IIDPartition(2), reason, FAIL_ALONE.get(case, ""), **options)
    if not results:
        return
    lines = [line for line in caplog.messages if line.startswith("Engine: sequential, because")]
    assert len(lines) == 1
    assert reason in lines[0]
    if case == "keeps a tensor":
        assert len(results[0].losses) == len(results[1].losses)
        assert torch.equal(torch.stack(results[0].losses), torch.stack(results[1].losses))


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


def test_a_step_that_is_too_long_to_be_stacked_is_tried_once(monkeypatch):
    """And with "vectorized", for which no step is too long, more often."""
    tried, forward_backward = [], ClientStack.forward_backward
    monkeypatch.setattr(ClientStack, "forward_backward", lambda *a, **k: tried.append(a) or forward_backward(*a, **k))
    monkeypatch.setattr(setup, "LARGEST_STEP", {"cpu": 1})
    federate(Plain(), fb.FederatedBayes(fb.IIDPartition(3)), 1)
    assert len(tried) == 1
    federate(Plain(), fb.FederatedBayes(fb.IIDPartition(3), engine="vectorized"), 1)
    assert len(tried) > 4


ELEMENTWISE = {  # options, the entries that are stacked, and whether torch computes with a tensor of step numbers
    "SGD": ({"momentum": 0.9}, {"momentum_buffer"}, False),
    "Adam": ({"amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, True),
    "AdamW": ({}, {"exp_avg", "exp_avg_sq"}, True),
    "NAdam": ({}, {"exp_avg", "exp_avg_sq"}, False),
    "RMSprop": ({"centered": True}, {"square_avg", "grad_avg"}, True),
    "Adagrad": ({}, {"sum"}, False),
    "Rprop": ({}, {"prev", "step_size"}, True),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_recognised_and_not_changed(name):
    """And so are those whose numbers of steps may differ between clients."""
    options, stacked, counts = ELEMENTWISE[name]
    parameters = [nn.Parameter(torch.randn(20, 30)), nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 3))]
    optimizer = getattr(torch.optim, name)(parameters, lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = copy.deepcopy([p.detach() for p in parameters])
    own = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    keys = check_elementwise(optimizer)
    assert keys == stacked
    assert counts_by_row(optimizer, keys) == ({"step"} if counts else set())
    assert all(torch.equal(a, b) for a, b in zip(before, parameters))
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == own
    assert not any("exp_avg" in state for state in optimizer.state.values())
    assert optimizer.param_groups[0]["params"][0] is parameters[0]
    assert scheduler.last_epoch == 0


def test_a_number_of_steps_that_all_rows_would_share_is_noticed(monkeypatch):
    optimizer = torch.optim.Adam([nn.Parameter(torch.randn(20, 30))])
    keys = check_elementwise(optimizer)
    monkeypatch.setattr(torch.Tensor, "reshape", lambda self, shape: self[:1].expand(shape))  # the first client's
    assert counts_by_row(optimizer, keys) == set()
