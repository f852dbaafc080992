"""A fusion rule that only the studies need."""

from __future__ import annotations

from torch import Tensor

import lightning_fedbayes as fb
from lightning_fedbayes.fusion import SumRule
from lightning_fedbayes.fusion.rule import Statistics, add


@fb.register_fusion("normalised_weighted_sum")
class NormalisedWeightedSum(SumRule):
    r"""The weighted sum as the code of [BA-BFL] has it, :math:`\sigma^2 = \sum\omega^2\sigma_k^2 / \sum\omega^2`.

    The variance is not divided by the number of clients.
    """

    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        """Add a client."""
        add(statistics, "weight", mean.new_tensor(weight))
        add(statistics, "squares", mean.new_tensor(weight * weight))
        add(statistics, "mean", mean, weight)
        add(statistics, "variance", variance, weight * weight)

    def compute(
        self, statistics: Statistics, like: fb.GaussianPosterior, previous: fb.GaussianPosterior | None
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance."""
        return statistics["mean"] / statistics["weight"], statistics["variance"] / statistics["squares"]
