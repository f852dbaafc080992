"""All cases of the zoo."""

import random
from collections.abc import Callable
from functools import partial
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

import lightning_fedbayes as fb
from benchmarks.situations.situation import ALONE, NEVER, Mapped
from tests.federations import CLASSES, FEATURES, network, of_bayesian_torch
from tests.zoo import optimizers as own
from tests.zoo.case import EQUAL, REFUSED, Case, Net, callback, net

CASES: list[Case] = []
HOOKS = "Hooks of the module"


def add(group: str, name: str, make: Callable[[], L.LightningModule] = Net, **options: Any) -> None:
    CASES.append(Case(group, name, make, **options))


def case(group: str, name: str, **options: Any) -> Callable[[Any], Any]:
    """Decorate what makes the module of a case."""

    def keep(make: Any) -> Any:
        add(group, name, make, **options)
        return make

    return keep


def hook(name: str, method: str = "", **options: Any) -> Callable[[Any], Any]:
    """Decorate a method of the module of a case, by default the one that its name begins with."""

    def keep(function: Any) -> Any:
        add(HOOKS, name, net(**{method or name.split()[0]: function}), **options)
        return function

    return keep


TORCH = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD with Nesterov momentum and weight decay": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD that maximizes": lambda p: optim.SGD(p, lr=0.01, maximize=True),
    "SGD, foreach": lambda p: optim.SGD(p, lr=0.1, foreach=True),
    **{
        name: lambda p, name=name: getattr(optim, name)(p, lr=0.01)
        for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Rprop")
    },
    "Adam, fused": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "Adam, learning rate in a tensor": lambda p: optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "AMSGrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "Adadelta": lambda p: optim.Adadelta(p),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1),
}
for name, optimizer in TORCH.items():
    add("Optimizers of torch", name, lambda optimizer=optimizer: Net(optimizer=optimizer), tolerance=1e-4)
for name, optimizer, options in [
    ("Adafactor", lambda p: optim.Adafactor(p, lr=0.01), ALONE),
    ("LBFGS", lambda p: optim.LBFGS(p, lr=0.1, max_iter=3), ALONE),
    (
        "groups with learning rates of their own",
        lambda p: optim.SGD([{"params": [each], "lr": 0.1 / (i + 1)} for i, each in enumerate(p)]),
        {},
    ),
    ("only some of the parameters", lambda p: optim.SGD(list(p)[:2], lr=0.1), {}),
]:
    add("Optimizers of torch", name, lambda optimizer=optimizer: Net(optimizer=optimizer), **options)


@case("Optimizers of torch", "a hook after the step", **ALONE)
def step_hook():
    def made(parameters):
        found = optim.SGD(parameters, lr=0.1)
        found.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0]["params"][0].data.mul_(0.99))
        return found

    return Net(optimizer=made)


add("Optimizers of torch", "none", net(configure_optimizers=lambda self: None), **ALONE)

for name, made, options in [
    ("SAM, which needs a closure", own.Sam, ALONE),
    ("LBFGS behind *args", lambda p: own.StarLbfgs(p, lr=0.1, max_iter=3), {**ALONE, "keeps": False}),
    ("plain descent of a package", own.Descent, {}),
    ("Lion without momentum", lambda p: own.Sign(p, lr=0.01), {}),
    ("a learning rate that the optimizer decays", own.Decays, ALONE),
    ("a count in an attribute", own.CountsItself, ALONE),
    ("noise from a generator of its own", own.Noise, {**ALONE, "keeps": False}),
    (
        "Lookahead: slow weights from the construction",
        lambda p: own.Lookahead(optim.SGD(p, lr=0.1)),
        {**ALONE, "keeps": False},
    ),
    ("schedule-free", own.ScheduleFree, ALONE),
    ("norms of whole tensors", own.NormGrowth, ALONE),
    ("a wrapper of SGD with momentum", own.Wrapper, {**ALONE, "keeps": False}),
]:
    add("Other optimizers", name, lambda made=made: Net(optimizer=made), **options)


