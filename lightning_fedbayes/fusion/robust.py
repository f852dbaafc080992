"""Robust rules, which bound how far a minority of clients can move the global posterior, and pre-aggregation."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, check_at_least, check_number
from lightning_fedbayes.core.posterior import GaussianPosterior, is_zero, zeros_like
from lightning_fedbayes.fusion import gram as grams
from lightning_fedbayes.fusion.averages import WeightedAverage
from lightning_fedbayes.fusion.gram import Gram, GramRule, columns, fused_by_shares, gram_of, points_of, weighted_sum
from lightning_fedbayes.fusion.registry import get_rule, register_fusion
from lightning_fedbayes.fusion.rule import Cohort, CohortRule, Fused, FusionRule, Posteriors, RuleState

TOLERANCE, ITERATIONS = 1e-9, 1000
"""An iteration that moves the geometric median by less, in units of the least median distance, is the last; most."""


@register_fusion("geometric_median", aliases=("rfa",))
class GeometricMedian(GramRule):
    r"""Minimiser of the weighted sum of distances, by the smoothed Weiszfeld algorithm.

    .. math:: \mu = \arg\min_y \sum_k \omega_k \|\mu_k - y\|, \qquad
              \beta_k = \frac{\omega_k}{\max(\nu, \|\mu_k - y\|)}, \qquad
              y \leftarrow \frac{\sum_k \beta_k \mu_k}{\sum_k \beta_k}

    σ² is the median of the :math:`\sigma_k^2`, entry by entry, weighted by the last
    :math:`a_k = \beta_k / \sum_j \beta_j`, the reliability of client k.

    When to use it: clients with less than half of the weight may send anything. Use ``weighting="equal"`` where sizes
    cannot be trusted: a client that claims many examples may get more than half of the weight.

    Args:
        smoothing: ν in units of the least median distance of a client to all clients. The minimiser of the smoothed
            objective is at most ν / 2 worse.

    Raises FusionError: it is not positive.
    Source: Pillutla, Kakade and Harchaoui 2019, "Robust aggregation for federated learning", Algorithm 2 and eq. (4);
    [Untrusted] baseline.
    """

    uses_weights: ClassVar[bool] = True

    def __init__(self, smoothing: float = 1e-6) -> None:
        check_number("geometric_median: smoothing", smoothing, "(0, inf)", error=FusionError)
        self.smoothing = smoothing

    def infer_shares(self, gram: Gram, weights: Tensor) -> tuple[Tensor, dict[int, str]]:
        shares, scale = start(gram.squared_distances().sqrt(), weights)
        products, least = gram.products[:-1, :-1], TOLERANCE * scale
        for _ in range(ITERATIONS if scale > 0 else 0):
            distances = grams.squared_distances_to(products, shares).sqrt()
            pulls = weights / distances.clamp_min(self.smoothing * scale)
            before, shares = shares, pulls / pulls.sum()
            step = shares - before
            if float(step @ products @ step) <= least * least:  # a power would raise where this overflows
                break
        return shares, {}


def start(distances: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    r"""Return the clients' shares at the first iterate, shape (K,), and the scale of the distances, (K, K).

    With :math:`r_k` the weighted median of the distances from client k to all clients, itself included, the scale is
    the least :math:`r_k` and the shares are :math:`\omega_k / r_k^2`, normalised. So a minority of the weight moves the
    first iterate by no more than the scale. If :math:`r_k = 0`, that point, with half of the weight, gets all shares.
    """
    ordered, order = distances.sort(1)
    half = (weights[order].cumsum(1) < 0.5 - 1e-12).sum(1, keepdim=True)
    spread = ordered.gather(1, half).squeeze(1)
    scale = spread.min()
    shares = weights * torch.where(spread > 0, scale / spread, 1.0).square()
    return shares / shares.sum(), float(scale)


@register_fusion("multi_krum")
class MultiKrum(GramRule):
    r"""Average of the clients with the lowest Krum scores.

    .. math:: s_k = \sum_{j \in N_k} \|\mu_k - \mu_j\|^2, \qquad \mu = \frac1m \sum_{k \in S} \mu_k, \qquad
              \sigma^2 = \operatorname{median}_{k \in S} \sigma_k^2

    :math:`N_k` are the :math:`K - f - 2` other clients nearest to k, S the m of lowest score. Two clients are averaged.

    When to use it: at most f clients may send anything, and losing a few honest ones does no harm. It takes no weights.

    Args:
        byzantine: f, the number of clients that may send anything. :math:`2f + 2 < K`. None: the largest allowed.
        keep: m. None: :math:`K - f`.

    Raises FusionError: ``byzantine`` too large for the cohort, or ``keep`` not between 1 and K.
    Source: Blanchard, El Mhamdi, Guerraoui and Stainer 2017, "Machine learning with adversaries", §4 and §5.
    """

    def __init__(self, byzantine: int | None = None, keep: int | None = None) -> None:
        if byzantine is not None:
            check_at_least("krum: byzantine", byzantine, 0, error=FusionError)
        if keep is not None:
            check_at_least("krum: keep", keep, 1, error=FusionError)
        self.byzantine, self.keep = byzantine, keep

    def infer_shares(self, gram: Gram, weights: Tensor) -> tuple[Tensor, dict[int, str]]:
        count = len(weights)
        if count < 3:
            return torch.full((count,), 1 / count, dtype=torch.float64), {}
        byzantine = (count - 3) // 2 if self.byzantine is None else self.byzantine
        if not 2 * byzantine + 2 < count:
            rule = "but 2·byzantine + 2 must be less than the number of clients"
            remedy = f"give at most {(count - 3) // 2}, or None for that"
            raise FusionError(f"krum: byzantine={byzantine} of {count} clients, {rule}; {remedy}")
        keep = count - byzantine if self.keep is None else self.keep
        if keep > count:
            raise FusionError(f"krum: keep={keep} of {count} clients; give at most {count}")
        neighbours = count - byzantine - 2
        distances = gram.squared_distances()
        scores = distances.sort(1).values[:, 1 : 1 + neighbours].sum(1).tolist()  # itself comes first
        totals = distances.sum(1).tolist()
        ranked = sorted(range(count), key=lambda k: (scores[k], totals[k]))
        shares = torch.zeros(count, dtype=torch.float64)
        shares[ranked[:keep]] = 1 / keep
        what = f"squared distances to its {neighbours} nearest clients sum to"
        most = f"those kept have at most {scores[ranked[keep - 1]]:.4g}"
        return shares, {k: f"{what} {scores[k]:.4g}; {most}" for k in sorted(ranked[keep:])}


@register_fusion("krum")
class Krum(MultiKrum):
    """The client with the lowest Krum score (see :class:`MultiKrum`), its mean and its variance.

    When to use it: for comparison. The result is one of the clients (the average of two), so it loses what the others
    have learned. Where data differ, prefer ``multi_krum`` or ``geometric_median``.

    Args:
        byzantine: see :class:`MultiKrum`.

    Source: Blanchard et al. 2017, §4.
    """

    def __init__(self, byzantine: int | None = None) -> None:
        super().__init__(byzantine, keep=1)


class _CoordinateRule(FusionRule):
    """Average of means and of variances without the largest and the smallest, coordinate by coordinate."""

    uses_weights: ClassVar[bool] = False
    by_columns: ClassVar[bool] = True
    resists: ClassVar[bool] = True

    @abstractmethod
    def dropped(self, count: int) -> int:
        """Return the number of clients of ``count`` to drop at either end, less than half."""

    def fuse(self, posteriors: Posteriors, weights: Tensor, previous: GaussianPosterior | None) -> GaussianPosterior:
        drop = self.dropped(len(posteriors))
        mean = middle([posterior.mean for posterior in posteriors], drop)
        variances = [posterior.variance for posterior in posteriors]
        point_mass = all(is_zero(each) for variance in variances for each in variance.values())
        return posteriors[0].unflatten(mean, None if point_mass else middle(variances, drop))


@register_fusion("coordinate_median")
class CoordinateMedian(_CoordinateRule):
    r"""Median of the clients, coordinate by coordinate, of the means and of the variances.

    .. math:: \mu_i = \operatorname{median}_k \mu_{ki}, \qquad \sigma_i^2 = \operatorname{median}_k \sigma_{ki}^2

    For an even number of clients it is the mean of the two in the middle.

    When to use it: fewer than half of the clients may send anything, means or variances: every fused value lies between
    two honest ones. It takes no weights.

    Source: Yin, Chen, Ramchandran and Bartlett 2018, "Byzantine-robust distributed learning", Definition 1, for points;
    [Untrusted] baseline. The median of the variances is our addition.
    """

    def dropped(self, count: int) -> int:
        """Return f that leaves one client, or two of an even number."""
        return (count - 1) // 2


@register_fusion("trimmed_mean")
class TrimmedMean(_CoordinateRule):
    r"""Mean of the clients without the f smallest and the f largest, coordinate by coordinate.

    .. math:: \mu_i = \frac{1}{K - 2f} \sum_{k = f + 1}^{K - f} \mu_{(k)i}, \qquad \mu_{(1)i} \le \dots \le \mu_{(K)i}

    and the same for the variances. f = 0 is the plain average, the largest f the coordinate-wise median.

    When to use it: at most f of the clients may send anything, and averaging shall reduce noise. It takes no weights.

    Args:
        trim: fraction of the clients, in [0, 0.5), that is dropped at *either* end, rounded up. An integer is f itself.

    Raises FusionError: ``trim`` is out of range, or leaves no client.
    Source: Yin et al. 2018, Definition 2, for points; the variance is our addition.
    """

    def __init__(self, trim: float = 0.1) -> None:
        if isinstance(trim, int):
            check_at_least("trimmed_mean: trim", trim, 0, error=FusionError)
        else:
            why = "as a number of clients give an integer"
            check_number("trimmed_mean: trim", trim, "[0, 0.5)", error=FusionError, why=why)
        self.trim = trim

    def dropped(self, count: int) -> int:
        """Return f."""
        most = (count - 1) // 2
        if not isinstance(self.trim, int):
            return min(most, math.ceil(self.trim * count - 1e-9))  # 0.07 * 100 is 7.000000000000001
        if self.trim > most:
            remedy = f"give at most {most}, or a fraction"
            raise FusionError(f"trimmed_mean: trim={self.trim} at either end of {count} clients leaves none; {remedy}")
        return self.trim


def middle(rows: Sequence[Mapping[str, Tensor]], drop: int) -> Tensor:
    """Return the mean over ``rows`` without the ``drop`` smallest and largest, per coordinate: shape (P,), float64.

    >>> middle([{"w": torch.tensor([1.0, 9.0])}, {"w": torch.tensor([3.0, 2.0])}, {"w": torch.tensor([50.0, 1.0])}], 1)
    tensor([3., 2.], dtype=torch.float64)
    """
    kept = slice(drop, len(rows) - drop)
    parts = [block.T.contiguous().sort(1).values[:, kept].mean(1) for block in columns(rows)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


class Preaggregation(CohortRule):
    """Every client is replaced by a combination of the clients and the origin, then another rule fuses them.

    The rule that fuses sets weights, need of the previous posterior, reliabilities and state. The new clients are
    formed only if that rule is neither a :class:`GramRule` nor the weighted average.

    Args:
        then: the rule that fuses: a name, an alias or a rule object.

    Raises FusionError: no rule has that name.
    """

    def __init__(self, then: str | FusionRule) -> None:
        self.then = get_rule(then)
        # of this object, not of its class: they follow from the rule that fuses
        followed = ("uses_weights", "by_columns", "resists", "narrows", "keeps_prior")
        vars(self).update({name: getattr(self.then, name) for name in followed})
        vars(self).update(needs_previous=self.needs_previous or self.then.needs_previous)

    @abstractmethod
    def mix(self, gram: Gram) -> tuple[Tensor, Tensor]:
        """Return the combinations that replace the clients.

        These are coefficients of the means, shape (K, K + 1), row k of the clients and the origin in new client k; and
        the clients' parts of the new ones, shape (K, K), none negative, for reliabilities. Rows sum to 1. New client k
        keeps client k's variances, since a mixture would spread a false one.
        """

    def init(self) -> RuleState:
        return self.then.init()

    def check_state(self, state: Any, parameters: int) -> None:
        self.then.check_state(state, parameters)

    def apply(self, cohort: Cohort, state: RuleState) -> Fused:
        """See :meth:`FusionRule.apply`. A client's reliability sums its parts of the new clients times their shares."""
        gram = gram_of(cohort)
        means, parts = self.mix(gram)
        if isinstance(self.then, GramRule):
            both = torch.cat([means, torch.eye(means.shape[1], dtype=means.dtype)[-1:]])  # and the origin as it is
            near = grams.median_distances(Gram(both @ gram.products @ both.T, gram.size)).argmin()
            both = both - both[near]  # about the one in the middle: they may lie much closer than the clients do
            shares, reasons = self.then.infer_shares(Gram(both @ gram.products @ both.T, gram.size), cohort.weights)
            mean = weighted_sum(points_of(cohort.posteriors, cohort.previous), shares @ means)
            own = shares @ parts
            return fused_by_shares(cohort, mean, shares, own, unused(own, reasons), state)
        if type(self.then) is WeightedAverage:  # not a subclass, which may fuse otherwise
            mean = weighted_sum(points_of(cohort.posteriors, cohort.previous), cohort.weights @ means)
            variance = weighted_sum([posterior.variance for posterior in cohort.posteriors], cohort.weights)
            return Fused(cohort.posteriors[0].unflatten(mean, variance), state=state)
        rows = _mixed_rows(points_of(cohort.posteriors, cohort.previous), means)
        mixed = [GaussianPosterior(row, old.variance) for row, old in zip(rows, cohort.posteriors, strict=True)]
        fused = self.then.apply(replace(cohort, posteriors=mixed), state)
        if not fused.reliability:
            return fused
        shares = torch.tensor([fused.reliability.get(client, 0.0) for client in cohort.clients], dtype=torch.float64)
        own = shares @ parts
        reasons = {cohort.clients[position]: reason for position, reason in unused(own, {}).items()}
        excluded = {client: fused.excluded.get(client, reason) for client, reason in reasons.items()}
        return replace(fused, reliability=dict(zip(cohort.clients, own.tolist(), strict=True)), excluded=excluded)


