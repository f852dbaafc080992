"""Calibration inside a Trainer: found on validation data, scored on test data, kept in checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.utils.data import ConcatDataset, Dataset

from lightning_fedbayes.callbacks import ExamplePrivacy, FederatedBayes
from lightning_fedbayes.callbacks.calibration.predictions import Datasets, check_apart
from lightning_fedbayes.callbacks.clients import predictor_of
from lightning_fedbayes.callbacks.loggers import log_table
from lightning_fedbayes.clients.evaluation import ClientScores
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.data import ClientDatasets

BATCH_SIZE = 256
"""Examples at a time, where a loader does not say."""


class CalibrationCallback(L.Callback):
    """Calibrates in every validation, so that each checkpoint holds the calibration of its own weights.

    ``trainer.fit`` and ``trainer.validate`` calibrate on the validation data, ``trainer.test`` scores what is
    calibrated, in tables by client, and ``trainer.predict`` uses it. The clients are those of a
    :class:`~lightning_fedbayes.ClientDatasets` (the parts of a ``ConcatDataset``, one loader each); any other
    validation data are those of one client, "all". Training itself is not changed.
    """

    _compared = False
    """True once the validation data have been compared with the training data."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Name of its figures in the log."""

    @abstractmethod
    def calibrate(
        self, trainer: L.Trainer, predictive: nn.Module, datasets: Datasets, batch_size: int, seed: int
    ) -> None:
        """Calibrate on the clients' validation data."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Return what is logged of a calibration."""

    @abstractmethod
    def evaluate(self, predictive: nn.Module, datasets: Datasets, *, batch_size: int, seed: int) -> ClientScores:
        """Score what is calibrated on each client's test data."""

    @abstractmethod
    def check_privacy(self, protects: str) -> None:
        """Raise FedBayesError if what clients send would give away what ``protects`` protects."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what does not go together, before anything runs."""
        self._compared = False
        federation = federation_of(trainer)
        if federation is not None and federation.settings.privacy is not None:
            self.check_privacy("privacy=UpdatePrivacy(...)")
        if any(isinstance(callback, ExamplePrivacy) for callback in callbacks_of(trainer)):
            self.check_privacy("ExamplePrivacy")

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Calibrate on the validation data, before any checkpoint of these weights is written."""
        if trainer.sanity_checking:
            return

        def calibrate(predictive: nn.Module, datasets: Datasets, batch_size: int, seed: int) -> None:
            self._compare(trainer, datasets)
            self.calibrate(trainer, predictive, datasets, batch_size, seed)
            pl_module.log_dict({f"val/{self.label}/{name}": value for name, value in self.figures().items()})

        self._run(trainer, pl_module, trainer.val_dataloaders, calibrate, raises=trainer.state.fn == "validate")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score what is calibrated on the test data, and log the table of clients."""

        def score(predictive: nn.Module, datasets: Datasets, batch_size: int, seed: int) -> None:
            scores = self.evaluate(predictive, datasets, batch_size=batch_size, seed=seed)
            summary = {name.removeprefix("clients/"): value for name, value in scores.summary().items()}
            if len(scores.names) == 1:  # whose mean is its worst
                summary = {name: summary[name] for name in scores.values}
            pl_module.log_dict({f"test/{self.label}/{name}": value for name, value in summary.items()})
            log_table(trainer, f"test/{self.label}", *scores.table(), trainer.current_epoch)

        self._run(trainer, pl_module, trainer.test_dataloaders, score, raises=False)

    def _run(
        self, trainer: L.Trainer, module: L.LightningModule, loaders: Any,
        use: Callable[[nn.Module, Datasets, int, int], None], *, raises: bool,
    ) -> None:
        """Call ``use`` with predictor, clients' data, batch size and seed; a mistake costs no fit and no test."""
        federation = federation_of(trainer)
        try:
            datasets, batch_size = data_of(loaders)
            seed = 0 if federation is None else federation.settings.seed
            use(predictor_of(trainer, module) or module, datasets, batch_size, seed)
        except FedBayesError as error:
            if raises:
                raise
            rank_zero_warn(f"{type(self).__name__} does nothing: {error}")

    def _compare(self, trainer: L.Trainer, datasets: Datasets) -> None:
        """Warn once of validation examples that are trained on."""
        trained_on = getattr(trainer.train_dataloader, "dataset", None)
        if trainer.state.fn == "fit" and not self._compared and isinstance(trained_on, Dataset):
            self._compared = True
            check_apart(datasets, trained_on)


def data_of(loaders: Any) -> tuple[Datasets, int]:
    """Return the data set of each client behind one loader or several, and the batch size.

    Raises:
        FedBayesError: there is no loader, or it has no data set.
    """
    several = list(loaders) if isinstance(loaders, list | tuple) else [loaders]
    datasets = [getattr(loader, "dataset", None) for loader in several]
    if not several or any(dataset is None for dataset in datasets):
        raise FedBayesError("there are no validation data sets: give a DataLoader over a ClientDatasets")
    batch_size = getattr(several[0], "batch_size", None) or BATCH_SIZE
    if len(datasets) == 1 and isinstance(datasets[0], ClientDatasets):
        return datasets[0], batch_size
    if len(datasets) == 1 and isinstance(datasets[0], ConcatDataset):
        datasets = datasets[0].datasets
    named: dict[str, Dataset] = {str(number): dataset for number, dataset in enumerate(datasets)}  # pyright: ignore[reportAssignmentType]
    return (named if len(named) > 1 else {"all": next(iter(named.values()))}), batch_size


def callbacks_of(trainer: L.Trainer) -> list[L.Callback]:
    """Return the Trainer's callbacks, in their order."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def federation_of(trainer: L.Trainer) -> FederatedBayes | None:
    """Return the Trainer's federation, if it has one."""
    return next((callback for callback in callbacks_of(trainer) if isinstance(callback, FederatedBayes)), None)
