"""Report of how well every client is served, to the logger."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_fedbayes.callbacks.evaluator import Evaluator, Reader, callback_of, callbacks_of, evaluator_of
from lightning_fedbayes.callbacks.loggers import log_figure, log_table
from lightning_fedbayes.callbacks.uncertainty import UncertaintyReport
from lightning_fedbayes.clients.across import CrossScores
from lightning_fedbayes.clients.evaluation import ClientScores, evaluate_clients, figures_of, has_predict_step
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.data import ClientDatasets
from lightning_fedbayes.metrics.likelihoods import examples_in

if TYPE_CHECKING:
    from lightning_fedbayes.callbacks.federated_bayes import FederatedBayes

MOST_ACROSS = 24
"""Most clients whose models are scored on the data of each other: one pass over the data for each of them."""


class ClientReport(Reader):
    """Scores every client on its own validation and test data.

    Return a loader over a :class:`~lightning_fedbayes.ClientDatasets` from ``val_dataloader`` or ``test_dataloader``;
    :class:`~lightning_fedbayes.FederatedBayes` brings this report along, and ``trainer.validate`` or ``trainer.test``
    take it as a callback. In a federation as many loaders as clients are the clients', in their order. Other data are
    left alone.

    Logged in every validation and test: mean over all examples, mean of the worst 10 % of the clients and spread of
    every figure of :class:`.ClientScores`, as "val/clients/nll", "val/clients/nll_worst" and
    "val/clients/nll_spread". Logged at the end: the table of clients, "val/clients".

    In a federation whose clients keep their posteriors, "val/personal/nll" and the like, and the table "val/personal",
    are those of each client's own posterior, :meth:`~lightning_fedbayes.FederatedBayes.posterior_of` with λ = 1, where
    the parts of the data have the clients' names.

    There, at the end of training, each client's own posterior is scored on every client's validation data, too: the
    table and the picture "val/across" (:class:`.CrossScores`). A line names the clients that stand
    out. Of more than 24 clients it takes 24, at equal distances.

    Scored are the predictions that ``validation_step`` (``test_step``) returns, or those of ``predict_step``. Another
    module of the user's own is scored where this report or an :class:`~lightning_fedbayes.UncertaintyReport` is given:
    its predictions are drawn from the global posterior, and all of these names have "draws/" behind "val/", as
    "val/draws/clients/nll". Of the report that a federation brings along one line says that there are none.

    Attributes:
        scores: stage ("val" or "test") → the last :class:`.ClientScores`; "personal/val" and
            "personal/test" those of the clients' own posteriors.
        across: the last :class:`~lightning_fedbayes.clients.across.CrossScores`; None before the end of a training.
        personal: the federation whose clients keep their posteriors; :class:`FederatedBayes` sets it.
    """

    by_client = True

    def __init__(self) -> None:
        self.scores: dict[str, ClientScores] = {}
        self.across: CrossScores | None = None
        self.personal: FederatedBayes | None = None
        self._is_silent = False

    def asks(self, module: L.LightningModule, posterior: GaussianPosterior | None, *, has_clients: bool) -> bool:
        """Return True if a user has given the report, or the module has a ``predict_step`` of its own."""
        return (self.is_given and has_clients) or has_predict_step(module)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the clients on their validation data."""
        self._score(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the clients on their test data, and log the table."""
        self._score(trainer, pl_module, "test")
        self._table(trainer, "test")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the table if there is no training whose end is still to come."""
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn != "fit":
            self._table(trainer, "val")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the table of the last validation, and each client's own posterior on the data of all."""
        self._table(trainer, "val")
        evaluator = evaluator_of(trainer)
        if self.personal is None or "personal/val" not in self.scores or not evaluator.has_clients(trainer, pl_module):
            return
        clients = getattr(evaluator.loaders[0], "dataset", None)
        if isinstance(clients, ClientDatasets):
            self.across = self._scores_across(evaluator, pl_module, self.personal, clients)
            evaluator.begin()
        if self.across is not None:
            named = ", ".join(f"{name} ({' and '.join(why)})" for name, why in self.across.outlying().items())
            table = f"val/{evaluator.by('own')}across"
            if named:
                rank_zero_info(f"Clients whose model or data are unlike the others': {named}; see {table}.")
            if trainer.loggers:
                log_table(trainer, table, *self.across.table(), trainer.current_epoch)
                log_figure(trainer, table, self.across.plot(), trainer.current_epoch)

    def _score(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Score and log; what cannot be scored is said once, and costs nobody a run."""
        evaluator = evaluator_of(trainer)
        if self._is_silent or not evaluator.has_clients(trainer, module):
            return
        try:
            found = evaluator.predictions(trainer, module)
            sizes = {name: examples_in(each) for name, each in found.items()}
            scores = ClientScores.of(sizes, {name: figures_of(each) for name, each in found.items()})
        except FedBayesError as error:
            self._is_silent = True
            say = rank_zero_warn if has_predict_step(module) else rank_zero_info
            say(f"There are no scores of each client: {error}")
            return
        self.scores[stage] = scores
        figures = {evaluator.by("client") + name: value for name, value in scores.summary().items()}
        clients = getattr(evaluator.loaders[0], "dataset", None)
        if self.personal is not None and isinstance(clients, ClientDatasets):
            own = self._own_scores(evaluator, module, self.personal, clients)
            if own is not None:
                self.scores[f"personal/{stage}"] = own
                begin = f"{evaluator.by('own')}personal/"
                figures |= {name.replace("clients/", begin): value for name, value in own.summary().items()}
        module.log_dict({f"{stage}/{name}": value for name, value in figures.items()})

    def _own_scores(
        self, evaluator: Evaluator, module: L.LightningModule, federation: FederatedBayes, clients: ClientDatasets
    ) -> ClientScores | None:
        """Score every client by the posterior that it has trained last; None if that is not of the module's weights."""
        if not set(clients.names) <= set(federation.clients.names):
            return None
        try:
            scores = [
                self._own_on(evaluator, module, federation, name, ClientDatasets({name: dataset}))
                for name, dataset in zip(clients.names, clients.datasets, strict=True)
            ]
        except FedBayesError:
            return None
        values = {figure: torch.cat([each.values[figure] for each in scores]) for figure in scores[0].values}
        return ClientScores(tuple(clients.names), tuple(each.num_examples[0] for each in scores), values)

    def _own_on(
        self,
        evaluator: Evaluator,
        module: L.LightningModule,
        federation: FederatedBayes,
        client: str,
        data: ClientDatasets,
    ) -> ClientScores:
        """Return the scores of a client's own posterior on ``data``."""
        with federation.holding(federation.clients.names.index(client)) as posterior:
            predictor, size = evaluator.predictor(module, posterior), evaluator.batch_size
            return evaluate_clients(predictor, data, batch_size=size, collate_fn=evaluator.collate_fn)

    def _scores_across(
        self, evaluator: Evaluator, module: L.LightningModule, federation: FederatedBayes, clients: ClientDatasets
    ) -> CrossScores | None:
        """Score every client's own posterior on the data of all; None for one client, or what cannot be scored."""
        shown = torch.linspace(0, len(clients.names) - 1, min(len(clients.names), MOST_ACROSS)).round().int().tolist()
        data = ClientDatasets({clients.names[each]: clients.datasets[each] for each in shown})
        if len(shown) < 2:
            return None
        try:
            return CrossScores.of(
                {name: self._own_on(evaluator, module, federation, name, data) for name in data.names}
            )
        except FedBayesError:
            return None

    def _table(self, trainer: L.Trainer, stage: str) -> None:
        by = evaluator_of(trainer).by
        for key, name in ((stage, f"{by('client')}clients"), (f"personal/{stage}", f"{by('own')}personal")):
            if key in self.scores and trainer.loggers:
                log_table(trainer, f"{stage}/{name}", *self.scores[key].table(), trainer.current_epoch)


def bring_reports(trainer: L.Trainer, beside: L.Callback, personal: FederatedBayes | None = None) -> UncertaintyReport:
    """Return the Trainer's :class:`UncertaintyReport`; it and a :class:`ClientReport` stand behind ``beside``, if new.

    ``personal`` is the federation, if its clients keep their posteriors.
    """
    callbacks, first = callbacks_of(trainer), callback_of(trainer, UncertaintyReport) or UncertaintyReport(None)
    second = callback_of(trainer, ClientReport) or ClientReport()
    second.is_given = second.is_given and second in callbacks
    for report, place in ((first, beside), (second, first)):
        if report not in callbacks:
            callbacks.insert(callbacks.index(place) + 1, report)
    second.personal = personal
    return first
