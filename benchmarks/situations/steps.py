"""Losses, gradients and what a training step remembers."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from benchmarks.situations.situation import ALONE, NEVER, Group, mapped
from tests.federations import CLASSES, FEATURES, network
from tests.zoo.case import Net

asked = Group("Losses and training steps")
LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


@asked(
    "mixup by NumPy's beta distribution",
    f"{LIGHTNING}/issues/790",
    "mix pairs of examples, and both losses",
    why="draws from Python's or NumPy's generator",
    **ALONE,
)
class Mixup(Net):
    def training_step(self, batch, batch_idx):
        x, y = batch
        share, order = float(np.random.beta(0.4, 0.4)), torch.randperm(len(x))
        logits = self(share * x + (1 - share) * x[order])
        losses = [nn.functional.cross_entropy(logits, each) for each in (y, y[order])]
        return share * losses[0] + (1 - share) * losses[1]


@asked(
    "label smoothing and class weights",
    "https://github.com/pytorch/pytorch/issues/7455",
    "smooth the labels of CrossEntropyLoss, whose weights are a buffer",
)
class Smooth(Net):
    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self(x), y)


@asked(
    "two losses with learnt weights",
    "https://github.com/ifzhang/FairMOT/issues/19",
    "weigh the losses of two tasks by learnt uncertainties, outside of the network",
)
class Uncertain(Net):
    def __init__(self):
        super().__init__()
        self.recovers = nn.Linear(CLASSES, FEATURES)
        self.log_variances = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in ("label", "input")})

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        losses = {"label": nn.functional.cross_entropy(logits, y), "input": (self.recovers(logits) - x).square().mean()}
        self.log_dict(losses)
        return sum((-self.log_variances[name]).exp() * loss + self.log_variances[name] for name, loss in losses.items())


class ArcFace(nn.Module):
    """A loss with a weight per class, on angles with a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, embedded: Tensor, labels: Tensor) -> Tensor:
        cosine = nn.functional.linear(nn.functional.normalize(embedded), nn.functional.normalize(self.weight))
        angles = cosine.clamp(-0.999, 0.999).acos()
        margin = torch.zeros_like(angles).scatter_(1, labels[:, None], 0.3)
        return nn.functional.cross_entropy(4 * (angles + margin).cos(), labels)


@asked(
    "ArcFace: a loss with weights and a learning rate of its own",
    "https://github.com/KevinMusgrave/pytorch-metric-learning/issues/534",
    "give the optimizer the parameters of the loss in a group of their own",
)
class Margin(Net):
    def __init__(self):
        super().__init__()
        self.criterion = ArcFace()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self(x), y)

    def configure_optimizers(self):
        groups = [{"params": self.net.parameters()}, {"params": self.criterion.parameters(), "lr": 0.5}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@asked(
    "SimCLR: two views, a mask that is no buffer",
    "https://github.com/Spijkervet/SimCLR/issues/5",
    "contrast each example with all others of the batch",
    dataset=mapped(lambda x, y: ([x, x.flip(0)], y)),
    loading={"drop_last": True},
)
class Contrastive(Net):
    def __init__(self):
        super().__init__()
        self.mask = torch.eye(8, dtype=torch.bool)

    def training_step(self, batch, batch_idx):
        (one, other), _ = batch
        z = nn.functional.normalize(self(torch.cat([one, other])))
        similar = (z @ z.T / 0.5).masked_fill(self.mask, -1e9)
        return nn.functional.cross_entropy(similar, torch.arange(8).roll(4))


@asked(
    "a VAE whose KL term grows with the epoch",
    "https://github.com/clementchadebec/benchmark_VAE/issues/41",
    "anneal the weight of the divergence by current_epoch, and sample the code",
    noisy=True,
)
class Annealed(Net):
    def __init__(self):
        super().__init__(nn.Linear(FEATURES, 4))
        self.decoder = nn.Linear(2, FEATURES)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        mean, log_variance = self(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return (self.decoder(code) - x).square().mean() + min(1.0, 0.5 * self.current_epoch) * divergence


@asked(
    "truncated backpropagation inside of a step",
    f"{LIGHTNING}/issues/17848",
    "go through a sequence in chunks, and detach the hidden state between them",
)
class Truncated(Net):
    def __init__(self):
        super().__init__(nn.GRU(1, 4, batch_first=True))
        self.head = nn.Linear(4, CLASSES)

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden, loss = torch.zeros(1, len(x), 4), torch.zeros(())
        for chunk in x[..., None].split(3, dim=1):
            found, hidden = self.net(chunk, hidden)
            hidden = hidden.detach()
            loss = loss + nn.functional.cross_entropy(self.head(found[:, -1]), y)
        return loss


@asked(
    "a momentum encoder and a queue of keys",
    "https://github.com/facebookresearch/moco/issues/70",
    "MoCo: the frozen encoder follows the trained one, keys wait in a buffer",
    loading={"drop_last": True},
    why="was frozen when the round began",
    **NEVER,
)
class Moco(Net):
    queue: Tensor
    place: Tensor

    def __init__(self):
        super().__init__()
        self.keys = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(8, CLASSES)))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        query = nn.functional.normalize(self(x))
        with torch.no_grad():
            for key, value in zip(self.keys.parameters(), self.net.parameters()):
                key.data = 0.9 * key.data + 0.1 * value.data
            keys = nn.functional.normalize(self.keys(x))
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ self.queue.clone().T], 1)
        start = int(self.place)
        self.queue[start : start + 4] = keys
        self.place[0] = (start + 4) % 8
        return nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class Codebook(nn.Module):
    """Vector quantization; codes are moving averages in buffers."""

    sizes: Tensor
    sums: Tensor
    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.ones(4))
        self.register_buffer("sums", torch.randn(4, CLASSES))
        self.register_buffer("codes", self.sums.clone())

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        chosen = nn.functional.one_hot(nearest, 4).to(z.dtype)
        quantized = chosen @ self.codes
        if self.training:
            with torch.no_grad():
                self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.T @ z, alpha=0.1)
                self.codes.copy_(self.sums / self.sizes[:, None])
        return z + (quantized - z).detach(), (quantized.detach() - z).square().mean()


