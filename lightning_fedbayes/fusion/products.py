r"""Rules that multiply densities, so precisions :math:`1/\sigma_k^2` add up, and α-barycenters.

A point mass has infinite precision. Where clients are point masses, the limit of equal, vanishing variances is taken:
their (weighted) mean with variance 0. Clients with a positive variance do not count there.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, check_number, listed
from lightning_fedbayes.core.posterior import GaussianPosterior, zeros_like
from lightning_fedbayes.fusion.averages import LinearPool
from lightning_fedbayes.fusion.registry import register_fusion
from lightning_fedbayes.fusion.rule import FusionRule, Moments, Posteriors, Statistics, SumRule, add, add_precisions

NODES, FARTHEST = 128, 8.0
"""Nodes of the trapezoidal rule around each client, per parameter, and how many σ the last ones are off."""
ENTRIES = 2**21
"""Number of log densities that are held at once."""
NEGLIGIBLE = 1e-6
"""Distance of α from 0 or 1 below which the limit is taken."""


class _ProductRule(SumRule):
    """A rule on sums of weighted precisions and of precision-weighted means. Point masses are summed separately."""

    by_columns: ClassVar[bool] = True

    scale: ClassVar[str | None] = None
    """Statistic that is divided by the summed precision to give the variance. None: 1."""

    def combine(self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None) -> Moments:
        """Return mean and variance where no client is a point mass. Any values elsewhere."""
        precision = statistics["precision"]
        return statistics["precision_mean"] / precision, (statistics[self.scale] if self.scale else 1) / precision

    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        weight = weight if self.uses_weights else 1.0
        add(statistics, "weight", mean.new_tensor(weight))
        if "max_weight" not in statistics or weight > statistics["max_weight"]:
            statistics["max_weight"] = mean.new_tensor(weight)
        add_precisions(statistics, mean, variance, weight, weight)

    def average(self, statistics: Statistics) -> tuple[Tensor, Tensor] | None:
        return None if "precision" in statistics else (statistics["atom_mean"], statistics["atom_weight"])

    def merge(self, statistics: Statistics, other: Statistics) -> None:
        if not other:
            return
        largest = other["max_weight"]
        largest = torch.maximum(statistics.get("max_weight", largest), largest)
        super().merge(statistics, other)
        statistics["max_weight"] = largest

    def compute(self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None) -> Moments:
        if "atom_weight" not in statistics:
            return self.combine(statistics, like, previous)
        atom_mean = statistics["atom_mean"] / statistics["atom_weight"]
        if "precision" not in statistics:
            return atom_mean, zeros_like(atom_mean)
        atom = statistics["atom_weight"] > 0
        regular = {**statistics, "precision": statistics["precision"].masked_fill(atom, 1)}
        if previous is not None:  # it does not count where clients are point masses
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

    When to use it: like conflation, for clients of different sizes. Its variance is at most the largest client's.

    Source: [FBDL] eq. (16).
    """

    narrows: ClassVar[bool] = True
    scale = "max_weight"


@register_fusion("reverse_kl_barycenter", aliases=("rklb", "log_linear_pool", "llp"))
class ReverseKLBarycenter(_ProductRule):
    r"""Minimiser of :math:`\sum_k \omega_k KL(q\|q_k)`, the weighted geometric mean of the client densities.

    .. math:: \mu = \sigma^2 \sum_k \omega_k \frac{\mu_k}{\sigma_k^2}, \qquad
              \sigma^2 = \Bigl(\sum_k \frac{\omega_k}{\sigma_k^2}\Bigr)^{-1}

    When to use it: clients with a small variance shall count more, parameter by parameter, and identical clients shall
    keep their variance. Under a fixed prior it is too wide after many rounds.

    Source: [BA-BFL] Corollary 1, eq. (8); [FBDL] §2.5.4 (log-linear pooling).
    """

    scale = "weight"


