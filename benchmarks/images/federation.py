"""One cell of a study: a federation in one Trainer, and its scores on the test part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import WandbLogger
from torch import nn
from torch.utils.data import DataLoader

import lightning_fedbayes as fb
from benchmarks.images.cell import make_bayesian, make_federation, make_network, make_optimizer
from benchmarks.images.data import Digits, make_data, part_for_start
from benchmarks.images.settings import Settings
from benchmarks.readers import ImageDataModule
from lightning_fedbayes.callbacks.report import candidate_losses
from lightning_fedbayes.callbacks.uncertainty import MEASURES
from lightning_fedbayes.metrics import AccuracyRetained, CalibrationDiagram

FRACTIONS = np.linspace(0.05, 1.0, 20)
"""Shares of retained examples at which the accuracy is kept."""
START_EPOCHS, PATIENCE = 100, 10
"""[FBDL] §3.6: maximum of epochs of pre-training, and epochs without a better validation accuracy that end it."""
DECAY = 0.04
"""Relative decrease of the learning rate per round, see ``decay_from``."""


class Classifier(fb.HybridBayesianClassifier):
    """The package's classifier with the optimizer and the learning rates of a cell."""

    def __init__(self, network: nn.Module, settings: Settings) -> None:
        super().__init__(network, bayesian_last=0, samples=settings.samples, kl_weight=settings.kl_weight)
        self.settings = settings

    def configure_optimizers(self) -> Any:
        """Return the optimizer of the cell; its learning rate falls by 4 % per round after ``decay_from`` rounds."""
        s, optimizer = self.settings, make_optimizer(self.settings, self)
        if s.decay_from is None:
            return optimizer
        start = s.decay_from
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda round: (1 - DECAY) ** max(0, round - start))
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class TestScores(L.Callback):
    """Scores of the test part that the module does not log: ECE with 100 bins, accuracy of the retained examples."""

    def __init__(self) -> None:
        self.calibration = CalibrationDiagram(bins=100)
        self.retained = {name: AccuracyRetained() for name in MEASURES}

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        probs, target = outputs["probs"].cpu(), outputs["target"].cpu()
        mean = probs.mean(0)
        self.calibration.update(mean, target)
        for name, measure in MEASURES.items():
            self.retained[name].update(mean.argmax(-1) == target, measure(probs))

    def confidence(self) -> float:
        """Return the mean of the largest class probability."""
        bins = self.calibration.compute()
        return float((bins.confidence.nan_to_num() * bins.counts).sum() / bins.counts.sum())

    def curves(self) -> dict[str, list[float]]:
        """Return the accuracy at each of :data:`FRACTIONS`, by measure of uncertainty."""
        curves = {}
        for name, metric in self.retained.items():
            curve = metric.compute()
            fraction, accuracy = (np.atleast_1d(each.numpy()) for each in (curve.fraction, curve.accuracy))
            curves[name] = _rounded(np.interp(FRACTIONS, fraction, accuracy))
        return curves


class Curve(L.Callback):
    """Record of the validation accuracy of every round."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if "val/accuracy" in trainer.callback_metrics:
            self.values.append(float(trainer.callback_metrics["val/accuracy"]))


def begin(settings: Settings, data: ImageDataModule | Digits) -> tuple[nn.Module, int]:
    """Return the network that the federation starts from, and the number of epochs of pre-training at the server."""
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
    network = module.network
    if settings.start == "moped":
        network = make_bayesian(settings, network, pretrained=True)
    return network, trainer.current_epoch


def run_cell(settings: Settings, folder: Path | None, logger: WandbLogger | None = None) -> dict[str, Any]:
    """Train and score one cell.

    Args:
        settings: of the cell.
        folder: with the data.
        logger: of this cell, or None.

    Returns: scores of the test part, curves, time and traffic.
    """
    begun = time.perf_counter()
    data = make_data(settings, folder)
    data.setup()
    L.seed_everything(settings.seed, verbose=False)
    network, start_epochs = begin(settings, data)
    module = Classifier(network, settings)
    federation, curve, scores = make_federation(settings), Curve(), TestScores()
    trainer = L.Trainer(
        max_epochs=settings.rounds,
        callbacks=[federation, curve, scores],
        limit_val_batches=1.0 if settings.validation_fraction else 0,
        **{**_quiet(), "logger": logger or False},
    )
    trainer.fit(module, datamodule=data)
    L.seed_everything(settings.seed, verbose=False)
    scored = module
    if settings.optimizer == "ivon":
        scored = fb.PosteriorPredictive(module, federation.posterior, settings.samples)
    tested = trainer.test(scored, datamodule=data, verbose=False)[0]
    history = federation.history
    figures = {name.removeprefix("test/"): value for name, value in tested.items()}
    figures["ece100"] = float(scores.calibration.compute().ece)
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
        "engine": federation.described()["engine"],
        "steps": trainer.global_step,
        "start_epochs": start_epochs,
        "seconds": round(time.perf_counter() - begun, 2),
    }


def _quiet() -> dict[str, Any]:
    """Return options of a Trainer without logger, checkpoints, progress bar and summary."""
    return {
        "accelerator": "auto",
        "logger": False,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def _rounded(values: Iterable[float]) -> list[float]:
    """Round to five significant digits."""
    return [float(f"{value:.5g}") for value in values]
