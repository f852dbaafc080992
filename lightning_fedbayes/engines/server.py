"""What a server is told once: how it fuses, weighs and bears failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_fedbayes.engines.selection import AutoFusion, names_of
from lightning_fedbayes.fusion import FusionRule
from lightning_fedbayes.weighting import CohortWeights

PriorPolicy = Literal["fixed", "global"]


@dataclass(frozen=True)
class Server:
    """How the server runs its rounds; see :class:`~lightning_fedbayes.FederatedBayes` for each argument."""

    rule: FusionRule | AutoFusion
    weighting: str | CohortWeights = "train_size"
    prior: PriorPolicy = "fixed"
    min_clients: int = 1
    max_failed_rounds: int = 3

    @property
    def rule_name(self) -> str:
        """The name of its rule, by which the rule's memory is known again."""
        return "auto" if isinstance(self.rule, AutoFusion) else next(names_of([self.rule]))
