"""Report of how well every client is served, to the logger."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fedbayes.callbacks.loggers import log_table
from lightning_fedbayes.callbacks.uncertainty import UncertaintyReport
from lightning_fedbayes.clients.evaluation import ClientScores, evaluate_clients
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.data import ClientDatasets


class KeepsPosteriors(Protocol):
    """A federation whose clients keep their posteriors."""

    @property
    def clients(self) -> Any:
        """Return its :class:`~lightning_fedbayes.data.clients.Clients`."""
        ...

    def holding(self, client: int) -> AbstractContextManager[GaussianPosterior]:
        """Return a context inside which the module predicts by the client's own posterior, which it gives."""
        ...


class ClientReport(L.Callback):
    """Scores every client on its own validation and test data, where these are a ClientDatasets.

    Return a loader over a :class:`~lightning_fedbayes.ClientDatasets` from ``val_dataloader`` or ``test_dataloader``;
    :class:`~lightning_fedbayes.FederatedBayes` brings this report along, and ``trainer.validate`` or ``trainer.test``
    take it as a callback. Other data are left alone.

    Logged in every validation and test: mean over all examples, mean of the worst 10 % of the clients and spread of
    every figure of :class:`~lightning_fedbayes.ClientScores`, as "val/clients/nll", "val/clients/nll_worst" and
    "val/clients/nll_spread". Logged at the end: the table of clients, "val/clients".

    In a federation whose clients keep their posteriors, "val/personal/nll" and the like, and the table "val/personal",
    are those of each client's own posterior, :meth:`~lightning_fedbayes.FederatedBayes.posterior_of` with λ = 1, where
    the parts of the data have the clients' names.

    A module of the user's own is scored where an :class:`~lightning_fedbayes.UncertaintyReport` with ``samples`` says
    that it is a classifier whose predictions are drawn from the global posterior.

    Attributes:
        scores: stage ("val" or "test") → the last :class:`~lightning_fedbayes.ClientScores`; "personal/val" and
            "personal/test" those of the clients' own posteriors.
        personal: the federation whose clients keep their posteriors; :class:`FederatedBayes` sets it.
    """

    def __init__(self) -> None:
        self.scores: dict[str, ClientScores] = {}
        self.personal: KeepsPosteriors | None = None
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
        batch_size = getattr(loader, "batch_size", None) or 256
        try:
            scores = evaluate_clients(predictor, clients, batch_size=batch_size)
        except FedBayesError as error:
            self._is_silent = True
            rank_zero_warn(f"There are no scores of each client: {error}")
            return
        self.scores[stage] = scores
        figures = scores.summary()
        if self.personal is not None and set(clients.names) <= set(self.personal.clients.names):
            own = self._own_scores(trainer, module, self.personal, clients, batch_size)
            if own is not None:
                self.scores[f"personal/{stage}"] = own
                figures |= {name.replace("clients/", "personal/"): value for name, value in own.summary().items()}
        module.log_dict({f"{stage}/{name}": value for name, value in figures.items()})

    def _own_scores(
        self, trainer: L.Trainer, module: L.LightningModule, federation: KeepsPosteriors, clients: ClientDatasets,
        batch_size: int,
    ) -> ClientScores | None:
        """Score every client by the posterior that it has trained last; None if that is not of the module's weights."""
        names, scores = federation.clients.names, []
        try:
            for name, dataset in zip(clients.names, clients.datasets, strict=True):
                with federation.holding(names.index(name)) as posterior:
                    own = predictor_of(trainer, module, posterior)
                    assert own is not None
                    scores.append(evaluate_clients(own, ClientDatasets({name: dataset}), batch_size=batch_size))
        except FedBayesError:
            return None
        return ClientScores.of(
            {name: each.num_examples[0] for name, each in zip(clients.names, scores, strict=True)},
            {name: {f: float(v[0]) for f, v in each.values.items()} for name, each in zip(clients.names, scores)},
        )

    def _table(self, trainer: L.Trainer, stage: str) -> None:
        for key, name in ((stage, f"{stage}/clients"), (f"personal/{stage}", f"{stage}/personal")):
            if key in self.scores and trainer.loggers:
                log_table(trainer, name, *self.scores[key].table(), trainer.current_epoch)


def predictor_of(
    trainer: L.Trainer, module: L.LightningModule, posterior: GaussianPosterior | None = None
) -> L.LightningModule | None:
    """Return the module itself if it has predictions of its own, or those of its posterior; None without either.

    Args:
        trainer: whose :class:`~lightning_fedbayes.UncertaintyReport` says how many draws predict.
        module: that is scored.
        posterior: in place of the global one.
    """
    if type(module).predict_step is not L.LightningModule.predict_step:
        return module
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for report in callbacks:
        if isinstance(report, UncertaintyReport) and report.samples is not None and report.posterior is not None:
            return report.predictive(module, posterior or report.posterior)
    return None


def bring_client_report(trainer: L.Trainer, personal: KeepsPosteriors | None, behind: L.Callback) -> None:
    """Put a :class:`ClientReport` behind a callback of the Trainer, if it has none, and tell it of own posteriors."""
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    report = next((callback for callback in callbacks if isinstance(callback, ClientReport)), None)
    if report is None:
        report = ClientReport()
        callbacks.insert(callbacks.index(behind) + 1, report)
    report.personal = personal
