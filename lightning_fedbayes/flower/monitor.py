"""Best global posterior of a federation over Flower, and the end of a federation that no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_fedbayes.core.errors import FederationError, check_at_least, check_choice, check_kind, nearest
from lightning_fedbayes.server import Server


@dataclass(frozen=True)
class Monitor:
    """Figure of the clients' validation that tells the best round.

    Args:
        name: of the figure; None: there is no best round.
        mode: "min" or "max".
        patience: rounds without a better one after which the federation stops; None: never.

    Raises:
        FederationError: an argument is out of range, or nothing is evaluated.
    """

    name: str | None
    mode: Literal["min", "max"]
    patience: int | None

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("min", "max"))
        if self.name is not None:
            check_kind("monitor", self.name, str, "give the name of a figure, such as 'val/nll'")
        if self.patience is not None:
            check_at_least("patience", self.patience, 1)
            if self.name is None:
                raise FederationError(f"patience={self.patience} with monitor=None: say which figure, as by 'val/nll'")

    def noted(self, best: Mapping[str, Any], figures: Mapping[str, Any], server: Server) -> dict[str, Any]:
        """Return the best round after a further one: "score", "round" from 1, "posterior", "buffers", and "scored".

        "scored" is the last round with scores.

        Args:
            best: the best round before; empty for none.
            figures: of the clients' validation; empty without answers or evaluation.
            server: after the round.

        Raises:
            FederationError: the figure is missing.
        """
        if self.name is None or not figures:
            return {**best}
        if self.name not in figures:
            raise FederationError(f"monitor='{self.name}': clients log no such figure; {nearest(self.name, figures)}")
        score, scored = float(figures[self.name]), {"scored": server.rounds}
        if best and (score >= best["score"] if self.mode == "min" else score <= best["score"]):
            return {**best, **scored}
        kept = {"posterior": server.posterior.state_dict(), "buffers": dict(server.buffers)}
        return {"score": score, "round": server.rounds, **kept, **scored}

    def is_over(self, best: Mapping[str, Any]) -> bool:
        """Return True if the federation stops."""
        return bool(best) and self.patience is not None and best["scored"] - best["round"] >= self.patience
