r"""Rules whose mean is the weighted average of the client means, :math:`\mu = \sum_k \omega_k \mu_k`.

The variance is a power mean of the clients' variances or, for the linear pool and the Gaussian fit, contains the
clients' disagreement. Point masses (σ² = 0) need no special case.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.posterior import PIECE, GaussianPosterior
from lightning_fedbayes.fusion.registry import register_fusion
from lightning_fedbayes.fusion.rule import Moments, Statistics, SumRule, add, of_zeros


class _AverageRule(SumRule):
    """Weighted average of the means, and another weighted sum for the variance."""

    by_columns: ClassVar[bool] = True
    weight_power = 1

    transform: Callable[[Tensor], Tensor] = staticmethod(torch.positive)
    """Variance → the term that is summed over clients."""
    invert: Callable[[Tensor], Tensor] = staticmethod(torch.positive)
    """Weighted average of these terms → the variance."""

    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        add(statistics, "weight", mean.new_tensor(weight))
        add(statistics, "mean", mean, weight)
        add(statistics, "spread", self.transform(of_zeros(variance)), weight**self.weight_power)

    def compute(self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None) -> Moments:
        weight, mean = statistics["weight"], statistics["mean"]
        variance = self.invert(statistics["spread"] / weight**self.weight_power)
        return mean / weight, variance.expand(mean.shape)

    def average(self, statistics: Statistics) -> tuple[Tensor, Tensor] | None:
        return statistics["mean"], statistics["weight"]


@register_fusion("weighted_average", aliases=("nwa", "eaa", "fedavg", "centered_linear_pool"))
class WeightedAverage(_AverageRule):
    r"""Average of means and of variances: :math:`\sigma^2 = \sum_k \omega_k \sigma_k^2`.

    When to use it: on deterministic networks, where it is FedAvg.

    Source: [FBDL] eq. (10) "naive weighted averaging"; [BA-BFL] "EAA".
    """


@register_fusion("weighted_sum", aliases=("ws", "gaa"))
class WeightedSum(WeightedAverage):
    r"""Distribution of the weighted sum of independent draws: :math:`\sigma^2 = \sum_k \omega_k^2 \sigma_k^2`.

    When to use it: to compare with [FBDL]. K equal clients give variance / K.

    Source: [FBDL] eq. (11); [BA-BFL] "GAA".
    """

    narrows: ClassVar[bool] = True
    weight_power = 2


@register_fusion("wasserstein_barycenter", aliases=("wb",))
class WassersteinBarycenter(_AverageRule):
    r"""Minimiser of :math:`\sum_k \omega_k W_2^2(q_k, q)`: :math:`\sigma = \sum_k \omega_k \sigma_k`.

    When to use it: for a barycenter that is defined for point masses and keeps the clients' spread.

    Source: [BA-BFL] Theorem 2, eq. (9).
    """

    transform, invert = staticmethod(torch.sqrt), staticmethod(torch.square)


@register_fusion("log_variance_average", aliases=("aalv",))
class LogVarianceAverage(_AverageRule):
    r"""Geometric mean of the variances: :math:`\sigma^2 = \exp \sum_k \omega_k \log \sigma_k^2`.

    When to use it: variances differ by orders of magnitude. One point mass makes the fused variance 0.

    Source: [BA-BFL] "AALV".
    """

    transform, invert = staticmethod(torch.log), staticmethod(torch.exp)


@register_fusion("linear_pool", aliases=("lp", "kl_barycenter"))
class LinearPool(SumRule):
    r"""Moments of the mixture :math:`\sum_k \omega_k q_k`, the minimiser of :math:`\sum_k \omega_k KL(q_k\|q)`.

    .. math:: \mu = \sum_k \omega_k \mu_k, \qquad \sigma^2 = \sum_k \omega_k \bigl(\sigma_k^2 + (\mu_k - \mu)^2\bigr)

    When to use it: the global variance shall contain the clients' disagreement. West's weighted form of Welford's
    recursion accumulates it without cancellation.

    Source: [FBDL] eqs. (12)–(14).
    """

    by_columns: ClassVar[bool] = True

    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        add_disagreement(statistics, mean, weight)
        add(statistics, "variance", of_zeros(variance), weight)

    def merge(self, statistics: Statistics, other: Statistics) -> None:
        """See :meth:`SumRule.merge`. Pairwise form of Chan, Golub and LeVeque."""
        if not other:
            return
        if not statistics:
            statistics.update({key: value.clone() for key, value in other.items()})
            return
        add_disagreement(statistics, other["mean"], other["weight"])
        add(statistics, "disagreement", other["disagreement"])
        if "variance" in other:
            add(statistics, "variance", other["variance"])

    def average(self, statistics: Statistics) -> tuple[Tensor, Tensor] | None:
        return statistics["mean"], statistics["mean"].new_ones(())

    def compute(self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None) -> Moments:
        return statistics["mean"], (statistics["disagreement"] + statistics["variance"]) / statistics["weight"]


@register_fusion("gaussian_fit", aliases=("fedag",))
class GaussianFit(LinearPool):
    r"""Gaussian fitted to the client parameters: their mean and population variance.

    .. math:: \mu = \tfrac1K \sum_k \mu_k, \qquad \sigma^2 = \tfrac1K \sum_k (\mu_k - \mu)^2

    When to use it: clients train deterministic networks, and the global posterior shall be probabilistic. It takes no
    weights, and uses only the mean of a probabilistic client.

    Source: [FedAG] Algorithm 1, line 9.
    """

    keeps_prior: ClassVar[bool] = False
    uses_weights: ClassVar[bool] = False

    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        add_disagreement(statistics, mean, 1.0)

    def compute(self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None) -> Moments:
        return statistics["mean"], statistics["disagreement"] / statistics["weight"]


def add_disagreement(statistics: Statistics, mean: Tensor, weight: Tensor | float) -> None:
    """Add clients of mean ``mean`` and total weight ``weight`` to the running mean and Σω(μ_k − μ)²."""
    weight = float(weight)
    if "mean" not in statistics:
        statistics.update(weight=mean.new_tensor(weight), mean=mean.clone(), disagreement=mean.new_zeros(mean.shape))
        return
    before = float(statistics["weight"])
    total = before + weight
    share, spread = weight / total, before * weight / total
    pieces = (each.split(PIECE) for each in (mean, statistics["mean"], statistics["disagreement"]))
    for new, average, disagreement in zip(*pieces):  # piece by piece, so that the step stays in the cache
        step = new - average
        average.add_(step, alpha=share)
        disagreement.addcmul_(step, step, value=spread)
    statistics["weight"] = mean.new_tensor(total)
