"""Disagreement of the clients of a round: how far their means lie apart, as one number."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedbayes.core.exchange.reduction import Statistics
from lightning_fedbayes.fusion.averages import add_disagreement
from lightning_fedbayes.fusion.rule import add


class Disagreement:
    """Running mean of the clients' means, and the disagreement Σω‖μ_k − μ‖² as one number, by West's recursion.

    Args:
        borrows: take the mean from the rule's sums where they contain it. False where other processes have clients, or
            where sums that contain it may cease to.
    """

    def __init__(self, borrows: bool) -> None:
        self._borrows = borrows
        self._weights: list[float] = []  # of each piece, as all lists here
        self._means: list[Tensor] = []
        self._within: list[Tensor] = []

    def add(self, place: int, mean: Tensor, weight: float, known: tuple[Tensor, Tensor] | None) -> None:
        """Add a client's piece number ``place``; see :data:`~lightning_fedbayes.fusion.accumulator.Watch`."""
        if place == len(self._weights):
            self._weights.append(weight)
            self._within.append(mean.new_zeros(()))
            if not self._borrows or known is None:
                self._means.append(mean.clone())
            return
        before, after = self._weights[place], self._weights[place] + weight
        self._weights[place] = after
        if self._means:
            step = mean - self._means[place]
            self._means[place].add_(step, alpha=weight / after)
            spread = before * weight / after
        else:  # the distance to the mean with this client is shorter by before / after
            assert known is not None
            step = torch.sub(mean, known[0], alpha=1 / float(known[1]))
            spread = weight * after / before
        self._within[place].add_(torch.dot(step, step), alpha=spread)

    def statistics(self, with_mean: bool) -> Statistics:
        """Return weight and disagreement of these clients, and their mean where other processes have others."""
        if not self._weights:
            return {}
        within = torch.stack(self._within).sum()
        sums = {"weight": within.new_tensor(self._weights[0]), "within": within}
        return {**sums, "mean": torch.cat(self._means)} if with_mean else sums


def merge_disagreement(statistics: Statistics, other: Statistics) -> None:
    """Merge the disagreement of another process's clients into ``statistics``, in place."""
    add_disagreement(statistics, other["mean"], other["weight"])
    add(statistics, "within", other["within"])
