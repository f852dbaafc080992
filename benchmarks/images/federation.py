"""One cell of a study: one Trainer, one federation, its scores on the test part."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import rules  # noqa: F401  (registers its rule)
import torch
from data import Digits, make_data, part_for_start
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import WandbLogger
from optimizers import make_optimizer
from settings import Settings, called, parse_call
from torch import nn
from torch.utils.data import DataLoader

import lightning_fedbayes as fb
from lightning_fedbayes.callbacks.held_out import candidate_losses
from lightning_fedbayes.callbacks.uncertainty import MEASURES
from lightning_fedbayes.data.images import ImageDataModule
from lightning_fedbayes.errors import FederationError, nearest
from lightning_fedbayes.fusion import FusionRule
from lightning_fedbayes.fusion.registry import get_rule
from lightning_fedbayes.metrics import AccuracyRetained, ReliabilityDiagram
from lightning_fedbayes.modules import lenet, mlp, resnet20
from lightning_fedbayes.partition import Partition

FRACTIONS = np.linspace(0.05, 1.0, 20)
"""Shares of retained examples at which a curve is kept."""
START_EPOCHS, PATIENCE = 100, 10
"""[FBDL] §3.6: most epochs of pre-training, and epochs without a better validation accuracy that end it."""
DECAY = 0.04

PARTITIONS = {
    "iid": fb.IIDPartition,
    "classes": fb.ClassPartition,
    "dirichlet": fb.DirichletPartition,
    "dirichlet_per_client": lambda clients, alpha: fb.DirichletPartition(clients, alpha, per="client"),
}


class Classifier(fb.HybridBayesianClassifier):
    """The package's classifier with the optimizer and the learning rates of a cell."""

    def __init__(self, network: nn.Module, settings: Settings) -> None:
        super().__init__(network, samples=settings.samples, kl_weight=settings.kl_weight)
        self.settings = settings

    def configure_optimizers(self) -> Any:
        """That of the cell; the learning rate falls by 4 % per round after ``decay_from`` rounds."""
        s, optimizer = self.settings, make_optimizer(self.settings, self)
        if s.decay_from is None:
            return optimizer
        start = s.decay_from
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda round: (1 - DECAY) ** max(0, round - start))
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class TestScores(L.Callback):
    """Scores of the test part that the module does not log: ECE with 100 bins, accuracy of the retained."""

    def __init__(self) -> None:
        self.reliability = ReliabilityDiagram(bins=100)
        self.retained = {name: AccuracyRetained() for name in MEASURES}

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        probs, target = outputs["probs"].cpu(), outputs["target"].cpu()
        mean = probs.mean(0)
        self.reliability.update(mean, target)
        for name, measure in MEASURES.items():
            self.retained[name].update(mean.argmax(-1) == target, measure(probs))

    def confidence(self) -> float:
        """Mean of the largest probability."""
        bins = self.reliability.compute()
        return float((bins.confidence.nan_to_num() * bins.counts).sum() / bins.counts.sum())

    def curves(self) -> dict[str, list[float]]:
        """Accuracy at each of :data:`FRACTIONS`, by measure of uncertainty."""
        curves = {}
        for name, metric in self.retained.items():
            curve = metric.compute()
            fraction, accuracy = (np.atleast_1d(each.numpy()) for each in (curve.fraction, curve.accuracy))
            curves[name] = _rounded(np.interp(FRACTIONS, fraction, accuracy))
        return curves


