"""Layers, parametrizations, modules that come late, compiled modules, and weights that follow others."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BatchSizeFinder, EMAWeightAveraging
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import DataLoader

from benchmarks.situations.situation import ALONE, NEVER, Group
from tests.federations import CLASSES, FEATURES, network
from tests.zoo.case import Net

asked = Group("Networks and callbacks")
LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


@asked(
    "a BatchNorm that stays in eval() by train()",
    "https://github.com/jfzhang95/pytorch-deeplab-xception/issues/140",
    "override train(), so that statistics of a backbone do not move",
    loading={"drop_last": True},
)
class StillNorm(Net):
    net: Any

    def __init__(self):
        super().__init__(network(batch_norm=True))

    def train(self, mode=True):
        super().train(mode)
        self.net[1].eval()
        return self


@asked(
    "an orthogonal weight by a parametrization",
    "https://github.com/lezcano/geotorch/issues/26",
    "constrain a weight, and train with any optimizer",
)
def orthogonal():
    return Net(nn.Sequential(parametrizations.orthogonal(nn.Linear(FEATURES, 5)), nn.ReLU(), nn.Linear(5, CLASSES)))


@asked(
    "a pruned network with masks",
    "https://github.com/huggingface/transformers/issues/29227",
    "go on training a network whose weights torch.nn.utils.prune has masked",
    why="training_step changes self.net.0.weight",
    **ALONE,
)
def pruned():
    net = network()
    prune.random_unstructured(net[0], "weight", 0.5)
    prune.l1_unstructured(net[2], "weight", 0.3)
    return Net(net)


@asked(
    "a parameter that is replaced in the step",
    "https://github.com/VainF/Torch-Pruning/issues/409",
    "cut or reset weights while the network trains",
    why="training replaces the parameter net.0.weight",
    **NEVER,
)
class Replaced(Net):
    net: Any

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.net[0].weight = nn.Parameter(0.5 * self.net[0].weight.detach())
        return self.loss(batch)


@asked(
    "activations that a hook keeps for the loss",
    "https://github.com/ultralytics/ultralytics/pull/24894",
    "compare features of layers, caught by forward hooks in a dict",
    why="training_step changes self.features",
    **ALONE,
)
class Watched(Net):
    net: Any

    def __init__(self):
        super().__init__()
        self.features = {}
        self.net[0].register_forward_hook(lambda layer, inputs, output: self.features.update(first=output))

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + 0.1 * self.features["first"].square().mean()


@asked(
    "LazyLinear, made real in setup",
    f"{LIGHTNING}/issues/13764",
    "leave the number of inputs to the first batch",
)
class Lazy(Net):
    net: Any

    def __init__(self):
        super().__init__(nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(CLASSES)))

    def setup(self, stage):
        if isinstance(self.net[0], nn.LazyLinear):
            torch.manual_seed(0)
            self.net(torch.zeros(1, FEATURES))


@asked(
    "layers that configure_model makes",
    f"{LIGHTNING}/issues/5410",
    "build the network after construction",
)
class Late(Net):
    def __init__(self):
        super().__init__(nn.Identity())

    def configure_model(self):
        if isinstance(self.net, nn.Identity):
            self.net = network()


@asked(
    "a compiled network",
    f"{LIGHTNING}/issues/17283",
    "call torch.compile on the network inside of the module",
)
def compiled_inside():
    return Net(torch.compile(network(), backend="eager"))  # pyright: ignore[reportArgumentType]


@asked(
    "a compiled LightningModule",
    f"{LIGHTNING}/issues/16432",
    "give the Trainer torch.compile(module)",
)
def compiled():
    return torch.compile(Net(), backend="eager")


@asked(
    "BackboneFinetuning",
    f"{LIGHTNING}/issues/19711",
    "train the head first, and the backbone later at a lower rate",
    callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)],
)
class Tuned(Net):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        return self.net(self.backbone(x))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@asked(
    "a moving average of the weights inside of the module",
    f"{LIGHTNING}/issues/10914",
    "update a copy of the network in on_train_batch_end, and validate with it",
    why="was frozen when the round began",
    **NEVER,
)
class Averaged(Net):
    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for mean, value in zip(self.average.parameters(), self.net.parameters()):
                mean.mul_(0.9).add_(value, alpha=0.1)


@asked(
    "EMAWeightAveraging",
    f"{LIGHTNING}/issues/21724",
    "validate with Lightning's moving average of the weights",
    callbacks=lambda: [EMAWeightAveraging(decay=0.9)],
    why="averages the weights",
    **NEVER,
)
class Plain(Net):
    pass


class Sized(L.LightningDataModule):
    """Holds the size of batches, which the finder sets."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__()
        self.loader, self.batch_size = loader, 2

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.loader.dataset, self.batch_size)


asked(
    "BatchSizeFinder",
    f"{LIGHTNING}/issues/18394",
    "let Lightning find the largest batch that fits",
    given=Sized,
    callbacks=lambda: [BatchSizeFinder("power", max_trials=1)],
    why="tune on one client's data",
    **NEVER,
)(Plain)