@register_fusion("nearest_neighbour_mixing", aliases=("nnm",))
class NearestNeighbourMixing(Preaggregation):
    r"""Every client is replaced by the average of its K − f nearest clients, itself included. Then a rule fuses.

    .. math:: \mu_k' = \frac{1}{K - f} \sum_{j \in N_k} \mu_j, \qquad {\sigma_k'}^2 = \sigma_k^2

    When to use it: clients' data differ, and a robust rule may take an honest client with unusual data for a bad one.

    Args:
        then: the rule that fuses, best a robust one: a name, an alias or a rule object.
        byzantine: f, the number of clients that may send anything. :math:`2f < K`. None: the largest allowed.

    Raises FusionError: ``byzantine`` too large for the cohort, or no rule of the name ``then``.
    Source: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan 2023, "Fixing by mixing", Algorithm 2, for points.
    """

    def __init__(self, then: str | FusionRule = "geometric_median", byzantine: int | None = None) -> None:
        super().__init__(then)
        if byzantine is not None:
            check_at_least("nearest_neighbour_mixing: byzantine", byzantine, 0, error=FusionError)
        self.byzantine = byzantine

    def mix(self, gram: Gram) -> tuple[Tensor, Tensor]:
        distances = gram.squared_distances()
        count = len(distances)
        byzantine = (count - 1) // 2 if self.byzantine is None else self.byzantine
        if not 2 * byzantine < count:
            rule = "but 2·byzantine must be less than the number of clients"
            remedy = f"give at most {(count - 1) // 2}, or None for that"
            raise FusionError(f"nearest_neighbour_mixing: byzantine={byzantine} of {count} clients, {rule}; {remedy}")
        distances.fill_diagonal_(-1)  # itself before clients at distance 0
        near = distances.sort(dim=1, stable=True).indices[:, : count - byzantine]
        mixing = torch.zeros_like(distances).scatter_(1, near, 1 / (count - byzantine))
        return torch.cat([mixing, mixing.new_zeros(count, 1)], 1), mixing


