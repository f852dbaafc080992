"""All cases of the zoo."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from torch import nn, optim
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import lightning_fedbayes as fb
from tests.federations import of_bayesian_torch
from tests.zoo import optimizers as own
from tests.zoo.case import CLASSES, EQUAL, FEATURES, REFUSED, Case, Net, callback, net, network

CASES: list[Case] = []


def add(group: str, name: str, make: Callable[[], L.LightningModule] = Net, **options: Any) -> None:
    CASES.append(Case(group, name, make, **options))


# -- optimizers --------------------------------------------------------------------------------------------------------

TORCH = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD with Nesterov momentum and weight decay": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD that maximizes": lambda p: optim.SGD(p, lr=0.01, maximize=True),
    "SGD, foreach": lambda p: optim.SGD(p, lr=0.1, foreach=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "Adam, fused": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "Adam, learning rate in a tensor": lambda p: optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AMSGrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: optim.Adadelta(p),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
}
for name, optimizer in TORCH.items():
    add("Optimizers of torch", name, lambda optimizer=optimizer: Net(optimizer=optimizer), tolerance=1e-4)
add(
    "Optimizers of torch", "Adafactor", lambda: Net(optimizer=lambda p: optim.Adafactor(p, lr=0.01)), vectorized=REFUSED
)
add(
    "Optimizers of torch",
    "LBFGS",
    lambda: Net(optimizer=lambda p: optim.LBFGS(p, lr=0.1, max_iter=3)),
    vectorized=REFUSED,
)
add(
    "Optimizers of torch",
    "groups with learning rates of their own",
    lambda: Net(optimizer=lambda p: optim.SGD([{"params": [each], "lr": 0.1 / (i + 1)} for i, each in enumerate(p)])),
)


def some_parameters(self):
    return optim.SGD(list(self.parameters())[:2], lr=0.1)


add("Optimizers of torch", "only some of the parameters", net(configure_optimizers=some_parameters))


def step_hook(self):
    made = optim.SGD(self.parameters(), lr=0.1)
    made.register_step_post_hook(lambda optimizer, *_: [g["params"][0].data.mul_(0.99) for g in optimizer.param_groups])
    return made


add("Optimizers of torch", "a hook after the step", net(configure_optimizers=step_hook), vectorized=REFUSED)
add("Optimizers of torch", "none", net(configure_optimizers=lambda self: None), vectorized=REFUSED)

for name, made, options in [
    ("SAM, which needs a closure", own.Sam, {"vectorized": REFUSED}),
    ("LBFGS behind *args", lambda p: own.StarLbfgs(p, lr=0.1, max_iter=3), {"vectorized": REFUSED, "keeps": False}),
    ("plain descent of a package", own.Descent, {}),
    ("Lion without momentum", lambda p: own.Sign(p, lr=0.01), {}),
    ("a learning rate that the optimizer decays", own.Decays, {"vectorized": REFUSED}),
    ("a count in an attribute", own.CountsItself, {"vectorized": REFUSED}),
    ("noise from a generator of its own", own.Noise, {"vectorized": REFUSED, "keeps": False}),
    (
        "Lookahead: slow weights from the construction",
        lambda p: own.Lookahead(optim.SGD(p, lr=0.1)),
        {"vectorized": REFUSED, "keeps": False},
    ),
    ("schedule-free", own.ScheduleFree, {"vectorized": REFUSED}),
    ("norms of whole tensors", own.NormGrowth, {"vectorized": REFUSED}),
    ("a wrapper of SGD with momentum", own.Wrapper, {"vectorized": REFUSED, "keeps": False}),
]:
    add("Other optimizers", name, lambda made=made: Net(optimizer=made), **options)

# -- schedules ---------------------------------------------------------------------------------------------------------


def scheduled(make: Callable[[Any], Any], **config: Any) -> Callable[[], Net]:
    def configure_optimizers(self):
        optimizer = optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **config}}

    return net(configure_optimizers=configure_optimizers)


for name, make in {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "a warm-up and then a decay": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 1), lr_scheduler.ExponentialLR(o, 0.5)], [1]
    ),
}.items():
    add("Schedules", name, scheduled(make), rounds=3)
add("Schedules", "once in two epochs", scheduled(lambda o: lr_scheduler.StepLR(o, 1, 0.5), frequency=2), rounds=2)
for name, make in {
    "StepLR in every step": lambda o: lr_scheduler.StepLR(o, 1, 0.9),
    "OneCycleLR in every step": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=100),
    "a warm-up in every step": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 9)),
}.items():
    add("Schedules", name, scheduled(make, interval="step"), rounds=3)
add(
    "Schedules",
    "in every second step",
    scheduled(lambda o: lr_scheduler.StepLR(o, 1, 0.5), interval="step", frequency=2),
    vectorized=REFUSED,
)
add(
    "Schedules",
    "of the module's own hook lr_scheduler_step",
    lambda: net(
        configure_optimizers=lambda self: (
            [o := optim.SGD(self.parameters(), lr=0.1)],
            [lr_scheduler.StepLR(o, 1, 0.5)],
        ),
        lr_scheduler_step=lambda self, scheduler, metric: scheduler.step(),
    )(),
    rounds=3,
)

# -- the training step -------------------------------------------------------------------------------------------------


def step(
    group: str,
    name: str,
    function: Callable[..., Any],
    *,
    vectorized: str = REFUSED,
    methods: Any = None,
    **options: Any,
) -> None:
    add(group, name, net(training_step=function, **(methods or {})), vectorized=vectorized, **options)


STEP = "The training step"
step(STEP, "returns a dict", lambda self, batch, batch_idx: {"loss": self.loss(batch), "x": batch[0]}, vectorized=EQUAL)
step(STEP, "takes no batch_idx", lambda self, batch: self.loss(batch), vectorized=EQUAL)
step(
    STEP,
    "returns None at every second batch",
    lambda self, batch, batch_idx: None if batch_idx % 2 else self.loss(batch),
    vectorized=EQUAL,
)
step(STEP, "returns None always", lambda self, batch, batch_idx: None, vectorized=EQUAL)
step(STEP, "batch_idx in the loss", lambda self, batch, batch_idx: self.loss(batch) / (1 + batch_idx), vectorized=EQUAL)
step(
    STEP,
    "is_last_batch in the loss",
    lambda self, batch, batch_idx: self.loss(batch) * (2 if self.trainer.is_last_batch else 1),
)
step(
    STEP, "global_step in the loss", lambda self, batch, batch_idx: self.loss(batch) / (1 + self.global_step), rounds=1
)
step(
    STEP,
    "current_epoch in the loss",
    lambda self, batch, batch_idx: self.loss(batch) / (1 + self.current_epoch),
    vectorized=EQUAL,
)


def rate_in_loss(self, batch, batch_idx):
    return self.loss(batch) * (1 + self.optimizers().param_groups[0]["lr"])


step(STEP, "the learning rate in the loss", rate_in_loss, vectorized=EQUAL)


def lowers_rate(self, batch, batch_idx):
    for group in self.optimizers().param_groups:
        group["lr"] *= 0.9
    return self.loss(batch)


step(STEP, "lowers the learning rate", lowers_rate)


def reseeds(self, batch, batch_idx):
    torch.manual_seed(batch_idx)
    return self.loss((batch[0] + 0.1 * torch.randn(batch[0].shape), batch[1]))


step(STEP, "torch.manual_seed", reseeds)


def draws_own(self, batch, batch_idx):
    if not hasattr(self, "generator"):
        self.generator = torch.Generator().manual_seed(3)
    return self.loss((batch[0] + 0.1 * torch.randn(batch[0].shape, generator=self.generator), batch[1]))


class OwnGenerator(Net):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    training_step = draws_own


add(STEP, "a generator of the module", OwnGenerator, vectorized=REFUSED)


step(STEP, "NumPy's global generator", lambda self, batch, batch_idx: self.loss(batch) * np.random.rand())
step(STEP, "Python's global generator", lambda self, batch, batch_idx: self.loss(batch) * random.random())
step(
    STEP,
    "torch's global generator",
    lambda self, batch, batch_idx: self.loss((batch[0] + 0.1 * torch.randn(batch[0].shape), batch[1])),
    vectorized=EQUAL,
    noisy=True,
)


class Counter(Net):
    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self.loss(batch) / self.steps


add(STEP, "a count in an attribute", Counter, vectorized=REFUSED)


def counts_in_closure():
    steps = [0]

    def training_step(self, batch, batch_idx):
        steps[0] += 1
        if batch_idx == 0:
            steps[0] = 1
        return self.loss(batch) / steps[0]

    return net(training_step=training_step)()


add(STEP, "a count in a closure, from 0 in every epoch", counts_in_closure, vectorized=REFUSED)


class Hidden(Net):
    def __init__(self):
        super().__init__()
        self.hidden = torch.zeros(FEATURES)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.hidden = 0.5 * self.hidden + 0.5 * x.mean(0).detach()
        return self.loss((x + self.hidden, y))


add(STEP, "a hidden state that is replaced", Hidden, vectorized=REFUSED)


class Outputs(Net):
    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.losses.clear()


add(STEP, "a list of outputs, cleared in every epoch", Outputs, vectorized=REFUSED)


class Statistics(Net):
    persistent = True

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES), persistent=self.persistent)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.loss((x - self.mean, y))


class Transient(Statistics):
    persistent = False


class Replaced(Statistics):
    def training_step(self, batch, batch_idx):
        x, y = batch
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.loss((x - self.mean, y))


add(STEP, "a running mean in a buffer", Statistics)
add(STEP, "a running mean in a buffer that is replaced", Replaced)
add(STEP, "a running mean in a buffer that is not persistent", Transient, vectorized=REFUSED)


def shrinks(self, batch, batch_idx):
    with torch.no_grad():
        self.net[0].weight.mul_(0.9)
    return self.loss(batch)


step(STEP, "writes into the weights", shrinks, vectorized=EQUAL)


def freezes_later(self, batch, batch_idx):
    self.net[0].requires_grad_(batch_idx < 1)
    return self.loss(batch)


step(STEP, "freezes a layer at a step", freezes_later)


def evaluates_later(self, batch, batch_idx):
    if batch_idx == 1:
        self.net[1].eval()
    return self.loss(batch)


add(
    STEP,
    "eval() of a BatchNorm at a step",
    lambda: net(training_step=evaluates_later)().__class__(network(batch_norm=True)),
    vectorized=REFUSED,
    loading={"drop_last": True},
)


def evaluates(self, batch, batch_idx):
    self.net[1].eval()
    return self.loss(batch)


add(
    STEP,
    "eval() of a BatchNorm at every step",
    lambda: net(training_step=evaluates)().__class__(network(batch_norm=True)),
    vectorized=EQUAL,
    loading={"drop_last": True},
)


step(
    STEP,
    "control flow on data",
    lambda self, batch, batch_idx: self.loss(batch) * (2 if batch[0].mean() > 0 else 1),
    vectorized=EQUAL,
)
step(STEP, ".item()", lambda self, batch, batch_idx: self.loss(batch) * (1 + batch[0].abs().max().item()))
step(
    STEP,
    "torch.where on data",
    lambda self, batch, batch_idx: self.loss(batch) * torch.where(batch[0].mean() > 0, 2.0, 1.0),
    vectorized=EQUAL,
)


class Metrics(Net):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("train/accuracy", self.accuracy, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(logits, y)


class Weighted(Metrics):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + self.accuracy(self(batch[0]), batch[1]))


add(STEP, "a torchmetric", Metrics)
add(STEP, "a torchmetric's value in the loss", Weighted, vectorized=REFUSED)


def logs(self, batch, batch_idx):
    loss = self.loss(batch)
    self.log("loss", loss)
    self.log_dict({"a": loss, "b": 1.0}, on_step=False, on_epoch=True)
    return loss


step(STEP, "logs", logs, vectorized=EQUAL)


def penalized(self, batch, batch_idx):
    return self.loss(batch) + 0.01 * sum(p.square().sum() for p in self.parameters())


step(STEP, "a penalty on the parameters", penalized, vectorized=EQUAL)


def gradient_penalty(self, batch, batch_idx):
    x = batch[0].clone().requires_grad_()
    loss = self.loss((x, batch[1]))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


step(STEP, "a gradient of its own", gradient_penalty)

# -- networks ----------------------------------------------------------------------------------------------------------


def image(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), *layers)


def sequence(layer: Callable[[], nn.Module]) -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer(), nn.Linear(4, CLASSES)

        def forward(self, x):
            out, _ = self.layer(x.unflatten(1, (3, 2)))
            return self.head(out[:, -1])

    Recurrent.__module__ = __name__
    return Recurrent()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.head(self.second(self.first(x).relu()))


class Tokens(nn.Module):
    sparse = False

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4, sparse=self.sparse), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.table(x.abs().long() % 5).mean(1))


class SparseTokens(Tokens):
    sparse = True


class Bert(nn.Module):
    """Tokens and positions, an encoder that masks the padding, and a head on the first token."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(5, 8, padding_idx=0), nn.Embedding(FEATURES, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
        self.norm, self.encoder = nn.LayerNorm(8), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        tokens, places = (2 * x).long().clamp(0, 4), torch.arange(FEATURES)
        padding = (tokens == 0) & (places > 0)
        embedded = self.norm(self.tokens(tokens) + self.positions(places))
        return self.head(self.encoder(embedded, src_key_padding_mask=padding)[:, 0])


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(2, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x):
        sequences = x.unflatten(1, (3, 2))
        return self.head(self.layer(nn.utils.rnn.pack_padded_sequence(sequences, [3] * len(x), True))[1][0])


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=False))