@asked(
    "VQ-VAE with codes in buffers",
    "https://github.com/zalandoresearch/pytorch-vq-vae/issues/5",
    "move the codes by averages, not by gradients",
)
class Quantized(Net):
    def __init__(self):
        super().__init__()
        self.codebook, self.decoder = Codebook(), nn.Linear(CLASSES, FEATURES)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        code, commitment = self.codebook(self(x))
        return (self.decoder(code) - x).square().mean() + 0.25 * commitment


@asked(
    "distillation from a frozen teacher in eval()",
    f"{LIGHTNING}/issues/17592",
    "keep the teacher in the module, with dropout and BatchNorm",
)
class Student(Net):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(network(7, batch_norm=True), nn.Dropout(0.5)).eval().requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        with torch.no_grad():
            wanted = self.teacher(x).softmax(-1)
        soft = nn.functional.kl_div((logits / 2).log_softmax(-1), wanted, reduction="batchmean")
        return nn.functional.cross_entropy(logits, y) + soft

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Reversal(torch.autograd.Function):
    """Passes values on, and gradients with the opposite sign."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *gradients):
        return -gradients[0]


@asked(
    "a gradient reversal layer",
    "https://github.com/pytorch/pytorch/issues/1110",
    "domain adaptation by an autograd.Function",
    why="it must override the setup_context staticmethod",
    **ALONE,
)
class Adapted(Net):
    def __init__(self):
        super().__init__()
        self.domain = nn.Linear(CLASSES, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        features = self(x)
        domain = nn.functional.cross_entropy(self.domain(Reversal.apply(features)), (x[:, 0] > 0).long())
        return nn.functional.cross_entropy(features, y) + domain


@asked(
    "on_after_backward clears gradients that are not finite",
    f"{LIGHTNING}/issues/4956",
    "go on after a bad example",
    dataset=mapped(lambda x, y: (torch.where(x[0] > 2.8, x / 0.0, x), y)),
    why="has a hook on_after_backward",
    **ALONE,
)
class Cleared(Net):
    def on_after_backward(self):
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            self.zero_grad()


class Inner(L.LightningModule):
    """Logs in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        found = self.net(x)
        self.log("largest", found.max())
        return found


@asked(
    "a LightningModule inside of a network",
    f"{LIGHTNING}/issues/20053",
    "build networks of LightningModules, which log, too",
    why="training_step reads trainer._results",
    **ALONE,
)
def nested():
    return Net(nn.Sequential(Inner(), nn.Tanh(), nn.Linear(CLASSES, CLASSES)))


@asked(
    "a MetricCollection that the module computes and resets at the end of an epoch",
    f"{LIGHTNING}/issues/4396",
    "update metrics in steps, log them once",
)
class Collected(Net):
    def __init__(self):
        super().__init__()
        metrics = [MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)]
        self.metrics = MetricCollection(metrics, prefix="train/")

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.metrics.update(logits, y)
        return nn.functional.cross_entropy(logits, y)

    def on_train_epoch_end(self):
        self.log_dict(self.metrics.compute())
        self.metrics.reset()


@asked(
    "a GAN: two optimizers that the step toggles",
    f"{LIGHTNING}/issues/17801",
    "train a generator and a discriminator by manual optimization",
    why="automatic_optimization is False",
    **NEVER,
)
class Gan(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.discriminator = nn.Linear(CLASSES, 1)

    def training_step(self, batch, batch_idx):
        optimizers: Any = self.optimizers()
        for optimizer, sign in zip(optimizers, (1, -1)):
            self.toggle_optimizer(optimizer)
            loss = sign * self.discriminator(self(batch[0])).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(each.parameters(), lr=0.01) for each in (self.net, self.discriminator)]