class Curve(L.Callback):
    """Keeps the validation accuracy of every round."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if "val/accuracy" in trainer.callback_metrics:
            self.values.append(float(trainer.callback_metrics["val/accuracy"]))


def make_network(settings: Settings, data: ImageDataModule | Digits) -> nn.Module:
    """The deterministic network of a cell."""
    channels, size, _ = data.shape
    if isinstance(data, Digits):
        return mlp(channels * size * size, data.num_classes, hidden=(32, 32))
    if settings.network == "resnet20":
        return resnet20(channels, data.num_classes)
    return lenet(channels, data.num_classes, size)


def make_bayesian(settings: Settings, network: nn.Module, pretrained: bool = False) -> nn.Module:
    """``network`` with the Bayesian layers or the dropout of a cell.

    Raises:
        ConversionError: more Bayesian layers than there are layers, or both Bayesian layers and dropout.
    """
    if settings.dropout > 0:
        if settings.bayesian_last != 0:
            raise FederationError(
                f"dropout={settings.dropout} and bayesian_last={settings.bayesian_last}: a network has Monte Carlo "
                "dropout or Bayesian layers; set bayesian_last to 0"
            )
        return fb.with_mc_dropout(network, settings.dropout)
    if settings.bayesian_last == 0:
        return network
    which: dict[str, Any] = {"last": settings.bayesian_last}
    if settings.bayesian_last == "all":
        which = {"types": [nn.Conv2d, nn.Linear]}
    if pretrained:
        which["init"] = "pretrained"
    elif settings.log_variance is not None:
        which["posterior_std"] = math.exp(settings.log_variance / 2)
    return fb.bayesianize(
        network, estimator=settings.estimator, prior_std=settings.prior_std, bayesian_bias=settings.bayesian_bias,  # type: ignore[arg-type]
        **which,
    )


def make_partition(settings: Settings) -> Partition:
    """The partition of a cell; FederationError for an unknown name."""
    name, positional, named = parse_call(settings.partition)
    if name not in PARTITIONS:
        raise FederationError(f"unknown partition '{name}'; {nearest(name, PARTITIONS)}")
    return called(PARTITIONS[name], settings.partition, settings.clients, *positional, **named)


def make_rule(text: str) -> str | FusionRule:
    """The fusion rule of a cell; FusionError for an unknown name."""
    if text == "auto":
        return text
    name, positional, named = parse_call(text)
    return called(type(get_rule(name)), text, *positional, **named)


def make_federation(settings: Settings) -> fb.FederatedBayes:
    """The callback of a cell."""
    return fb.FederatedBayes(
        make_partition(settings), local_epochs=settings.local_epochs, fusion=make_rule(settings.fusion),
        weighting=settings.weighting, prior=settings.prior, seed=settings.seed,  # type: ignore[arg-type]
    )


def check(settings: Settings, folder: Path | None) -> None:
    """Raise the package's own errors for a cell that cannot be trained, without training."""
    data = make_data(settings, folder)
    make_federation(settings)
    make_optimizer(settings, make_bayesian(settings, make_network(settings, data)))
    if settings.fusion == "auto" and not settings.validation_fraction:
        raise FederationError("fusion='auto' chooses on validation images: set validation_fraction, such as 0.1")


def begin(settings: Settings, data: ImageDataModule | Digits) -> tuple[nn.Module, int]:
    """The network that the federation starts from, and the epochs of pre-training at the server."""
    network = make_network(settings, data)
    if settings.start == "fresh":
        return make_bayesian(settings, network), 0
    if settings.start == "bayesian":
        network = make_bayesian(settings, network)
    train, validation = part_for_start(data, settings.start_share, settings.seed)
    stop = EarlyStopping("val/accuracy", mode="max", patience=PATIENCE)
    trainer = L.Trainer(max_epochs=START_EPOCHS, callbacks=[stop], **_quiet())
    module = Classifier(network, settings.but(decay_from=None))
    trainer.fit(module, DataLoader(train, settings.batch_size, shuffle=True), DataLoader(validation, 256))
    if settings.start == "moped":
        network = make_bayesian(settings, network, pretrained=True)
    return network, trainer.current_epoch


def run_cell(settings: Settings, folder: Path | None, logger: WandbLogger | None = None) -> dict[str, Any]:
    """Train and score one cell.

    Args:
        settings: of the cell.
        folder: with the data.
        logger: of this cell, or None.

    Returns: what is kept of it: scores of the test part, curves, time and traffic.
    """
    begun = time.perf_counter()
    data = make_data(settings, folder)
    data.setup()
    L.seed_everything(settings.seed, verbose=False)
    network, start_epochs = begin(settings, data)
    module = Classifier(network, settings)
    federation, curve, scores = make_federation(settings), Curve(), TestScores()
    trainer = L.Trainer(
        max_epochs=settings.rounds, callbacks=[federation, curve, scores],
        limit_val_batches=1.0 if settings.validation_fraction else 0, **{**_quiet(), "logger": logger or False},
    )
    trainer.fit(module, datamodule=data)
    L.seed_everything(settings.seed, verbose=False)
    tested = trainer.test(module, datamodule=data, verbose=False)[0]
    history = federation.history
    figures = {name.removeprefix("test/"): value for name, value in tested.items()}
    figures["ece100"] = float(scores.reliability.compute().ece)
    figures["overconfidence"] = scores.confidence() - figures["accuracy"]
    figures["seconds_per_round"] = statistics.fmean(each["seconds"] for each in history)
    figures["megabytes"] = statistics.fmean(each["megabytes_up"] for each in history)
    choices = [min(losses, key=lambda name: losses[name]) for losses in map(candidate_losses, history) if losses]
    return {
        "scores": {name: float(f"{value:.5g}") for name, value in figures.items()},
        "by_round": _rounded(curve.values),
        "retained": scores.curves(),
        "choices": choices,
        "failed_rounds": sum(each["failed_rounds"] > 0 for each in history),
        "engine": federation.settings()["engine"],
        "steps": trainer.global_step,
        "start_epochs": start_epochs,
        "seconds": round(time.perf_counter() - begun, 2),
    }


def _quiet() -> dict[str, Any]:
    """Options of a Trainer that only trains."""
    return {
        "accelerator": "auto", "logger": False, "num_sanity_val_steps": 0, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }


def _rounded(values: Iterable[float]) -> list[float]:
    """Five digits, which is more than they mean."""
    return [float(f"{value:.5g}") for value in values]