class Normalizer(nn.Module):
    """Keeps a count in an attribute and its last input."""

    def __init__(self):
        super().__init__()
        self.layer, self.count = nn.Linear(FEATURES, CLASSES), 0

    def forward(self, x):
        if self.training:
            self.count += 1
        return self.layer(x) / self.count


NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "linear": (lambda: nn.Linear(FEATURES, CLASSES), {}),
    "three layers with in-place ReLU": (
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ELU(), nn.Linear(8, CLASSES)
        ),
        {},
    ),
    "BatchNorm": (lambda: network(batch_norm=True), {"loading": {"drop_last": True}}),
    "BatchNorm without statistics": (
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, CLASSES)
        ),
        {"loading": {"drop_last": True}},
    ),
    "LayerNorm": (lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES)), {}),
    "convolution and pooling": (
        lambda: image(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.AvgPool2d((1, 2)), nn.Flatten(), nn.Linear(4, CLASSES)),
        {},
    ),
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.3), network()), {"noisy": True}),
    "tied weights": (Tied, {}),
    "embedding": (Tokens, {}),
    "embedding with sparse gradients": (SparseTokens, {"vectorized": REFUSED}),
    "transformer layer without dropout": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (3, 2)),
            nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(6, CLASSES),
        ),
        {},
    ),
    "BERT: embeddings, and an encoder with a mask": (Bert, {}),
    "LSTM": (lambda: sequence(lambda: nn.LSTM(2, 4, batch_first=True)), {}),
    "LSTM, two layers, both directions": (
        lambda: sequence(lambda: nn.LSTM(2, 2, 2, bidirectional=True, batch_first=True)),
        {},
    ),
    "LSTM with projections": (
        lambda: sequence(lambda: nn.LSTM(2, 6, proj_size=4, batch_first=True)),
        {"vectorized": REFUSED},
    ),
    "GRU": (lambda: sequence(lambda: nn.GRU(2, 4, batch_first=True)), {}),
    "GRU on a packed sequence": (Packed, {"vectorized": REFUSED}),
    "RNN": (lambda: sequence(lambda: nn.RNN(2, 4, batch_first=True)), {}),
    "spectral norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(FEATURES, 5)), nn.Linear(5, CLASSES)),
        {"vectorized": REFUSED},
    ),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(FEATURES, 5)), nn.Linear(5, CLASSES)),
        {},
    ),
    "activation checkpointing": (Checkpointed, {"vectorized": REFUSED}),
    "a count inside a layer": (Normalizer, {"vectorized": REFUSED}),
    "double precision": (
        lambda: nn.Sequential(fb_cast(torch.float64), nn.Linear(FEATURES, CLASSES, dtype=torch.float64)),
        {},
    ),
    "bfloat16": (
        lambda: nn.Sequential(fb_cast(torch.bfloat16), nn.Linear(FEATURES, CLASSES, dtype=torch.bfloat16)),
        {"tolerance": 0.02},
    ),
    "complex parameters": (
        lambda: nn.Sequential(fb_cast(torch.complex64), nn.Linear(FEATURES, CLASSES, dtype=torch.complex64), Modulus()),
        {"sequential": REFUSED, "vectorized": REFUSED},
    ),
    "our Bayesian layers": (lambda: fb.bayesianize(network(), last=1), {"noisy": True}),
    "bayesian-torch's dnn_to_bnn": (lambda: of_bayesian_torch(network()), {"noisy": True}),
    "our Flipout layers": (lambda: fb.bayesianize(network(), last=2, estimator="flipout"), {"noisy": True}),
}