@register_fusion("distributed_weight_consolidation", aliases=("dwc",))
class DistributedWeightConsolidation(_ProductRule):
    r"""Product of the client posteriors with the prior they share counted once.

    .. math:: \frac{1}{\sigma^2} = \sum_k \frac{1}{\sigma_k^2} - \frac{K-1}{\sigma_o^2}, \qquad
              \mu = \sigma^2 \Bigl(\sum_k \frac{\mu_k}{\sigma_k^2} - (K-1)\frac{\mu_o}{\sigma_o^2}\Bigr)

    When to use it: every client started from the global posterior q_o *as its prior* (``prior="global"``). The result
    is then the posterior of the pooled data, exact for conjugate models. Pre-train q_o. It takes no weights.

    Args:
        min_precision: least fused precision, positive. Entries below it get the conflation's mean and the variance
            ``1 / min_precision``. None: a fused precision that is not positive is an error.

    Raises:
        FusionError: no previous posterior, or a fused precision that is not positive, as clients are vaguer than q_o.

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
        total, total_mean = precision, precision_mean = statistics["precision"], statistics["precision_mean"]
        if others:
            prior_mean, prior_variance = previous.flatten()
            precision = total - others / prior_variance
            precision_mean = total_mean - others * torch.where(prior_variance > 0, prior_mean / prior_variance, 0)
        low = precision < (self.min_precision or torch.finfo(precision.dtype).tiny)
        if not low.any():
            return precision_mean / precision, 1 / precision
        if self.min_precision is None:
            raise FusionError(_vague(precision, low, like))
        mean = torch.where(low, total_mean / total, precision_mean / precision)
        return mean, 1 / torch.where(low, self.min_precision, precision)


def _vague(precision: Tensor, low: Tensor, like: GaussianPosterior) -> str:
    """Return the message that names the parameters whose fused precision is not positive."""
    places, sizes = [], [value.numel() for value in like.mean.values()]
    for name, wrong, values in zip(like.mean, low.split(sizes), precision.split(sizes)):
        if bool(wrong.any()):
            places.append(f"'{name}' at {int(wrong.sum())} of {len(wrong)} entries (minimum {values.min():.3g})")
    why = "clients are less certain there than the previous global posterior"
    remedy = "Pre-train it, use prior='global', or pass DistributedWeightConsolidation(min_precision=...)"
    return f"dwc: fused precision is not positive: {listed(places)}: {why}. {remedy}"


@register_fusion("alpha_barycenter", aliases=("hellinger_barycenter",))
class AlphaBarycenter(FusionRule):
    r"""Gaussian with the moments of the minimiser of :math:`\sum_k \omega_k D_\alpha(q_k \| q)`, per parameter.

    .. math:: q(\theta) \propto \Bigl(\sum_k \omega_k\, q_k(\theta)^\alpha\Bigr)^{1/\alpha}, \qquad
              D_\alpha(p\|q) = \frac{1 - \int p^\alpha q^{1-\alpha}}{\alpha (1 - \alpha)}

    α → 0 is ``reverse_kl_barycenter``, with its mass where all clients have some; α = 1 is ``linear_pool``, with its
    mass where any client has some; α = ½, the default, is the Hellinger barycenter. The trapezoidal rule gives
    the moments to three digits for α in [1/4, 1], less outside. Unless α = 1, point masses are fused as for α = 0.

    When to use it: where held-out data are to choose α. It holds all clients of a round and costs O(K² · P) with a
    large constant: for up to about a million parameters.

    Args:
        alpha: α, any finite number; [0, 1] is the range between the two named rules.

    Raises FusionError: ``alpha`` is not finite.
    Source: Amari 2007, "Integration of stochastic models by minimizing α-divergence"; projection: [FBDL] (12)–(14).
    """

    by_columns: ClassVar[bool] = True

    def __init__(self, alpha: float = 0.5) -> None:
        check_number("alpha_barycenter: alpha", alpha, error=FusionError)
        self.alpha = alpha

    def fuse(self, posteriors: Posteriors, weights: Tensor, previous: GaussianPosterior | None) -> GaussianPosterior:
        if abs(self.alpha - 1) < NEGLIGIBLE:
            return LinearPool().fuse(posteriors, weights, previous)
        limit = ReverseKLBarycenter().fuse(posteriors, weights, previous)
        if abs(self.alpha) < NEGLIGIBLE:
            return limit
        mean, variance = (each.clone() for each in limit.flatten())
        clients = [posterior.flatten() for posterior in posteriors]
        random = torch.stack([client[1] for client in clients]).amin(0) > 0
        means = torch.stack([client[0][random] for client in clients])
        variances = torch.stack([client[1][random] for client in clients])
        middle = mean[random], variance[random]
        width = max(1, ENTRIES // (len(clients) * (len(clients) + 1) * NODES))
        blocks = zip(*(each.split(width, -1) for each in (means, variances, *middle)), strict=True)
        parts = [alpha_moments(m, v, centre, spread, weights, self.alpha) for m, v, centre, spread in blocks]
        if parts:
            mean[random], variance[random] = (torch.cat(each) for each in zip(*parts, strict=True))
        return posteriors[0].unflatten(mean, variance)


def alpha_moments(
    means: Tensor, variances: Tensor, middle: Tensor, spread: Tensor, weights: Tensor, alpha: float
) -> tuple[Tensor, Tensor]:
    r"""Return mean and variance, (P,), of :math:`(\sum_k \omega_k q_k^\alpha)^{1/\alpha}`, normalised, per parameter.

    The integrals are expectations under an even mixture of the clients, (K, P), and the reverse-KL barycenter
    (``middle``, ``spread``), which is nowhere much smaller than the integrand.
    """
    nodes = torch.linspace(-FARTHEST, FARTHEST, NODES, dtype=means.dtype, device=means.device)
    masses = (-nodes.square() / 2).exp()
    centres, widths = torch.cat([means, middle[None]]), torch.cat([variances, spread[None]]).sqrt()
    shares = torch.cat([weights.to(means) / 2, means.new_tensor([0.5])])
    around = nodes[:, None] * widths[:, None]  # node n around each centre: shape (K + 1, nodes, P)
    from_clients = ((centres - means[:, None])[:, :, None] + around).flatten(1, 2)  # exact where a client is a spike
    points = ((centres - middle)[:, None] + around).flatten(0, 1)
    mass = (shares[:, None] * masses / masses.sum()).flatten()
    log_clients = _log_density(from_clients, variances[:, None])
    log_weights = weights.to(means).log()[:, None, None]
    log_mixture = torch.logaddexp((log_weights + log_clients).logsumexp(0), _log_density(points, spread)) - math.log(2)
    log_ratio = (log_weights + alpha * log_clients).logsumexp(0) / alpha - log_mixture
    values = mass[:, None] * (log_ratio - log_ratio.amax(0)).exp()
    values = values / values.sum(0)
    offset = (values * points).sum(0)
    return middle + offset, (values * (points - offset).square()).sum(0)


def _log_density(distance: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (distance.square() / variance + variance.log() + math.log(2 * math.pi))