def scheduled(make: Callable[[Any], Any], methods: Any = (), **config: Any) -> Callable[[], Net]:
    def configure_optimizers(self):
        optimizer = optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **config}}

    return net(configure_optimizers=configure_optimizers, **dict(methods))


def halved(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, 0.5)


def warmed(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 1), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [1])


OF_STEPS = {"interval": "step"}
OWN_HOOK = {"methods": {"lr_scheduler_step": lambda self, scheduler, metric: scheduler.step()}}
for name, make, config in [
    ("StepLR", halved, {}),
    ("cosine", lambda o: lr_scheduler.CosineAnnealingLR(o, 4), {}),
    ("LambdaLR", lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)), {}),
    ("a warm-up and then a decay", warmed, {}),
    ("once in two epochs", halved, {"frequency": 2}),
    ("StepLR in every step", lambda o: lr_scheduler.StepLR(o, 1, 0.9), OF_STEPS),
    ("OneCycleLR in every step", lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=100), OF_STEPS),
    ("a warm-up in every step", lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 9)), OF_STEPS),
    ("in every second step", halved, {**OF_STEPS, "frequency": 2}),
    ("of the module's own hook lr_scheduler_step", halved, OWN_HOOK),
]:
    how = REFUSED if name == "in every second step" else EQUAL
    add("Schedules", name, scheduled(make, **config), rounds=3, vectorized=how)


STEP = "The training step"


def step(name: str, function: Any = None, vectorized: str = REFUSED, **options: Any) -> Any:
    """Add a module with this ``training_step``; without one, decorate it."""
    if function is None:
        return partial(step, name, vectorized=vectorized, **options)
    add(STEP, name, net(training_step=function), vectorized=vectorized, **options)
    return function


step("returns a dict", lambda self, batch, batch_idx: {"loss": self.loss(batch), "x": batch[0]}, vectorized=EQUAL)
step("takes no batch_idx", lambda self, batch: self.loss(batch), vectorized=EQUAL)
step("returns None at every second batch", vectorized=EQUAL)(
    lambda self, batch, batch_idx: None if batch_idx % 2 else self.loss(batch)
)
step("returns None always", lambda self, batch, batch_idx: None, vectorized=EQUAL)
step("batch_idx in the loss", lambda self, batch, batch_idx: self.loss(batch) / (1 + batch_idx), vectorized=EQUAL)
step(
    "is_last_batch in the loss",
    lambda self, batch, batch_idx: self.loss(batch) * (2 if self.trainer.is_last_batch else 1),
)
step("global_step in the loss", lambda self, batch, batch_idx: self.loss(batch) / (1 + self.global_step), rounds=1)
step("current_epoch in the loss", vectorized=EQUAL)(
    lambda self, batch, batch_idx: self.loss(batch) / (1 + self.current_epoch)
)


@step("the learning rate in the loss", vectorized=EQUAL)
def rate_in_loss(self, batch, batch_idx):
    return self.loss(batch) * (1 + self.optimizers().param_groups[0]["lr"])


@step("lowers the learning rate")
def lowers_rate(self, batch, batch_idx):
    for group in self.optimizers().param_groups:
        group["lr"] *= 0.9
    return self.loss(batch)


@step("torch.manual_seed")
def reseeds(self, batch, batch_idx):
    torch.manual_seed(batch_idx)
    return self.loss((batch[0] + 0.1 * torch.randn(batch[0].shape), batch[1]))


@case(STEP, "a generator of the module", **ALONE)
class OwnGenerator(Net):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch, batch_idx):
        return self.loss((batch[0] + 0.1 * torch.randn(batch[0].shape, generator=self.generator), batch[1]))


step("NumPy's global generator", lambda self, batch, batch_idx: self.loss(batch) * np.random.rand())
step("Python's global generator", lambda self, batch, batch_idx: self.loss(batch) * random.random())
step("torch's global generator", vectorized=EQUAL, noisy=True)(
    lambda self, batch, batch_idx: self.loss((batch[0] + 0.1 * torch.randn(batch[0].shape), batch[1]))
)


@case(STEP, "a count in an attribute", **ALONE)
class Counter(Net):
    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self.loss(batch) / self.steps