class fb_cast(nn.Module):
    """Converts its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


class Modulus(nn.Module):
    def forward(self, x):
        return x.abs()


for name, (make, options) in NETWORKS.items():
    add("Networks", name, lambda make=make: Net(make()), **options)


def frozen():
    made = network()
    made[0].requires_grad_(False)
    return Net(made)


add("Networks", "a frozen layer", frozen)

# -- hooks of the module -----------------------------------------------------------------------------------------------


def scale(module: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor)


def clamp(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.2, 0.2)


HOOKS = "Hooks of the module"
add(HOOKS, "on_fit_start changes the weights", net(on_fit_start=lambda self: scale(self, 0.5)), rounds=1)
add(HOOKS, "on_train_start changes the weights", net(on_train_start=lambda self: scale(self, 0.5)), rounds=1)
add(HOOKS, "on_train_epoch_start changes the weights", net(on_train_epoch_start=lambda self: scale(self, 0.9)))
add(HOOKS, "on_train_epoch_end changes the weights", net(on_train_epoch_end=lambda self: scale(self, 0.9)))
add(
    HOOKS,
    "on_validation_epoch_end changes the weights",
    net(on_validation_epoch_end=lambda self: scale(self, 0.9)),
    validates=True,
)


def on_train_epoch_start(self):
    for group in self.optimizers().param_groups:
        group["lr"] = 0.1 / (1 + self.current_epoch)


add(HOOKS, "on_train_epoch_start sets the learning rate", net(on_train_epoch_start=on_train_epoch_start), rounds=3)


def unfreezes(self):
    self.net[0].requires_grad_(self.current_epoch > 0)


add(HOOKS, "on_train_epoch_start unfreezes a layer", net(on_train_epoch_start=unfreezes), rounds=3)
add(
    HOOKS,
    "on_train_epoch_start sets an attribute",
    net(
        on_train_epoch_start=lambda self: setattr(self, "beta", 1 / (1 + self.current_epoch)),
        training_step=lambda self, batch, batch_idx: self.beta * self.loss(batch),
    ),
    rounds=3,
    vectorized=REFUSED,
)


def resets(self, batch, batch_idx):
    if batch_idx == 0:
        self.hidden = torch.zeros(FEATURES)


add(
    HOOKS,
    "on_train_batch_start resets a state at batch 0",
    lambda: type("V", (Hidden,), {"__module__": __name__, "on_train_batch_start": resets})(),
    vectorized=REFUSED,
)
add(
    HOOKS,
    "on_train_batch_start returns -1 at batch 1",
    net(on_train_batch_start=lambda self, batch, batch_idx: -1 if batch_idx == 1 else None),
    vectorized=REFUSED,
)
add(
    HOOKS,
    "on_train_batch_start returns -1 at once",
    net(on_train_batch_start=lambda self, batch, batch_idx: -1),
    vectorized=REFUSED,
)
add(
    HOOKS,
    "on_train_batch_end clamps the weights",
    net(on_train_batch_end=lambda self, outputs, batch, batch_idx: clamp(self)),
    vectorized=REFUSED,
)


def halves_gradients(self, *_):
    for parameter in self.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


add(
    HOOKS,
    "on_before_optimizer_step changes gradients",
    net(on_before_optimizer_step=halves_gradients),
    vectorized=REFUSED,
)


def warm_up(self, epoch, batch_idx, optimizer, closure):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * min(1.0, (1 + batch_idx) / 3)
    optimizer.step(closure=closure)


add(HOOKS, "optimizer_step warms the learning rate up", net(optimizer_step=warm_up), vectorized=REFUSED)


def every_second(self, epoch, batch_idx, optimizer, closure):
    if batch_idx % 2 == 0:
        optimizer.step(closure=closure)
    else:
        closure()


add(HOOKS, "optimizer_step steps at every second batch", net(optimizer_step=every_second), vectorized=REFUSED)
add(
    HOOKS,
    "optimizer_zero_grad keeps the gradients at odd batches",
    net(optimizer_zero_grad=lambda self, epoch, batch_idx, optimizer: None if batch_idx % 2 else optimizer.zero_grad()),
    vectorized=REFUSED,
)
add(
    HOOKS,
    "configure_gradient_clipping",
    net(
        configure_gradient_clipping=lambda self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None: (
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        )
    ),
    vectorized=REFUSED,
)
add(HOOKS, "backward", net(backward=lambda self, loss: (2 * loss).backward()), vectorized=REFUSED)
add(
    HOOKS,
    "on_after_batch_transfer changes the batch",
    net(on_after_batch_transfer=lambda self, batch, dataloader_idx: (2 * batch[0], batch[1])),
    vectorized=REFUSED,
)


def gradient_hook(self):
    self.net[0].weight.register_hook(lambda gradient: 0.5 * gradient)


add(HOOKS, "a hook on a parameter's gradient", net(on_fit_start=gradient_hook), vectorized=REFUSED)


def forward_hook():
    made = Net()
    made.net[0].register_forward_hook(lambda layer, inputs, output: 2 * output)
    return made


add(HOOKS, "a forward hook on a layer", forward_hook)


def backward_hook():
    made = Net()
    made.net[0].register_full_backward_hook(
        lambda layer, inputs, outputs: tuple(None if each is None else 0.5 * each for each in inputs)
    )
    return made


add(HOOKS, "a backward hook on a layer", backward_hook, vectorized=REFUSED)


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


add(HOOKS, "manual optimization", Manual, sequential=REFUSED, vectorized=REFUSED)


class Iterates(Net):
    def training_step(self, dataloader_iter):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.loss(next(dataloader_iter)[0])


add(HOOKS, "training_step(dataloader_iter)", Iterates, sequential=REFUSED, vectorized=REFUSED)

# -- callbacks ---------------------------------------------------------------------------------------------------------

CALLBACKS = "Callbacks"
for name, hooks, options in [
    (
        "on_train_start changes the weights",
        {"on_train_start": lambda self, trainer, module: scale(module, 0.5)},
        {"rounds": 1},
    ),
    (
        "on_train_epoch_start changes the weights",
        {"on_train_epoch_start": lambda self, trainer, module: scale(module, 0.9)},
        {},
    ),
    (
        "on_validation_epoch_end changes the weights",
        {"on_validation_epoch_end": lambda self, trainer, module: scale(module, 0.9)},
        {"validates": True},
    ),
    (
        "on_train_batch_start changes the weights",
        {"on_train_batch_start": lambda self, trainer, module, batch, batch_idx: scale(module, 0.9)},
        {"vectorized": REFUSED},
    ),
    (
        "on_train_batch_start changes the batch in place",
        {"on_train_batch_start": lambda self, trainer, module, batch, batch_idx: batch[0].mul_(2)},
        {"vectorized": REFUSED},
    ),
    (
        "on_train_batch_start sets the learning rate by batch_idx",
        {
            "on_train_batch_start": lambda self, trainer, module, batch, batch_idx: (
                trainer.optimizers[0].param_groups[0].update(lr=0.1 / (1 + batch_idx))
            )
        },
        {"vectorized": REFUSED},
    ),
    (
        "on_train_batch_end clamps the weights",
        {"on_train_batch_end": lambda self, trainer, module, outputs, batch, batch_idx: clamp(module)},
        {"vectorized": REFUSED},
    ),
]:
    add(CALLBACKS, name, callbacks=callback(**hooks), **options)


class Ema(L.Callback):
    """Follows the weights, and never gives them back."""

    def __init__(self):
        self.shadow = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, p in pl_module.named_parameters():
            self.shadow[name] = 0.9 * self.shadow.get(name, p.detach()) + 0.1 * p.detach()


add(CALLBACKS, "a moving average of the weights beside the module", callbacks=lambda: [Ema()], vectorized=REFUSED)
add(CALLBACKS, "EarlyStopping", callbacks=lambda: [EarlyStopping("val/loss")], validates=True)
add(CALLBACKS, "Timer", callbacks=lambda: [Timer("00:01:00:00")])
add(
    CALLBACKS,
    "LambdaCallback with a hook of the epoch",
    callbacks=lambda: [LambdaCallback(on_train_epoch_start=lambda trainer, module: scale(module, 0.9))],
)
add(
    CALLBACKS,
    "LambdaCallback with a hook of the batch",
    callbacks=lambda: [LambdaCallback(on_train_batch_end=lambda trainer, module, *_: clamp(module))],
    vectorized=REFUSED,
)
add(
    CALLBACKS,
    "StochasticWeightAveraging",
    callbacks=lambda: [StochasticWeightAveraging(0.1)],
    sequential=REFUSED,
    vectorized=REFUSED,
)
add(
    CALLBACKS,
    "ModelPruning",
    callbacks=lambda: [ModelPruning("l1_unstructured", amount=0.5)],
    sequential=REFUSED,
    vectorized=REFUSED,
)
add(
    CALLBACKS,
    "GradientAccumulationScheduler",
    callbacks=lambda: [GradientAccumulationScheduler({0: 2})],
    sequential=REFUSED,
    vectorized=REFUSED,
)

# -- the Trainer -------------------------------------------------------------------------------------------------------

TRAINER = "Options of the Trainer"
for name, options, how in [
    ("gradient_clip_val", {"gradient_clip_val": 0.1}, {}),
    ("precision='64-true'", {"precision": "64-true"}, {}),
    ("precision='bf16-mixed'", {"precision": "bf16-mixed"}, {"tolerance": 0.02}),
    ("precision='bf16-true'", {"precision": "bf16-true"}, {"tolerance": 0.05}),
    ("accumulate_grad_batches=2", {"accumulate_grad_batches": 2}, {"vectorized": REFUSED}),
    ("limit_train_batches=2", {"limit_train_batches": 2}, {}),
    ("detect_anomaly", {"detect_anomaly": True}, {"vectorized": REFUSED}),
    ("profiler='simple'", {"profiler": "simple"}, {"vectorized": REFUSED}),
    ("deterministic", {"deterministic": True}, {}),
    ("reload_dataloaders_every_n_epochs", {"reload_dataloaders_every_n_epochs": 1}, {}),
    ("inference_mode=False", {"inference_mode": False}, {"validates": True}),
    ("check_val_every_n_epoch=2", {"check_val_every_n_epoch": 2}, {"validates": True, "rounds": 3}),
    ("limit_val_batches=1", {"limit_val_batches": 1}, {"validates": True}),
    ("overfit_batches", {"overfit_batches": 2}, {"sequential": REFUSED, "vectorized": REFUSED}),
    ("max_steps", {"max_steps": 7}, {"sequential": REFUSED, "vectorized": REFUSED}),
    (
        "val_check_interval",
        {"val_check_interval": 0.5},
        {"sequential": REFUSED, "vectorized": REFUSED, "validates": True},
    ),
]:
    add(TRAINER, name, trainer=options, **how)

# -- data --------------------------------------------------------------------------------------------------------------


class Mapped(Dataset):
    """The examples of a data set in another form."""

    def __init__(self, dataset: Any, form: Callable[..., Any]) -> None:
        self.dataset, self.form = dataset, form

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.form(*self.dataset[index])


DATA = "Data"


def of_dict(self, batch, batch_idx):
    return self.loss((batch["x"], batch["y"]))


add(
    DATA,
    "batches of dicts",
    net(training_step=of_dict),
    dataset=lambda dataset: Mapped(dataset, lambda x, y: {"x": x, "y": y}),
)
add(
    DATA,
    "text in batches",
    net(training_step=of_dict),
    dataset=lambda dataset: Mapped(dataset, lambda x, y: {"x": x, "y": y, "name": "a"}),
    vectorized=REFUSED,
)
add(
    DATA,
    "a collate function",
    net(training_step=of_dict),
    loading={
        "collate_fn": lambda rows: {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}
    },
)
add(DATA, "drop_last", loading={"drop_last": True})
add(DATA, "two workers", loading={"num_workers": 2})
add(DATA, "batches of one", loading={"batch_size": 1})
add(DATA, "batches larger than any client", loading={"batch_size": 64})
