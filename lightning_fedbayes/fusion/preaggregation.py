"""Rules that change what clients sent and leave the fusion to another rule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_fedbayes.fusion.averages import WeightedAverage
from lightning_fedbayes.fusion.cohort import Cohort, Fused, Memory
from lightning_fedbayes.fusion.columns import columns, weighted_sum
from lightning_fedbayes.fusion.gram import Gram, combine_variances, gram_of, median_distances, points_of
from lightning_fedbayes.fusion.gram_rule import GramRule, judged
from lightning_fedbayes.fusion.registry import get_rule
from lightning_fedbayes.fusion.rule import FusionRule
from lightning_fedbayes.posterior import GaussianPosterior, is_zero, zeros_like


class Preaggregation(FusionRule):
    """Every client is replaced by a combination of the clients and the origin, then another rule fuses them.

    It takes weights, needs the previous posterior, judges and remembers as that rule does. Before a :class:`GramRule`
    the replaced clients are never formed: their Gram matrix follows from that of the clients. Nor are they before the
    weighted average, whose shares are known. Before any other rule they are, as K posteriors of the clients' dtypes.

    Args:
        then: the rule that fuses: a name, an alias or a rule object.

    Raises:
        FusionError: no rule has that name.
    """

    def __init__(self, then: str | FusionRule) -> None:
        self.then = get_rule(then)
        # of this object, not of its class: they are those of the rule inside
        vars(self).update(uses_weights=self.then.uses_weights, by_columns=self.then.by_columns,
                          needs_previous=self.needs_previous or self.then.needs_previous)

    @abstractmethod
    def mix(self, gram: Gram) -> tuple[Tensor, Tensor]:
        """What the clients are replaced by.

        Args:
            gram: of the clients and the origin.

        Returns:
            Coefficients of the means, shape (K, K + 1), row k those of the clients and the origin in the new client
            k; and of the variances, shape (K, K), none negative. Rows sum to 1.
        """

    def init(self) -> Memory:
        """See :meth:`FusionRule.init`: that of the rule inside."""
        return self.then.init()

    def fuse(
        self, posteriors: Sequence[GaussianPosterior], weights: Tensor, previous: GaussianPosterior | None
    ) -> GaussianPosterior:
        """See :meth:`FusionRule.fuse`: one round without a memory."""
        clients = tuple(range(len(posteriors)))
        return self.apply(Cohort(tuple(posteriors), weights, previous, clients), self.init()).posterior

    def apply(self, cohort: Cohort, memory: Memory) -> Fused:
        """See :meth:`FusionRule.apply`; a client is as reliable as the new clients that it is part of."""
        gram = gram_of(cohort.posteriors, cohort.previous)
        means, variances = self.mix(gram)
        if isinstance(self.then, GramRule):
            shares, reasons = self.then.judge(mixed_gram(gram, means), cohort.weights)
            mean = weighted_sum(points_of(cohort.posteriors, cohort.previous), shares @ means)
            own = shares @ variances
            return judged(cohort, mean, own, unused(own, reasons), memory)
        if type(self.then) is WeightedAverage:  # not a subclass, which may fuse otherwise
            mean = weighted_sum(points_of(cohort.posteriors, cohort.previous), cohort.weights @ means)
            variance = combine_variances(cohort.posteriors, cohort.weights @ variances)
            return Fused(cohort.posteriors[0].unflatten(mean, variance), memory=memory)
        fused = self.then.apply(replace(cohort, posteriors=mixed(cohort, means, variances)), memory)
        if not fused.reliability:
            return fused
        shares = torch.tensor([fused.reliability.get(client, 0.0) for client in cohort.clients], dtype=torch.float64)
        own = shares @ variances
        return replace(
            fused,
            reliability=dict(zip(cohort.clients, own.tolist(), strict=True)),
            excluded={
                cohort.clients[position]: fused.excluded.get(cohort.clients[position], reason)
                for position, reason in unused(own, {}).items()
            },
        )


def unused(shares: Tensor, reasons: Mapping[int, str]) -> dict[int, str]:
    """Position → why, of the clients that have no share in what was fused.

    Args:
        shares: shape (K,).
        reasons: position → why the rule inside left out the client's own mixture.
    """
    why = "it is part of no mixture of neighbours that the rule kept"
    return {position: reasons.get(position, why) for position, share in enumerate(shares.tolist()) if share == 0}


def mixed_gram(gram: Gram, coefficients: Tensor) -> Gram:
    """The Gram matrix of combinations of its points, and of the origin as it is.

    Seen from the combination in the middle: they may lie much closer together than the clients do.

    Args:
        gram: of K clients and the origin.
        coefficients: shape (K, K + 1), rows of sum 1.
    """
    origin = torch.zeros(1, coefficients.shape[1], dtype=coefficients.dtype)
    origin[0, -1] = 1
    both = torch.cat([coefficients, origin])
    middle = median_distances(Gram(both @ gram.products @ both.T, gram.size)).argmin()
    both = both - both[middle]
    return Gram(both @ gram.products @ both.T, gram.size)


def mixed(cohort: Cohort, means: Tensor, variances: Tensor) -> list[GaussianPosterior]:
    """The new clients, from the coefficients that :meth:`Preaggregation.mix` returns."""
    new_means = _mixed_rows(points_of(cohort.posteriors, cohort.previous), means)
    new_variances = _mixed_rows([posterior.variance for posterior in cohort.posteriors], variances)
    return [GaussianPosterior(mean, variance) for mean, variance in zip(new_means, new_variances, strict=True)]


def _mixed_rows(rows: Sequence[Mapping[str, Tensor]], coefficients: Tensor) -> list[dict[str, Tensor]]:
    """Combinations of ``rows``, one per row of ``coefficients``, with the names, shapes and dtypes of the first."""
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