@case(STEP, "a count in a closure, from 0 in every epoch", **ALONE)
def counts_in_closure():
    steps = [0]

    def training_step(self, batch, batch_idx):
        steps[0] += 1
        if batch_idx == 0:
            steps[0] = 1
        return self.loss(batch) / steps[0]

    return net(training_step=training_step)()


@case(STEP, "a hidden state that is replaced", **ALONE)
class Hidden(Net):
    def __init__(self):
        super().__init__()
        self.hidden = torch.zeros(FEATURES)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.hidden = 0.5 * self.hidden + 0.5 * x.mean(0).detach()
        return self.loss((x + self.hidden, y))


@case(STEP, "a list of outputs, cleared in every epoch", **ALONE)
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


@case(STEP, "a running mean in a buffer")
class Statistics(Net):
    persistent = True

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES), persistent=self.persistent)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.loss((x - self.mean, y))


@case(STEP, "a running mean in a buffer that is replaced")
class Replaced(Statistics):
    def training_step(self, batch, batch_idx):
        x, y = batch
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.loss((x - self.mean, y))


@case(STEP, "a running mean in a buffer that is not persistent")
class Transient(Statistics):
    persistent = False


@step("replaces a parameter", sequential=REFUSED)
def replaces(self, batch, batch_idx):
    if batch_idx == 1:  # a trial step does not see it
        self.net[0].weight = nn.Parameter(0.5 * self.net[0].weight.detach())
    return self.loss(batch)


@step("writes into the weights", vectorized=EQUAL)
def shrinks(self, batch, batch_idx):
    with torch.no_grad():
        self.net[0].weight.mul_(0.9)
    return self.loss(batch)


@step("freezes a layer at a step")
def freezes_later(self, batch, batch_idx):
    self.net[0].requires_grad_(batch_idx < 1)
    return self.loss(batch)


def evaluates(first):
    def training_step(self, batch, batch_idx):
        if batch_idx >= first:
            self.net[1].eval()
        return self.loss(batch)

    return lambda: net(training_step=training_step)().__class__(network(batch_norm=True))


ENDS = {"loading": {"drop_last": True}}
add(STEP, "eval() of a BatchNorm at a step", evaluates(1), **ALONE, **ENDS)
add(STEP, "eval() of a BatchNorm at every step", evaluates(0), **ENDS)
step("control flow on data", vectorized=EQUAL)(
    lambda self, batch, batch_idx: self.loss(batch) * (2 if batch[0].mean() > 0 else 1)
)
step(".item()", lambda self, batch, batch_idx: self.loss(batch) * (1 + batch[0].abs().max().item()))
step("torch.where on data", vectorized=EQUAL)(
    lambda self, batch, batch_idx: self.loss(batch) * torch.where(batch[0].mean() > 0, 2.0, 1.0)
)


@case(STEP, "a torchmetric")
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


@case(STEP, "a torchmetric's value in the loss", **ALONE)
class Weighted(Metrics):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + self.accuracy(self(batch[0]), batch[1]))


@step("logs", vectorized=EQUAL)
def logs(self, batch, batch_idx):
    loss = self.loss(batch)
    self.log("loss", loss)
    self.log_dict({"a": loss, "b": 1.0}, on_step=False, on_epoch=True)
    return loss


@step("a penalty on the parameters", vectorized=EQUAL)
def penalized(self, batch, batch_idx):
    return self.loss(batch) + 0.01 * sum(p.square().sum() for p in self.parameters())


@step("a gradient of its own")
def gradient_penalty(self, batch, batch_idx):
    x = batch[0].clone().requires_grad_()
    loss = self.loss((x, batch[1]))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


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
    def __init__(self, sparse=False):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4, sparse=sparse), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.table(x.abs().long() % 5).mean(1))


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


def of(name: str, make: Callable[[], nn.Module], **options: Any) -> None:
    add("Networks", name, lambda: Net(make()), **options)


