"""Rules whose variance holds the clients' disagreement: the linear pool and the Gaussian fit."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from lightning_fedbayes.fusion.registry import register_fusion
from lightning_fedbayes.fusion.rule import Statistics, SumRule, add
from lightning_fedbayes.posterior import GaussianPosterior


@register_fusion("linear_pool", aliases=("lp", "kl_barycenter"))
class LinearPool(SumRule):
    r"""Moments of the mixture :math:`\sum_k \omega_k q_k`, the minimiser of :math:`\sum_k \omega_k KL(q_k\|q)`.

    .. math:: \mu = \sum_k \omega_k \mu_k, \qquad
              \sigma^2 = \sum_k \omega_k \bigl(\sigma_k^2 + (\mu_k - \mu)^2\bigr)

    When to use it: the global posterior shall say how much clients disagree; its predictions are under-confident.
    The disagreement is accumulated by West's weighted form of Welford's recursion, which does not cancel.

    Source: [FBDL] eqs. (12)–(14).
    """

    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        """See :meth:`SumRule.update`."""
        add_disagreement(statistics, mean, mean.new_tensor(weight))
        add(statistics, "variance", variance, weight)

    def merge(self, statistics: Statistics, other: Statistics) -> None:
        """See :meth:`SumRule.merge`; pairwise form of Chan, Golub and LeVeque."""
        if not other:
            return
        if not statistics:
            statistics.update({key: value.clone() for key, value in other.items()})
            return
        add_disagreement(statistics, other["mean"], other["weight"])
        add(statistics, "disagreement", other["disagreement"])
        if "variance" in other:
            add(statistics, "variance", other["variance"])

    def compute(
        self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`SumRule.compute`."""
        return statistics["mean"], (statistics["disagreement"] + statistics["variance"]) / statistics["weight"]


@register_fusion("gaussian_fit", aliases=("fedag",))
class GaussianFit(LinearPool):
    r"""Gaussian fitted to the client parameters: their mean and population variance.

    .. math:: \mu = \tfrac1K \sum_k \mu_k, \qquad \sigma^2 = \tfrac1K \sum_k (\mu_k - \mu)^2

    When to use it: clients that train ordinary deterministic networks, uncertainty wanted all the same. It takes no
    weights, and of a probabilistic client only the mean.

    Source: [FedAG] Algorithm 1, line 9.
    """

    uses_weights: ClassVar[bool] = False

    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        """See :meth:`SumRule.update`."""
        add_disagreement(statistics, mean, mean.new_tensor(1.0))

    def compute(
        self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`SumRule.compute`."""
        return statistics["mean"], statistics["disagreement"] / statistics["weight"]


def add_disagreement(statistics: Statistics, mean: Tensor, weight: Tensor) -> None:
    """Add a group of clients of this mean and total weight to the running mean and Σω(μ_k − μ)²."""
    if "mean" not in statistics:
        statistics.update(weight=weight.clone(), mean=mean.clone(), disagreement=mean.new_zeros(mean.shape))
        return
    before = statistics["weight"]
    total = before + weight
    step = mean - statistics["mean"]
    statistics["mean"].add_(step, alpha=float(weight / total))
    statistics["disagreement"].addcmul_(step, step, value=float(before * weight / total))
    statistics["weight"] = total
