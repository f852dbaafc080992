r"""Rules whose mean is the weighted average of the client means, :math:`\mu = \sum_k \omega_k \mu_k`.

They differ in the power mean that makes the variance. A point mass (σ² = 0) needs no special case.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from lightning_fedbayes.fusion.registry import register_fusion
from lightning_fedbayes.fusion.rule import Statistics, SumRule, add
from lightning_fedbayes.posterior import GaussianPosterior


class _AverageRule(SumRule):
    """Weighted average of the means, and one more weighted sum for the variance."""

    weight_power = 1

    @abstractmethod
    def transform(self, variance: Tensor) -> Tensor:
        """What is summed over clients for the variance, shape (P,)."""

    @abstractmethod
    def invert(self, average: Tensor) -> Tensor:
        """The variance from the weighted average of :meth:`transform`, shape (P,)."""

    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        """See :meth:`SumRule.update`."""
        add(statistics, "weight", mean.new_tensor(weight))
        add(statistics, "mean", mean, weight)
        add(statistics, "spread", self.transform(variance), weight**self.weight_power)

    def compute(
        self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`SumRule.compute`."""
        weight = statistics["weight"]
        return statistics["mean"] / weight, self.invert(statistics["spread"] / weight**self.weight_power)


@register_fusion("weighted_average", aliases=("nwa", "eaa", "fedavg", "centered_linear_pool"))
class WeightedAverage(_AverageRule):
    r"""Average of means and of variances: :math:`\sigma^2 = \sum_k \omega_k \sigma_k^2`.

    When to use it: the default everybody knows (FedAvg on deterministic networks); with many local epochs as good as
    any. With few, the variance hardly shrinks from round to round, and training is slow.

    Source: [FBDL] eq. (10) "naive weighted averaging"; [BA-BFL] "EAA".
    """

    def transform(self, variance: Tensor) -> Tensor:
        """σ²."""
        return variance

    def invert(self, average: Tensor) -> Tensor:
        """σ² itself."""
        return average


@register_fusion("weighted_sum", aliases=("ws", "gaa"))
class WeightedSum(WeightedAverage):
    r"""Distribution of the weighted sum of independent draws: :math:`\sigma^2 = \sum_k \omega_k^2 \sigma_k^2`.

    When to use it: few local epochs (fast, well calibrated in [FBDL]). K equal clients give variance / K.

    Source: [FBDL] eq. (11); [BA-BFL] "GAA".
    """

    weight_power = 2


@register_fusion("wasserstein_barycenter", aliases=("wb",))
class WassersteinBarycenter(_AverageRule):
    r"""Minimiser of :math:`\sum_k \omega_k W_2^2(q_k, q)`: :math:`\sigma = \sum_k \omega_k \sigma_k`.

    When to use it: a barycenter that is defined for point masses and keeps the clients' spread.

    Source: [BA-BFL] Theorem 2, eq. (9).
    """

    def transform(self, variance: Tensor) -> Tensor:
        """σ."""
        return variance.sqrt()

    def invert(self, average: Tensor) -> Tensor:
        """(Σωσ)²."""
        return average.square()


@register_fusion("log_variance_average", aliases=("aalv",))
class LogVarianceAverage(_AverageRule):
    r"""Geometric mean of the variances: :math:`\sigma^2 = \exp \sum_k \omega_k \log \sigma_k^2`.

    When to use it: variances that differ by orders of magnitude. One point mass makes the fused variance 0.

    Source: [BA-BFL] "AALV".
    """

    def transform(self, variance: Tensor) -> Tensor:
        """log σ², −∞ for a point mass."""
        return torch.log(variance)

    def invert(self, average: Tensor) -> Tensor:
        """exp Σω log σ²."""
        return torch.exp(average)