of("linear", lambda: nn.Linear(FEATURES, CLASSES))
of(
    "three layers with in-place ReLU",
    lambda: nn.Sequential(
        nn.Linear(FEATURES, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ELU(), nn.Linear(8, CLASSES)
    ),
)
of("BatchNorm", lambda: network(batch_norm=True), loading={"drop_last": True})
of(
    "BatchNorm without statistics",
    lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, CLASSES)),
    loading={"drop_last": True},
)
of("LayerNorm", lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES)))
of(
    "convolution and pooling",
    lambda: image(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.AvgPool2d((1, 2)), nn.Flatten(), nn.Linear(4, CLASSES)),
)
of("dropout", lambda: nn.Sequential(nn.Dropout(0.3), network()), noisy=True)
of("tied weights", Tied)
of("embedding", Tokens)
of("embedding with sparse gradients", lambda: Tokens(sparse=True), **ALONE)
of(
    "transformer layer without dropout",
    lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)),
        nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    ),
)
of("BERT: embeddings, and an encoder with a mask", Bert)
of("LSTM", lambda: sequence(lambda: nn.LSTM(2, 4, batch_first=True)), **ALONE)
of("GRU", lambda: sequence(lambda: nn.GRU(2, 4, batch_first=True)))
of("GRU, two layers, both directions", lambda: sequence(lambda: nn.GRU(2, 2, 2, bidirectional=True, batch_first=True)))
of("GRU on a packed sequence", Packed, **ALONE)
of("RNN", lambda: sequence(lambda: nn.RNN(2, 4, batch_first=True)))
of(
    "spectral norm",
    lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(FEATURES, 5)), nn.Linear(5, CLASSES)),
    **ALONE,
)
of("weight norm", lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(FEATURES, 5)), nn.Linear(5, CLASSES)))
of("activation checkpointing", Checkpointed, **ALONE)
of("a count inside a layer", Normalizer, **ALONE)
of("double precision", lambda: nn.Sequential(fb_cast(torch.float64), nn.Linear(FEATURES, CLASSES, dtype=torch.float64)))
of(
    "bfloat16",
    lambda: nn.Sequential(fb_cast(torch.bfloat16), nn.Linear(FEATURES, CLASSES, dtype=torch.bfloat16)),
    tolerance=0.02,
)
of(
    "complex parameters",
    lambda: nn.Sequential(fb_cast(torch.complex64), nn.Linear(FEATURES, CLASSES, dtype=torch.complex64), Modulus()),
    **NEVER,
)
of("our Bayesian layers", lambda: fb.bayesianize(network(), last=1), noisy=True)
of("bayesian-torch's dnn_to_bnn", lambda: of_bayesian_torch(network()), noisy=True)
of("our Flipout layers", lambda: fb.bayesianize(network(), last=2, estimator="flipout"), noisy=True)


@case("Networks", "a frozen layer")
def frozen():
    made = network()
    made[0].requires_grad_(False)
    return Net(made)


def scale(module: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor)


def clamp(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.2, 0.2)


add(HOOKS, "on_fit_start changes the weights", net(on_fit_start=lambda self: scale(self, 0.5)), rounds=1)
add(HOOKS, "on_train_start changes the weights", net(on_train_start=lambda self: scale(self, 0.5)), rounds=1)
add(HOOKS, "on_train_epoch_start changes the weights", net(on_train_epoch_start=lambda self: scale(self, 0.9)))
add(HOOKS, "on_train_epoch_end changes the weights", net(on_train_epoch_end=lambda self: scale(self, 0.9)))
hook("on_validation_epoch_end changes the weights", validates=True)(lambda self: scale(self, 0.9))


@hook("on_train_epoch_start sets the learning rate", rounds=3)
def on_train_epoch_start(self):
    for group in self.optimizers().param_groups:
        group["lr"] = 0.1 / (1 + self.current_epoch)


@hook("on_train_epoch_start unfreezes a layer", rounds=3)
def unfreezes(self):
    self.net[0].requires_grad_(self.current_epoch > 0)


add(
    HOOKS,
    "on_train_epoch_start sets an attribute",
    net(
        on_train_epoch_start=lambda self: setattr(self, "beta", 1 / (1 + self.current_epoch)),
        training_step=lambda self, batch, batch_idx: self.beta * self.loss(batch),
    ),
    rounds=3,
    **ALONE,
)


