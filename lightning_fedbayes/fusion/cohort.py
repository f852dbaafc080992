"""What a rule is given of a round, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_fedbayes.posterior import GaussianPosterior

Memory = dict[str, Any]
"""What a rule remembers from round to round: tensors, numbers, strings, and dicts and lists of them."""


@dataclass(frozen=True)
class Cohort:
    """The clients of a round.

    Args:
        posteriors: one per client, of equal names and shapes, all values finite.
        weights: shape (clients,), float64, positive, of sum 1.
        previous: the global posterior that the clients started from, if it is known.
        clients: their numbers, by which a rule with a memory knows them again.
    """

    posteriors: Sequence[GaussianPosterior]
    weights: Tensor
    previous: GaussianPosterior | None
    clients: tuple[int, ...]


@dataclass(frozen=True)
class Fused:
    """The outcome of a fusion.

    Args:
        posterior: the global posterior.
        reliability: client → the share of the fusion that the rule gives it, at least 0, of sum 1; empty if the rule
            does not judge.
        excluded: client → why the rule left it out.
        memory: what the rule remembers for the next round.
    """

    posterior: GaussianPosterior
    reliability: dict[int, float] = field(default_factory=dict)
    excluded: dict[int, str] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)
