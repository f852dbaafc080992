"""Report of how well every client is served, to the logger."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fedbayes.callbacks.loggers import log_table
from lightning_fedbayes.callbacks.uncertainty import UncertaintyReport
from lightning_fedbayes.data import ClientDatasets
from lightning_fedbayes.errors import FedBayesError
from lightning_fedbayes.evaluation import ClientScores, evaluate_clients
from lightning_fedbayes.modules import PosteriorPredictive


class ClientReport(L.Callback):
    """Scores every client on its own validation and test data, where these are a ClientDatasets.

    Return a loader over a :class:`~lightning_fedbayes.ClientDatasets` from ``val_dataloader`` or ``test_dataloader``;
    :class:`~lightning_fedbayes.FederatedBayes` brings this report along, and ``trainer.validate`` or ``trainer.test``
    take it as a callback. Other data are left alone.

    Logged in every validation and test: mean over all examples, mean of the worst 10 % of the clients and spread of
    every figure of :class:`~lightning_fedbayes.ClientScores`, as "val/clients/nll", "val/clients/nll_worst" and
    "val/clients/nll_spread". Logged at the end: the table of clients, "val/clients".

    A module of the user's own is scored where an :class:`~lightning_fedbayes.UncertaintyReport` with ``samples`` says
    that it is a classifier whose predictions are drawn from the global posterior.

    Attributes:
        scores: stage ("val" or "test") → the last :class:`~lightning_fedbayes.ClientScores`.
    """

    def __init__(self) -> None:
        self.scores: dict[str, ClientScores] = {}
        self._is_silent = False

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the clients on their validation data."""
        if not trainer.sanity_checking:
            self._score(trainer, pl_module, "val", trainer.val_dataloaders)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the clients on their test data, and log the table."""
        self._score(trainer, pl_module, "test", trainer.test_dataloaders)
        self._table(trainer, "test")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the table if there is no training whose end is still to come."""
        if trainer.state.fn != "fit":
            self._table(trainer, "val")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the table of the last validation."""
        self._table(trainer, "val")

    def _score(self, trainer: L.Trainer, module: L.LightningModule, stage: str, loader: Any) -> None:
        """Score and log; what cannot be scored is said once, and costs nobody a run."""
        clients, predictor = getattr(loader, "dataset", None), predictor_of(trainer, module)
        if not isinstance(clients, ClientDatasets) or predictor is None or self._is_silent:
            return
        try:
            scores = evaluate_clients(predictor, clients, batch_size=getattr(loader, "batch_size", None) or 256)
        except FedBayesError as error:
            self._is_silent = True
            rank_zero_warn(f"There are no scores of each client: {error}")
            return
        self.scores[stage] = scores
        module.log_dict({f"{stage}/{name}": value for name, value in scores.summary().items()})

    def _table(self, trainer: L.Trainer, stage: str) -> None:
        if stage in self.scores and trainer.loggers:
            rows = self.scores[stage].rows()
            log_table(trainer, f"{stage}/clients", list(rows[0]), [list(row.values()) for row in rows],
                      trainer.current_epoch)


def predictor_of(trainer: L.Trainer, module: L.LightningModule) -> L.LightningModule | None:
    """Return the module itself if it has predictions of its own, or those of its posterior; None without either."""
    if type(module).predict_step is not L.LightningModule.predict_step:
        return module
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for report in callbacks:
        if isinstance(report, UncertaintyReport) and report.samples is not None and report.posterior is not None:
            return PosteriorPredictive(module, report.posterior, report.samples)
    return None


def bring_client_report(trainer: L.Trainer, behind: L.Callback) -> None:
    """Put a :class:`ClientReport` behind a callback of the Trainer, if it has none."""
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    if not any(isinstance(callback, ClientReport) for callback in callbacks):
        callbacks.insert(callbacks.index(behind) + 1, ClientReport())
