"""Pre-aggregation: replace the clients by combinations of them, then let another rule fuse."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, check_at_least, check_number
from lightning_fedbayes.core.posterior import GaussianPosterior, is_zero, zeros_like
from lightning_fedbayes.fusion.averages import WeightedAverage
from lightning_fedbayes.fusion.gram import (
    Gram,
    GramRule,
    columns,
    fused_by_shares,
    gram_of,
    median_distances,
    points_of,
    weighted_sum,
)
from lightning_fedbayes.fusion.registry import get_rule, register_fusion
from lightning_fedbayes.fusion.rule import Cohort, CohortRule, Fused, FusionRule, RuleState


class Preaggregation(CohortRule):
    """Every client is replaced by a combination of the clients and the origin, then another rule fuses them.

    The rule that fuses sets weights, need of the previous posterior, reliabilities and state. The new clients are not
    formed if that rule is a :class:`GramRule`, as their Gram matrix follows from the clients', or the weighted average,
    since its shares are known. Any other rule gets K posteriors of the clients' dtypes.

    Args:
        then: the rule that fuses: a name, an alias or a rule object.

    Raises:
        FusionError: no rule has that name.
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
        """See :meth:`FusionRule.init`."""
        return self.then.init()

    def check_state(self, state: Any, parameters: int) -> None:
        """See :meth:`FusionRule.check_state`."""
        self.then.check_state(state, parameters)

    def apply(self, cohort: Cohort, state: RuleState) -> Fused:
        """See :meth:`FusionRule.apply`; a client's reliability sums its parts of the new clients times their shares."""
        gram = gram_of(cohort)
        means, parts = self.mix(gram)
        if isinstance(self.then, GramRule):
            both = torch.cat([means, torch.eye(means.shape[1], dtype=means.dtype)[-1:]])  # and the origin as it is
            near = median_distances(Gram(both @ gram.products @ both.T, gram.size)).argmin()
            both = both - both[near]  # about the one in the middle: they may lie much closer than the clients do
            of_mixed = Gram(both @ gram.products @ both.T, gram.size)
            shares, reasons = self.then.infer_shares(of_mixed, cohort.weights)
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
        return replace(
            fused,
            reliability=dict(zip(cohort.clients, own.tolist(), strict=True)),
            excluded={
                cohort.clients[position]: fused.excluded.get(cohort.clients[position], reason)
                for position, reason in unused(own, {}).items()
            },
        )


@register_fusion("nearest_neighbour_mixing", aliases=("nnm",))
class NearestNeighbourMixing(Preaggregation):
    r"""Every client is replaced by the average of its K − f nearest clients, itself included; then a rule fuses.

    .. math:: \mu_k' = \frac{1}{K - f} \sum_{j \in N_k} \mu_j, \qquad {\sigma_k'}^2 = \sigma_k^2

    When to use it: clients' data differ. A robust rule may take an honest client with unusual data for a bad one;
    mixing shrinks differences first, so that the error has the best possible order. Clients' weights go to the mixed
    clients.

    Args:
        then: the rule that fuses, best a robust one: a name, an alias or a rule object.
        byzantine: f, the number of clients that may send anything; :math:`2f < K`. None: the largest allowed.

    Raises:
        FusionError: ``byzantine`` too large for the cohort, or no rule of the name ``then``.

    Source: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan 2023, "Fixing by mixing", Algorithm 2, for points.
    """

    def __init__(self, then: str | FusionRule = "geometric_median", byzantine: int | None = None) -> None:
        super().__init__(then)
        if byzantine is not None:
            check_at_least("nearest_neighbour_mixing: byzantine", byzantine, 0, error=FusionError)
        self.byzantine = byzantine

    def mix(self, gram: Gram) -> tuple[Tensor, Tensor]:
        """See :meth:`Preaggregation.mix`."""
        distances = gram.squared_distances()
        count = len(distances)
        byzantine = (count - 1) // 2 if self.byzantine is None else self.byzantine
        if not 2 * byzantine < count:
            raise FusionError(
                f"nearest_neighbour_mixing: byzantine={byzantine} of {count} clients, but 2·byzantine must be less "
                f"than the number of clients; give at most {(count - 1) // 2}, or None for that"
            )
        distances.fill_diagonal_(-1)  # itself before clients at distance 0
        near = distances.sort(dim=1, stable=True).indices[:, : count - byzantine]
        mixing = torch.zeros_like(distances).scatter_(1, near, 1 / (count - byzantine))
        return torch.cat([mixing, mixing.new_zeros(count, 1)], 1), mixing


@register_fusion("norm_clipping")
class NormClipping(Preaggregation):
    r"""Updates longer than a radius are scaled down to it; then a rule fuses.

    .. math:: \mu_k' = \mu_o + \min\Bigl(1, \frac{r}{\|\mu_k - \mu_o\|}\Bigr) (\mu_k - \mu_o), \qquad
              {\sigma_k'}^2 = \sigma_k^2

    with :math:`\mu_o` the mean of the previous global posterior and the norm over all parameters.

    When to use it: clients may send scaled updates, as in a model replacement attack. No client then moves the global
    posterior further than the others do. It bounds neither wrong directions (let a robust rule follow) nor variances.

    Args:
        then: the rule that fuses: a name, an alias or a rule object.
        radius: r, in units of the parameters. None: the median of the norms, which a minority cannot raise beyond
            honest norms.

    Raises:
        FusionError: no previous posterior, a radius that is not positive, or no rule of the name ``then``.

    Source: Sun, Kairouz, Suresh and McMahan 2019, "Can you really backdoor federated learning?", §3; the median as
    radius is our addition.
    """

    needs_previous: ClassVar[bool] = True

    def __init__(self, then: str | FusionRule = "weighted_average", radius: float | None = None) -> None:
        super().__init__(then)
        if radius is not None:
            why = "None takes the median of the norms"
            check_number("norm_clipping: radius", radius, "(0, inf)", error=FusionError, why=why)
        self.radius = radius

    def mix(self, gram: Gram) -> tuple[Tensor, Tensor]:
        """See :meth:`Preaggregation.mix`."""
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
