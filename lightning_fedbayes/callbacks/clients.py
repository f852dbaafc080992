"""Report of how well every client is served, to the logger."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_fedbayes.callbacks.evaluator import Evaluator, Reader, callback_of, callbacks_of, evaluator_of
from lightning_fedbayes.callbacks.loggers import log_table
from lightning_fedbayes.callbacks.uncertainty import UncertaintyReport
from lightning_fedbayes.clients.evaluation import ClientScores, evaluate_clients, figures_of, has_predict_step
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.data import ClientDatasets
from lightning_fedbayes.metrics.likelihoods import examples_in


class ClientReport(Reader):
    """Scores every client on its validation and test data.

    Return a loader over a :class:`~lightning_fedbayes.ClientDatasets` from ``val_dataloader`` or ``test_dataloader``.
    :class:`~lightning_fedbayes.FederatedBayes` brings this report along, and ``trainer.validate`` or ``trainer.test``
    take it as a callback. In a federation as many loaders as clients are the clients', in their order. Other data are
    not scored.

    Logged in every validation and test: mean over all examples, mean of the worst 10 % of the clients and spread of
    every figure of :class:`.ClientScores`, as "val/clients/nll", "val/clients/nll_worst" and
    "val/clients/nll_spread". Logged at the end: the table of clients, "val/clients".

    If clients keep their posteriors and the parts of the data have the clients' names, "val/personal/nll" and the like,
    and the table "val/personal", score each client's personal posterior,
    :meth:`~lightning_fedbayes.FederatedBayes.posterior_of` with λ = 1.

    The predictions are returned by ``validation_step`` (``test_step``), or by ``predict_step``. For another module a
    user gives this report or an :class:`~lightning_fedbayes.UncertaintyReport`: predictions are drawn from the global
    posterior, and all names have "draws/" behind "val/", as "val/draws/clients/nll".

    Attributes:
        scores: stage ("val" or "test") → the last :class:`.ClientScores`. "personal/val" and "personal/test" by the
            personal posteriors.
        personal: the federation, if its clients keep their posteriors. :class:`FederatedBayes` sets it.
    """

    by_client = True

    def __init__(self) -> None:
        self.scores: dict[str, ClientScores] = {}
        self.personal: Any = None
        self._is_silent = False

    def asks(self, module: L.LightningModule, posterior: GaussianPosterior | None, *, has_clients: bool) -> bool:
        """Return True if a user has given the report, or the module has its own ``predict_step``."""
        return (self.is_given and has_clients) or has_predict_step(module)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the clients on their validation data."""
        self._score(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the clients on their test data, and log the table."""
        self._score(trainer, pl_module, "test")
        self._table(trainer, "test")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the table, unless a training's end will."""
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn != "fit":
            self._table(trainer, "val")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the table of the last validation."""
        self._table(trainer, "val")

    def _score(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Score and log. If that is impossible, say so once and go on."""
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
            personal = self._personal_scores(evaluator, module, clients)
            if personal is not None:
                self.scores[f"personal/{stage}"] = personal
                begin = f"{evaluator.by('own')}personal/"
                figures |= {name.replace("clients/", begin): value for name, value in personal.summary().items()}
        module.log_dict({f"{stage}/{name}": value for name, value in figures.items()})

    def _personal_scores(
        self, evaluator: Evaluator, module: L.LightningModule, clients: ClientDatasets
    ) -> ClientScores | None:
        """Score every client by its last posterior. None if that does not fit the module's weights."""
        if not set(clients.names) <= set(self.personal.clients.names):
            return None
        scores, size = list[ClientScores](), evaluator.batch_size
        try:
            for name, dataset in zip(clients.names, clients.datasets, strict=True):
                with self.personal.federation.holding(self.personal.clients.names.index(name)) as posterior:
                    predictor, own = evaluator.predictor(module, posterior), ClientDatasets({name: dataset})
                    scores.append(evaluate_clients(predictor, own, batch_size=size, collate_fn=evaluator.collate_fn))
        except FedBayesError:
            return None
        values = {figure: torch.cat([each.values[figure] for each in scores]) for figure in scores[0].values}
        return ClientScores(tuple(clients.names), tuple(each.num_examples[0] for each in scores), values)

    def _table(self, trainer: L.Trainer, stage: str) -> None:
        by = evaluator_of(trainer).by
        for key, name in ((stage, f"{by('client')}clients"), (f"personal/{stage}", f"{by('own')}personal")):
            if key in self.scores and trainer.loggers:
                log_table(trainer.loggers, f"{stage}/{name}", *self.scores[key].table(), trainer.current_epoch)


def bring_reports(trainer: L.Trainer, beside: L.Callback, personal: Any = None) -> UncertaintyReport:
    """Return the Trainer's :class:`UncertaintyReport`. Put it and a :class:`ClientReport` behind ``beside`` if new."""
    callbacks, first = callbacks_of(trainer), callback_of(trainer, UncertaintyReport) or UncertaintyReport(None)
    second = callback_of(trainer, ClientReport) or ClientReport()
    second.is_given = second.is_given and second in callbacks
    for report, place in ((first, beside), (second, first)):
        if report not in callbacks:
            callbacks.insert(callbacks.index(place) + 1, report)
    second.personal = personal
    return first
