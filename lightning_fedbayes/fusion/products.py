r"""Rules that multiply densities: they add precisions :math:`1/\sigma_k^2`.

A point mass has infinite precision. Where clients are point masses the limit of equal, vanishing variances is taken:
the (weighted) mean of the point masses, with variance 0; clients with a positive variance do not count there.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, check_number, listed
from lightning_fedbayes.core.posterior import GaussianPosterior, zeros_like
from lightning_fedbayes.fusion.registry import register_fusion
from lightning_fedbayes.fusion.rule import Moments, Statistics, SumRule, add_number, add_precisions


class _ProductRule(SumRule):
    """A rule on sums of weighted precisions and of precision-weighted means; point masses are summed apart."""

    by_columns: ClassVar[bool] = True

    scale: ClassVar[str | None] = None
    """Statistic that the variance is a multiple of, over the summed precision; None: of 1."""

    def combine(self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None) -> Moments:
        """Return mean and variance where no client is a point mass; any values elsewhere."""
        precision = statistics["precision"]
        return statistics["precision_mean"] / precision, (statistics[self.scale] if self.scale else 1) / precision

    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        """See :meth:`SumRule.update`."""
        weight = weight if self.uses_weights else 1.0
        add_number(statistics, "weight", weight, mean)
        if "max_weight" not in statistics or weight > statistics["max_weight"]:
            statistics["max_weight"] = mean.new_tensor(weight)
        add_precisions(statistics, mean, variance, weight, weight)

    def average(self, statistics: Statistics) -> tuple[Tensor, Tensor] | None:
        """See :meth:`SumRule.average`; the sums of point masses contain it."""
        return None if "precision" in statistics else (statistics["atom_mean"], statistics["atom_weight"])

    def merge(self, statistics: Statistics, other: Statistics) -> None:
        """See :meth:`SumRule.merge`; the largest weight is a maximum, all else are sums."""
        if not other:
            return
        largest = other["max_weight"]
        largest = torch.maximum(statistics.get("max_weight", largest), largest)
        super().merge(statistics, other)
        statistics["max_weight"] = largest

    def compute(self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None) -> Moments:
        """See :meth:`SumRule.compute`."""
        if "atom_weight" not in statistics:
            return self.combine(statistics, like, previous)
        atom_mean = statistics["atom_mean"] / statistics["atom_weight"]
        if "precision" not in statistics:
            return atom_mean, zeros_like(atom_mean)
        atom = statistics["atom_weight"] > 0
        regular = {**statistics, "precision": statistics["precision"].masked_fill(atom, 1)}
        if previous is not None:  # which knows nothing where clients are point masses
            before, spread = previous.flatten()
            previous = previous.unflatten(before, spread.masked_fill(atom, torch.inf))
        mean, variance = self.combine(regular, like, previous)
        return torch.where(atom, atom_mean, mean), variance.masked_fill(atom, 0)


@register_fusion("conflation", aliases=("inverse_variance",))
class Conflation(_ProductRule):
    r"""Normalised product of the client densities, inverse-variance weighting.

    .. math:: \mu = \frac{\sum_k \mu_k / \sigma_k^2}{\sum_k 1/\sigma_k^2}, \qquad
              \sigma^2 = \frac{1}{\sum_k 1/\sigma_k^2}

    When to use it: clients are independent measurements of the same parameters. It takes no weights. K identical
    clients give variance / K, so over many rounds the posterior can grow over-confident.

    Source: [FBDL] eq. (15).
    """

    narrows: ClassVar[bool] = True
    uses_weights: ClassVar[bool] = False


@register_fusion("weighted_conflation", aliases=("wc",))
class WeightedConflation(_ProductRule):
    r"""Conflation of tempered clients, scaled by the largest weight.

    .. math:: \mu = \frac{\sum_k \omega_k \mu_k / \sigma_k^2}{\sum_k \omega_k / \sigma_k^2}, \qquad
              \sigma^2 = \frac{\max_k \omega_k}{\sum_k \omega_k/\sigma_k^2}

    When to use it: like conflation, for clients of different sizes. Its variance is at most that of the client with the
    largest weight.

    Source: [FBDL] eq. (16).
    """

    narrows: ClassVar[bool] = True
    scale = "max_weight"


@register_fusion("reverse_kl_barycenter", aliases=("rklb", "log_linear_pool", "llp"))
class ReverseKLBarycenter(_ProductRule):
    r"""Minimiser of :math:`\sum_k \omega_k KL(q\|q_k)`, the weighted geometric mean of the client densities.

    .. math:: \mu = \sigma^2 \sum_k \omega_k \frac{\mu_k}{\sigma_k^2}, \qquad
              \sigma^2 = \Bigl(\sum_k \frac{\omega_k}{\sigma_k^2}\Bigr)^{-1}

    When to use it: clients with a small variance are to count more, parameter by parameter, and identical clients to
    leave the variance as it is. Under a fixed prior it is too wide after many rounds.

    Source: [BA-BFL] Corollary 1, eq. (8); [FBDL] §2.5.4 (log-linear pooling).
    """

    scale = "weight"


@register_fusion("distributed_weight_consolidation", aliases=("dwc",))
class DistributedWeightConsolidation(_ProductRule):
    r"""Product of the client posteriors with the prior they share counted once.

    .. math:: \frac{1}{\sigma^2} = \sum_k \frac{1}{\sigma_k^2} - \frac{K-1}{\sigma_o^2}, \qquad
              \mu = \sigma^2 \Bigl(\sum_k \frac{\mu_k}{\sigma_k^2} - (K-1)\frac{\mu_o}{\sigma_o^2}\Bigr)

    When to use it: every client started from the global posterior q_o *as its prior* (``prior="global"``); then the
    result is the posterior of the pooled data, exactly so for conjugate models. Pre-train q_o. It takes no weights.

    Args:
        min_precision: least fused precision, positive; entries below it get the conflation's mean and the variance
            ``1 / min_precision``. None: a fused precision that is not positive is an error.

    Raises:
        FusionError: no previous posterior; or a fused precision that is not positive, because clients are vaguer
            there than q_o.

    Source: [FBDL] eq. (17); McClure et al. 2018.
    """

    uses_weights: ClassVar[bool] = False
    needs_previous: ClassVar[bool] = True

    def __init__(self, min_precision: float | None = None) -> None:
        if min_precision is not None:
            why = "None turns the floor off"
            check_number("dwc: min_precision", min_precision, "(0, inf)", error=FusionError, why=why)
        self.min_precision = min_precision

    def combine(self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None) -> Moments:
        """See :meth:`_ProductRule.combine`: eq. (17)."""
        assert previous is not None, "FusionAccumulator checks it before any client is added"
        others = float(statistics["weight"]) - 1
        total, total_mean = statistics["precision"], statistics["precision_mean"]
        if others:
            prior_mean, prior_variance = previous.flatten()
            precision = total - others / prior_variance
            precision_mean = total_mean - others * torch.where(prior_variance > 0, prior_mean / prior_variance, 0)
        else:
            precision, precision_mean = total, total_mean
        low = precision < (self.min_precision or torch.finfo(precision.dtype).tiny)
        if not low.any():
            return precision_mean / precision, 1 / precision
        if self.min_precision is None:
            raise FusionError(_vague(precision, low, like))
        mean = torch.where(low, total_mean / total, precision_mean / precision)
        return mean, 1 / torch.where(low, self.min_precision, precision)


def _vague(precision: Tensor, low: Tensor, like: GaussianPosterior) -> str:
    """Return the message that names the parameters whose fused precision is not positive."""
    places, start = [], 0
    for name, value in like.mean.items():
        part = slice(start, start + value.numel())
        start += value.numel()
        if bool(low[part].any()):
            places.append(
                f"'{name}' at {int(low[part].sum())} of {value.numel()} entries (minimum {precision[part].min():.3g})"
            )
    return (
        f"dwc: fused precision is not positive: {listed(places)}: clients are less certain there than the previous "
        "global posterior. Pre-train it, use prior='global', or pass "
        "DistributedWeightConsolidation(min_precision=...)"
    )