@case(HOOKS, "on_train_batch_start resets a state at batch 0", **ALONE)
class Resets(Hidden):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 0:
            self.hidden = torch.zeros(FEATURES)


hook("on_train_batch_start returns -1 at batch 1", **ALONE)(
    lambda self, batch, batch_idx: -1 if batch_idx == 1 else None
)
hook("on_train_batch_start returns -1 at once", **ALONE)(lambda self, batch, batch_idx: -1)
hook("on_train_batch_end clamps the weights", **ALONE)(lambda self, outputs, batch, batch_idx: clamp(self))


@hook("on_before_optimizer_step changes gradients", **ALONE)
def halves_gradients(self, *_):
    for parameter in self.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


@hook("optimizer_step warms the learning rate up", **ALONE)
def warm_up(self, epoch, batch_idx, optimizer, closure):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * min(1.0, (1 + batch_idx) / 3)
    optimizer.step(closure=closure)


@hook("optimizer_step steps at every second batch", **ALONE)
def every_second(self, epoch, batch_idx, optimizer, closure):
    if batch_idx % 2 == 0:
        optimizer.step(closure=closure)
    else:
        closure()


hook("optimizer_zero_grad keeps the gradients at odd batches", **ALONE)(
    lambda self, epoch, batch_idx, optimizer: None if batch_idx % 2 else optimizer.zero_grad()
)
hook("configure_gradient_clipping", **ALONE)(
    lambda self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None: nn.utils.clip_grad_norm_(
        self.parameters(), 0.1
    )
)
add(HOOKS, "backward", net(backward=lambda self, loss: (2 * loss).backward()), **ALONE)
hook("on_after_batch_transfer changes the batch", **ALONE)(lambda self, batch, dataloader_idx: (2 * batch[0], batch[1]))


@hook("a hook on a parameter's gradient", "on_fit_start", **ALONE)
def gradient_hook(self):
    self.net[0].weight.register_hook(lambda gradient: 0.5 * gradient)


@case(HOOKS, "a forward hook on a layer")
def forward_hook():
    made = Net()
    made.net[0].register_forward_hook(lambda layer, inputs, output: 2 * output)
    return made


@case(HOOKS, "a backward hook on a layer", **ALONE)
def backward_hook():
    made = Net()
    made.net[0].register_full_backward_hook(
        lambda layer, inputs, outputs: tuple(None if each is None else 0.5 * each for each in inputs)
    )
    return made


add(HOOKS, "manual optimization", net(automatic_optimization=False), **NEVER)
hook("training_step(dataloader_iter)", "training_step", **NEVER)(lambda self, dataloader_iter: None)

CALLBACKS = "Callbacks"


def reacts(name: str, **options: Any) -> Callable[[Any], None]:
    """Decorate the method of a callback that the name begins with."""
    return lambda function: add(CALLBACKS, name, callbacks=callback(**{name.split()[0]: function}), **options)


reacts("on_train_start changes the weights", rounds=1)(lambda self, trainer, module: scale(module, 0.5))
reacts("on_train_epoch_start changes the weights")(lambda self, trainer, module: scale(module, 0.9))
reacts("on_validation_epoch_end changes the weights", validates=True)(lambda self, trainer, module: scale(module, 0.9))
reacts("on_train_batch_start changes the weights", **ALONE)(lambda self, trainer, module, *_: scale(module, 0.9))
reacts("on_train_batch_start changes the batch in place", **ALONE)(
    lambda self, trainer, module, batch, batch_idx: batch[0].mul_(2)
)
reacts("on_train_batch_start sets the learning rate by batch_idx", **ALONE)(
    lambda self, trainer, module, batch, batch_idx: (
        trainer.optimizers[0].param_groups[0].update(lr=0.1 / (1 + batch_idx))
    )
)
reacts("on_train_batch_end clamps the weights", **ALONE)(lambda self, trainer, module, *_: clamp(module))


def fades(trainer: Any, module: nn.Module) -> None:
    scale(module, 0.9)


def clamps(trainer: Any, module: nn.Module, *_: Any) -> None:
    clamp(module)


