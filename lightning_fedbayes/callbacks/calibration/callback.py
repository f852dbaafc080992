"""Calibration inside a Trainer: found on validation data, scored on test data, kept in checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_fedbayes.callbacks import ExamplePrivacy, FederatedBayes
from lightning_fedbayes.callbacks.calibration.predictions import UNSCALED, check_apart, rows_of_clients
from lightning_fedbayes.callbacks.evaluator import Datasets, Reader, callback_of, data_of, evaluator_of
from lightning_fedbayes.callbacks.loggers import log_table
from lightning_fedbayes.clients.evaluation import ClientScores
from lightning_fedbayes.clients.privacy.door import EXACT, Door
from lightning_fedbayes.core.errors import FedBayesError, FederationError, NotSent, check_kind, listed
from lightning_fedbayes.core.messages import Kind
from lightning_fedbayes.metrics.likelihoods import check_by_example

Found = Mapping[str, tuple[Tensor, ...]]
"""Client name → its logits and targets, or its means, standard deviations and targets."""


class CalibrationCallback(Reader):
    """Calibrates in every validation, so that each checkpoint holds the calibration of its weights.

    ``trainer.fit`` and ``trainer.validate`` calibrate on the validation data, ``trainer.test`` scores the result, in
    tables by client, and ``trainer.predict`` uses it. The clients are those of a
    :class:`~lightning_fedbayes.ClientDatasets` (the parts of a ``ConcatDataset``, one loader each); any other
    validation data are one client, "all". Training is not changed.

    It calibrates the predictions of the validation's evaluator. If the package has drawn them, figures are
    "val/draws/..." and "test/draws/...".
    """

    calibrates = True
    label: str
    """Name of its figures in the log."""
    sends: ClassVar[Kind]
    """The kind of message that a client sends for it."""
    if_private: ClassVar[str]
    """The remedy where privacy keeps that message back."""
    epsilon: float | None = None
    max_influence: float | None
    takes_moments = False
    """True if it takes mean and variance of ``predict_step``, which may be exact."""
    _compared = False
    """True once the validation data have been compared with the training data."""

    @abstractmethod
    def calibrate(self, trainer: L.Trainer, found: Found, seed: int) -> None:
        """Calibrate on the clients' validation data."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Return the figures of a calibration to log."""

    @abstractmethod
    def score(self, found: Found) -> ClientScores:
        """Score the calibrated predictions on each client's test data."""

    def evaluate(
        self, predictive: nn.Module, datasets: Datasets, *, batch_size: int = 256, seed: int = 0
    ) -> ClientScores:
        """Return the scores of the calibrated predictions on each client's data, other than those of the fit.

        They are accuracy, NLL and ECE (of numbers RMSE, NLL and coverage) of scaled predictions, or coverage and size
        of the sets (width of the intervals, in the units of the targets).

        Args:
            predictive, datasets, batch_size, seed: see :meth:`fit_from`.

        Raises:
            FedBayesError: before a fit, an unknown client, or as :meth:`fit_from`.
        """
        return self.score(self._found(predictive, datasets, batch_size, seed))

    def _found(self, predictive: nn.Module, datasets: Datasets, batch_size: int, seed: int, first: int = 0) -> Found:
        """Return the predictions of each client's data."""
        found = rows_of_clients(predictive, datasets, batch_size, seed, first, numbers=self.takes_moments)
        return {name: self.read(each) for name, each in found}

    def _tell(self, what: str, names: list[str]) -> None:
        """Name the bounded clients; ``what`` they have sent."""
        if names:
            rank_zero_info(
                f"Calibration {self.label}: the {what} of client{'s' if len(names) > 1 else ''} {listed(names)} stand "
                f"out, and count for at most {self.max_influence:g} times those of the median client"
            )

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a likelihood without calibration, and messages that privacy keeps back, before anything runs."""
        self._compared = False
        check_by_example(pl_module, UNSCALED)
        federation = callback_of(trainer, FederatedBayes)
        privacy = None if federation is None else federation.settings.privacy
        examples = callback_of(trainer, ExamplePrivacy) is not None
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
            trained_on = getattr(trainer.train_dataloader, "dataset", None)
            if trainer.state.fn == "fit" and not self._compared and isinstance(trained_on, Dataset):
                self._compared = True
                check_apart(data_of(trainer.val_dataloaders)[0], trained_on)
            federation = callback_of(trainer, FederatedBayes)
            self.calibrate(trainer, found, 0 if federation is None else federation.settings.seed)
            label = evaluator_of(trainer).by("logits") + self.label
            pl_module.log_dict({f"val/{label}/{name}": value for name, value in self.figures().items()})

        self._run(trainer, pl_module, calibrate, raises=trainer.state.fn == "validate")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the calibrated predictions on the test data, and log the table of clients."""

        def score(found: Found) -> None:
            scores = self.score(found)
            summary = {name.removeprefix("clients/"): value for name, value in scores.summary().items()}
            if len(scores.names) == 1:  # its mean is its worst
                summary = {name: summary[name] for name in scores.values}
            label = evaluator_of(trainer).by("logits") + self.label
            pl_module.log_dict({f"test/{label}/{name}": value for name, value in summary.items()})
            log_table(trainer, f"test/{label}", *scores.table(), trainer.current_epoch)

        self._run(trainer, pl_module, score, raises=False)

    def _run(
        self, trainer: L.Trainer, module: L.LightningModule, use: Callable[[Found], None], *, raises: bool
    ) -> None:
        """Call ``use`` with the clients' predictions; a mistake ends no fit and no test."""
        try:
            found = evaluator_of(trainer).predictions(trainer, module)
            use({name: self.read(each) for name, each in found.items()})
        except FedBayesError as error:
            if raises:
                raise
            rank_zero_warn(f"{type(self).__name__} does nothing: {error}")


def state_of(callback: CalibrationCallback, state: Any) -> Mapping[str, Any]:
    """Return a callback's stored state; raise FederationError unless it has all entries."""
    check_kind("state_dict", state, Mapping, "give what state_dict() has returned")
    missing = [name for name in callback.state_dict() if name not in state]
    if missing:
        raise FederationError(
            f"the state lacks {', '.join(missing)}: it is none of a {type(callback).__name__}; give what its "
            "state_dict() has returned"
        )
    return state