@register_fusion("norm_clipping")
class NormClipping(Preaggregation):
    r"""Updates longer than a radius are scaled down to it. Then a rule fuses.

    .. math:: \mu_k' = \mu_o + \min\Bigl(1, \frac{r}{\|\mu_k - \mu_o\|}\Bigr) (\mu_k - \mu_o), \qquad
              {\sigma_k'}^2 = \sigma_k^2

    with :math:`\mu_o` the mean of the previous global posterior and the norm over all parameters.

    When to use it: clients may send scaled updates, as in a model replacement attack. It bounds neither wrong
    directions (let a robust rule follow) nor variances.

    Args:
        then: the rule that fuses: a name, an alias or a rule object.
        radius: r, in units of the parameters. None: the median of the norms, which a minority cannot raise.

    Raises FusionError: no previous posterior, a radius that is not positive, or no rule of the name ``then``.
    Source: Sun, Kairouz, Suresh and McMahan 2019, "Can you really backdoor federated learning?", §3.
    """

    needs_previous: ClassVar[bool] = True

    def __init__(self, then: str | FusionRule = "weighted_average", radius: float | None = None) -> None:
        super().__init__(then)
        if radius is not None:
            why = "None takes the median of the norms"
            check_number("norm_clipping: radius", radius, "(0, inf)", error=FusionError, why=why)
        self.radius = radius

    def mix(self, gram: Gram) -> tuple[Tensor, Tensor]:
        squares = gram.products.diagonal()
        norms = (squares[:-1] + squares[-1] - 2 * gram.products[:-1, -1]).clamp_min(0).sqrt()
        radius = norms.quantile(0.5) if self.radius is None else self.radius
        kept = torch.where(norms > radius, radius / norms, 1.0)
        return torch.cat([kept.diag(), 1 - kept[:, None]], 1), torch.eye(len(kept), dtype=kept.dtype)


def unused(shares: Tensor, reasons: Mapping[int, str]) -> dict[int, str]:
    """Return position → reason for clients without a share: from ``reasons`` if the rule that fuses gave one."""
    why = "it is part of no mixture of neighbours that the rule kept"
    return {position: reasons.get(position, why) for position, share in enumerate(shares.tolist()) if share == 0}


def _mixed_rows(rows: Sequence[Mapping[str, Tensor]], coefficients: Tensor) -> list[dict[str, Tensor]]:
    """Return a combination of ``rows`` per row of ``coefficients``, with the first row's names, shapes and dtypes."""
    new: list[dict[str, Tensor]] = [{} for _ in coefficients]
    for name, like in rows[0].items():
        tensors = [{name: row[name]} for row in rows]
        if all(is_zero(each[name]) for each in tensors):
            parts = [zeros_like(like)] * len(new)
        else:
            blocks = [(coefficients.to(block.device) @ block).to(like.dtype) for block in columns(tensors)]
            parts = torch.cat(blocks, 1).to(like.device).view(len(new), *like.shape).unbind(0)
        for row, part in zip(new, parts, strict=True):
            row[name] = part
    return new
