"""Rules that infer each client's noise from the updates of all rounds."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion.cohort import Cohort, Fused, Memory
from lightning_fedbayes.fusion.distances import consensus
from lightning_fedbayes.fusion.gram import combine, gram_of, squared_distances
from lightning_fedbayes.fusion.gram_rule import judged
from lightning_fedbayes.fusion.noise_scale import near_clients
from lightning_fedbayes.fusion.remember import remember
from lightning_fedbayes.fusion.rule import JudgingRule

NEGLIGIBLE = 0.01
"""Part of an equal share below which a client is reported as left out."""


class InferredRule(JudgingRule):
    r"""A rule under the model :math:`x_{ij} \sim N(y_i, \cdot)`: updates are noisy observations of one ground truth.

    An update is the difference of a client's mean to the previous global mean (to 0 if that is not known). All that
    such a rule needs of it are squared distances between clients, and to the origin. What it remembers are averages
    of the clients' products around each round's consensus, per pair, so clients may miss rounds.

    Variances of probabilistic parameters are averaged with the inferred shares.

    Args:
        memory: how much a round counts in the next, from 0 (every round is judged alone) to 1 (all rounds count the
            same, as in [Untrusted] Algorithm 1). Less than 1 forgets, where clients change.

    Raises:
        FusionError: ``memory`` is not in [0, 1].
    """

    by_columns: ClassVar[bool] = True

    def __init__(self, memory: float = 1.0) -> None:
        if not 0 <= memory <= 1:
            raise FusionError(f"memory={memory}: how much a round counts in the next lies in [0, 1]")
        self.memory = memory

    @abstractmethod
    def infer(self, distances: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The coefficients of the ground truth, and what each client counts.

        Args:
            distances: shape (K + 1, K + 1), float64: mean squared differences per parameter between the K clients
                and the origin, which comes last.
            size: number of parameters P.

        Returns: coefficients of the updates, shape (K,), and shares, shape (K,), none negative, of sum 1.
        """

    def apply(self, cohort: Cohort, memory: Memory) -> Fused:
        """See :meth:`FusionRule.apply`."""
        gram = gram_of(cohort.posteriors, cohort.previous)
        now = squared_distances(gram.products) / max(gram.size, 1)
        near = near_clients(now)
        points = torch.cat([near, torch.ones(1, dtype=torch.bool)])
        clients = tuple(client for client, kept in zip(cohort.clients, near.tolist(), strict=True) if kept)
        distances, remembered = remember(memory, clients, now[points][:, points], self.memory)
        coefficients, shares = torch.zeros(2, len(near), dtype=torch.float64)
        coefficients[near], shares[near] = self._infer(distances, gram.size)
        reasons = {
            position: f"its inferred share of {share:.2g} is less than a hundredth of an equal one"
            for position, share in enumerate(shares.tolist())
            if share < NEGLIGIBLE / len(shares)
        }
        mean = combine(cohort.posteriors, coefficients, cohort.previous)
        return judged(cohort, mean, shares, reasons, remembered)

    def _infer(self, distances: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """As :meth:`infer`; equal shares where all are one, and the consensus where the rule finds no answer."""
        count = len(distances) - 1
        if count == 1 or not bool(distances[:-1, :-1].any()):
            equal = torch.full((count,), 1 / count, dtype=torch.float64)
            return equal, equal
        inferred = self.infer(distances, size)
        if all(bool(torch.isfinite(each).all()) for each in inferred):
            return inferred
        start = consensus(distances)
        return start, start
