"""What a fusion rule thinks of each client, round by round, as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch

from lightning_fedbayes import plots
from lightning_fedbayes.callbacks.pictures import log_figure, log_table
from lightning_fedbayes.engines.federation import Federation

COLUMNS = ("round", "client", "reliability", "left_out")


class ReliabilityReport:
    """Keeps the reliabilities that a rule infers, and why it left clients out."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, dict[int, float], dict[int, str]]] = []

    def note(self, federation: Federation) -> None:
        """Note the round that was just fused, if its rule judges."""
        if federation.judged:
            self.rounds.append((federation.round, dict(federation.weights), dict(federation.excluded)))

    def finish(self, trainer: L.Trainer, names: Sequence[str]) -> None:
        """Log the table and the picture of all rounds.

        Args:
            trainer: whose loggers get them.
            names: of the clients.
        """
        if not self.rounds or not trainer.loggers:
            return
        rows = [
            [round + 1, names[client], share, excluded.get(client, "")]
            for round, shares, excluded in self.rounds
            for client, share in shares.items()
        ]
        log_table(trainer, "federation/reliability_by_round", COLUMNS, rows, round=trainer.current_epoch)
        table = torch.full((len(names), self.rounds[-1][0] + 1), torch.nan)
        for round, shares, _ in self.rounds:
            for client, share in shares.items():
                table[client, round] = share
        log_figure(trainer, "federation/reliability", plots.client_reliability(table, names), trainer.current_epoch)

    def state_dict(self) -> list[dict[str, Any]]:
        """The rounds so far, for a checkpoint."""
        return [{"round": round, "shares": shares, "excluded": why} for round, shares, why in self.rounds]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restore the rounds."""
        self.rounds = [(each["round"], dict(each["shares"]), dict(each["excluded"])) for each in state]
