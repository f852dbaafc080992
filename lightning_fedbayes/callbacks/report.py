"""What a federation tells its loggers: settings, clients, and what each client did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor

from lightning_fedbayes import plots
from lightning_fedbayes.callbacks.pictures import log_figure, log_table, markdown_table
from lightning_fedbayes.data.clients import Clients
from lightning_fedbayes.engines.federation import ClientOutcome


@dataclass
class ClientRecord:
    """What one client did over the federation.

    Attributes:
        rounds: rounds that it took part in.
        failures: rounds that it was left out of.
        train_loss: mean training loss in its last round.
        weight: its normalised weight ω in its last round.
        seconds: training time in its last round.
        megabytes_up: size of its last update.
        last_failure: why it was left out last.
    """

    rounds: int = 0
    failures: int = 0
    train_loss: float = float("nan")
    weight: float = float("nan")
    seconds: float = 0.0
    megabytes_up: float = 0.0
    last_failure: str = ""


COLUMNS = (
    "client", "examples", "rounds", "failures", "weight", "train_loss", "accuracy", "seconds", "megabytes_up",
    "last_failure",
)


class FederationReport:
    """Keeps one record per client and logs the federation's settings, table and pictures."""

    def __init__(self) -> None:
        self.records: dict[int, ClientRecord] = {}
        self._clients: Clients | None = None
        self._with_axis: set[str] = set()

    def start(self, trainer: L.Trainer, settings: dict[str, Any], clients: Clients) -> None:
        """Log the settings and the clients × classes heat map."""
        self._with_axis = set()
        self.set_clients(clients)
        for logger in trainer.loggers:
            logger.log_hyperparams({"federation": settings})
            if isinstance(logger, TensorBoardLogger):  # which shows the hyperparameters of its first call only
                text = markdown_table(("setting", "value"), [(key, str(value)) for key, value in settings.items()])
                logger.experiment.add_text("federation/settings", text)
        if trainer.loggers and clients.counts is not None and trainer.current_epoch == 0:
            heat_map = plots.client_heatmap(clients.counts, clients.classes)
            log_figure(trainer, "federation/clients_by_class", heat_map, round=0)

    def set_clients(self, clients: Clients) -> None:
        """Say who the clients are."""
        self._clients = clients
        self.records = {client: self.records.get(client, ClientRecord()) for client in range(len(clients))}

    def client(self, outcome: ClientOutcome) -> None:
        """Note what became of a client in this round."""
        record = self.records[outcome.client]
        record.rounds += 1
        record.seconds = outcome.seconds
        if outcome.error is not None:
            record.failures += 1
            record.last_failure = f"{type(outcome.error).__name__}: {outcome.error}"
        else:
            record.megabytes_up = outcome.num_bytes / 1e6
            record.train_loss = outcome.metrics.get("train_loss", float("nan"))

    def weights(self, weights: dict[int, float]) -> None:
        """Note the clients' weights in this round."""
        for client, weight in weights.items():
            self.records[client].weight = weight

    def log_round(self, trainer: L.Trainer, figures: dict[str, float], training_names: set[str]) -> None:
        """Log a round's figures as ``federation/...``; other callbacks can monitor them.

        They go to the loggers directly: ``self.log`` costs 0.3 ms each, as much as a step of a small network.

        Args:
            trainer: at the end of a training epoch.
            figures: name → value; "round", counted from 0, becomes the x-axis.
            training_names: what the module has logged of its training per epoch.
        """
        named = {f"federation/{name}": value for name, value in figures.items() if name != "round"}
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in named.items()})
        trainer.callback_metrics["round"] = torch.tensor(figures["round"] + 1)
        row = {**named, "round": figures["round"] + 1, "epoch": trainer.current_epoch}
        for logger in trainer.loggers:
            logger.log_metrics(row, step=trainer.global_step - 1)  # the step of Lightning's own epoch-wise figures
            if isinstance(logger, WandbLogger):
                self._draw_over_rounds(logger, training_names | set(trainer.callback_metrics) - {"round"})

    def _draw_over_rounds(self, logger: WandbLogger, names: set[str]) -> None:
        """Make the round the x-axis of these figures in W&B.

        By exact names: of a pattern and Lightning's own "*", which asks for its step, W&B would pick either.
        """
        for name in sorted(names - self._with_axis):
            logger.experiment.define_metric(name, step_metric="round")
        self._with_axis |= names

    def finish(self, trainer: L.Trainer, accuracy: Tensor | None) -> None:
        """Log the table of clients.

        Args:
            trainer: whose loggers get it.
            accuracy: of the global model for each client, shape (clients,); None if unknown.
        """
        if self._clients is None or not trainer.loggers:
            return
        rows = []
        for client, record in self.records.items():
            score = float("nan") if accuracy is None else float(accuracy[client])
            rows.append([
                self._clients.names[client], self._clients.sizes[client], record.rounds, record.failures,
                record.weight, record.train_loss, score, record.seconds, record.megabytes_up, record.last_failure,
            ])
        log_table(trainer, "federation/clients", COLUMNS, rows, round=trainer.current_epoch)

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """The records, for a checkpoint."""
        return {client: vars(record).copy() for client, record in self.records.items()}

    def load_state_dict(self, state: dict[int, dict[str, Any]]) -> None:
        """Restore the records."""
        self.records = {client: ClientRecord(**record) for client, record in state.items()}