class Ema(L.Callback):
    """Follows the weights, and never gives them back."""

    def __init__(self):
        self.shadow = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, p in pl_module.named_parameters():
            self.shadow[name] = 0.9 * self.shadow.get(name, p.detach()) + 0.1 * p.detach()


for name, make, options in [
    ("a moving average of the weights beside the module", Ema, ALONE),
    ("EarlyStopping", lambda: EarlyStopping("val/loss"), {"validates": True}),
    ("Timer", lambda: Timer("00:01:00:00"), {}),
    ("LambdaCallback with a hook of the epoch", lambda: LambdaCallback(on_train_epoch_start=fades), {}),
    ("LambdaCallback with a hook of the batch", lambda: LambdaCallback(on_train_batch_end=clamps), ALONE),
    ("StochasticWeightAveraging", lambda: StochasticWeightAveraging(0.1), NEVER),
    ("ModelPruning", lambda: ModelPruning("l1_unstructured", amount=0.5), NEVER),
    ("GradientAccumulationScheduler", lambda: GradientAccumulationScheduler({0: 2}), NEVER),
]:
    add(CALLBACKS, name, callbacks=lambda make=make: [make()], **options)

TRAINER = "Options of the Trainer"
for name, options, how in [
    ("gradient_clip_val", {"gradient_clip_val": 0.1}, {}),
    ("precision='64-true'", {"precision": "64-true"}, {}),
    ("precision='bf16-mixed'", {"precision": "bf16-mixed"}, {"tolerance": 0.02}),
    ("precision='bf16-true'", {"precision": "bf16-true"}, {"tolerance": 0.05}),
    ("accumulate_grad_batches=2", {"accumulate_grad_batches": 2}, ALONE),
    ("limit_train_batches=2", {"limit_train_batches": 2}, {}),
    ("detect_anomaly", {"detect_anomaly": True}, ALONE),
    ("profiler='simple'", {"profiler": "simple"}, ALONE),
    ("deterministic", {"deterministic": True}, {}),
    ("reload_dataloaders_every_n_epochs", {"reload_dataloaders_every_n_epochs": 1}, {}),
    ("inference_mode=False", {"inference_mode": False}, {"validates": True}),
    ("check_val_every_n_epoch=2", {"check_val_every_n_epoch": 2}, {"validates": True, "rounds": 3}),
    ("limit_val_batches=1", {"limit_val_batches": 1}, {"validates": True}),
    ("overfit_batches", {"overfit_batches": 2}, NEVER),
    ("max_steps", {"max_steps": 7}, NEVER),
    ("val_check_interval", {"val_check_interval": 0.5}, {**NEVER, "validates": True}),
]:
    add(TRAINER, name, trainer=options, **how)


class Centred(Mapped):
    """Reads a batch as a whole, and centres it."""

    def __getitems__(self, indices: list[int]) -> Any:
        x, y = zip(*(self.dataset[index] for index in indices))
        return list(zip(torch.stack(x) - torch.stack(x).mean(0), y))


DATA = "Data"


def as_dict(**more: Any) -> Callable[[Any], Mapped]:
    return lambda dataset: Mapped(dataset, lambda x, y: {"x": x, "y": y, **more})


def collated(rows: Any) -> dict[str, Any]:
    return {name: torch.stack(values) for name, values in zip("xy", zip(*rows))}


OF_DICT = net(training_step=lambda self, batch, batch_idx: self.loss((batch["x"], batch["y"])))
add(DATA, "batches of dicts", OF_DICT, dataset=as_dict())
add(DATA, "text in batches", OF_DICT, dataset=as_dict(name="a"), **ALONE)
add(DATA, "a collate function", OF_DICT, loading={"collate_fn": collated})
add(DATA, "a data set that reads whole batches", dataset=lambda dataset: Centred(dataset, tuple))
add(DATA, "drop_last", loading={"drop_last": True})
add(DATA, "two workers", loading={"num_workers": 2})
add(DATA, "batches of one", loading={"batch_size": 1})
add(DATA, "batches larger than any client", loading={"batch_size": 64})
