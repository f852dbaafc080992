"""Log of a server over a network: the figures of a federation in one process, under the same names."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning.pytorch.loggers import Logger, WandbLogger

from lightning_fedbayes.callbacks.loggers import note, prepare_wandb
from lightning_fedbayes.callbacks.report import RoundLog, curves_of
from lightning_fedbayes.clients.evaluation import ClientScores
from lightning_fedbayes.core.errors import check_kind
from lightning_fedbayes.server import RoundResult

OF_CLIENTS = ("accuracy", "nll", "ece", "rmse", "coverage", "c_index")
"""Figures of a validation that are logged of each client, too."""


class ServerLog(RoundLog):
    """Logs a server's rounds to Lightning's loggers. Raises FederationError if ``logger`` is none, and no list of any.

    ``numbers`` are site → its client's number, where the server numbers them. Other clients go by their numbers.
    """

    def __init__(self, logger: Logger | Sequence[Logger] | None) -> None:
        super().__init__()
        remedy = "give one of Lightning's loggers, such as WandbLogger(), or a list of them"
        check_kind("logger", logger, Logger | Sequence | None, remedy)
        self.loggers = [logger] if isinstance(logger, Logger) else [*(logger or ())]
        for each in self.loggers:
            check_kind("logger", each, Logger, remedy)
            if isinstance(each, WandbLogger):
                prepare_wandb()

    def end_round(self, result: RoundResult, numbers: Mapping[str, int], clients: int) -> None:
        """Log a round of training, in a federation of so many ``clients``."""
        sites = {number: site for site, number in numbers.items()}
        names = {each.client: sites.get(each.client, str(each.client)) for each in result.outcomes}
        self.see(result, names)
        losses = {names[each.client]: each.metrics.get("train_loss", math.nan) for each in result.outcomes}
        curves = curves_of({"client_train_loss": losses}, clients)
        self.log(self.loggers, result.figures, curves, (), result.round + 1)
        named = {f"federation/{name}": value for name, value in result.figures.items() if name != "round"}
        self._note(result.round + 1, {**named, **curves})

    def scored(self, round: int, scores: ClientScores, numbers: Mapping[str, int]) -> None:
        """Log what most clients have measured of the global posterior, after ``round`` rounds."""
        sites = {str(number): site for site, number in numbers.items()}
        names = [sites.get(name, name) for name in scores.names]
        shared = {name: each for name, each in scores.values.items() if 2 * (~each.isnan()).sum() > len(each)}
        own = {name.removeprefix("val/"): each for name, each in shared.items()}
        own = {name: each for name, each in own.items() if name in OF_CLIENTS}
        figures = {name: scores.mean(name) for name in shared}
        figures |= {f"val/{name}": value for name, value in replace(scores, values=own).summary().items()}
        figures |= curves_of(
            {f"client_{name}": dict(zip(names, each.tolist())) for name, each in own.items()}, len(names)
        )
        self.draw(self.loggers, figures)
        for logger in self.loggers:
            logger.log_metrics({**figures, "round": float(round)}, step=round)
        self._note(round, figures)

    def _note(self, round: int, figures: Mapping[str, float]) -> None:
        note(self.loggers, {"round": round, "figures": figures})
        for logger in self.loggers:
            logger.save()
