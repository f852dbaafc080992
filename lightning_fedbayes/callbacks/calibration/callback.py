"""Calibration inside a Trainer: found on validation data, scored on test data, kept in checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fedbayes.callbacks import ExamplePrivacy, FederatedBayes
from lightning_fedbayes.callbacks.calibration.predictions import check_apart
from lightning_fedbayes.callbacks.evaluator import Datasets, Reader, data_of, evaluator_of
from lightning_fedbayes.callbacks.loggers import log_table
from lightning_fedbayes.clients.evaluation import ClientScores, Predicted
from lightning_fedbayes.clients.privacy.door import EXACT, Door
from lightning_fedbayes.core.errors import FedBayesError, FederationError, NotSent, check_kind
from lightning_fedbayes.core.messages import Kind

Found = Mapping[str, tuple[Tensor, ...]]
"""Client name → its logits and targets, or its means, standard deviations and targets."""


class CalibrationCallback(Reader):
    """Calibrates in every validation, so that each checkpoint holds the calibration of its own weights.

    ``trainer.fit`` and ``trainer.validate`` calibrate on the validation data, ``trainer.test`` scores what is
    calibrated, in tables by client, and ``trainer.predict`` uses it. The clients are those of a
    :class:`~lightning_fedbayes.ClientDatasets` (the parts of a ``ConcatDataset``, one loader each); any other
    validation data are those of one client, "all". Training itself is not changed.

    What is calibrated are the predictions of that validation, those of its evaluator, whatever else reads them.
    """

    calibrates = True
    sends: ClassVar[Kind]
    """The kind of message that a client sends for it."""
    if_private: ClassVar[str]
    """The remedy where that must not leave a client."""
    epsilon: float | None = None
    _compared = False
    """True once the validation data have been compared with the training data."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Name of its figures in the log."""

    @abstractmethod
    def read(self, found: Predicted) -> tuple[Tensor, ...]:
        """Return what is calibrated of a client's predictions; raise FedBayesError if they are of another kind."""

    def check(self, found: Predicted) -> None:
        """See :meth:`Reader.check`."""
        self.read(found)

    @abstractmethod
    def calibrate(self, trainer: L.Trainer, found: Found, seed: int) -> None:
        """Calibrate on the clients' validation data."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Return what is logged of a calibration."""

    @abstractmethod
    def score(self, found: Found) -> ClientScores:
        """Score what is calibrated on each client's test data."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what does not go together, before anything runs, and what a client's door would not let out."""
        self._compared = False
        federation = federation_of(trainer)
        privacy = None if federation is None else federation.settings.privacy
        examples = any(isinstance(callback, ExamplePrivacy) for callback in callbacks_of(trainer))
        try:
            Door(privacy, self.epsilon, examples=examples).check(self.sends, self.epsilon)
        except NotSent:
            protects = "ExamplePrivacy" if privacy is None else "privacy=UpdatePrivacy(...)"
            raise FedBayesError(
                f"{type(self).__name__} beside {protects}: clients would send {EXACT[self.sends]}, exactly. "
                f"{self.if_private}"
            ) from None

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Calibrate on the validation data, before any checkpoint of these weights is written."""
        if trainer.sanity_checking:
            return

        def calibrate(found: Found) -> None:
            self._compare(trainer, data_of(trainer.val_dataloaders)[0])
            federation = federation_of(trainer)
            self.calibrate(trainer, found, 0 if federation is None else federation.settings.seed)
            pl_module.log_dict({f"val/{self.label}/{name}": value for name, value in self.figures().items()})

        self._run(trainer, pl_module, calibrate, raises=trainer.state.fn == "validate")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score what is calibrated on the test data, and log the table of clients."""

        def score(found: Found) -> None:
            scores = self.score(found)
            summary = {name.removeprefix("clients/"): value for name, value in scores.summary().items()}
            if len(scores.names) == 1:  # whose mean is its worst
                summary = {name: summary[name] for name in scores.values}
            pl_module.log_dict({f"test/{self.label}/{name}": value for name, value in summary.items()})
            log_table(trainer, f"test/{self.label}", *scores.table(), trainer.current_epoch)

        self._run(trainer, pl_module, score, raises=False)

    def _run(
        self, trainer: L.Trainer, module: L.LightningModule, use: Callable[[Found], None], *, raises: bool
    ) -> None:
        """Call ``use`` with the clients' predictions; a mistake costs no fit and no test."""
        try:
            found = evaluator_of(trainer).predictions(trainer, module)
            use({name: self.read(each) for name, each in found.items()})
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


def state_of(callback: CalibrationCallback, state: Any) -> Mapping[str, Any]:
    """Return a stored state of a callback; raise FederationError unless it has the entries that the callback has."""
    check_kind("state_dict", state, Mapping, "give what state_dict() has returned")
    missing = [name for name in callback.state_dict() if name not in state]
    if missing:
        raise FederationError(
            f"the state lacks {', '.join(missing)}: it is none of a {type(callback).__name__}; give what its "
            "state_dict() has returned"
        )
    return state


def callbacks_of(trainer: L.Trainer) -> list[L.Callback]:
    """Return the Trainer's callbacks, in their order."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def federation_of(trainer: L.Trainer) -> FederatedBayes | None:
    """Return the Trainer's federation, if it has one."""
    return next((callback for callback in callbacks_of(trainer) if isinstance(callback, FederatedBayes)), None)
