"""Rules that judge clients by the Gram matrix of their means."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from lightning_fedbayes.fusion.cohort import Cohort, Fused, Memory
from lightning_fedbayes.fusion.gram import Gram, combine, combine_variances, gram_of
from lightning_fedbayes.fusion.rule import JudgingRule


class GramRule(JudgingRule):
    r"""A rule whose answer is an average of the clients, with shares that it infers from their distances.

    .. math:: \mu = \sum_k a_k \mu_k, \qquad \sigma^2 = \sum_k a_k \sigma_k^2

    The shares :math:`a_k` are the reliability that it reports. Distances are those of the means: a client can claim
    any variance, and does so in proportion to its share. Point masses stay point masses.
    """

    by_columns: ClassVar[bool] = True

    @abstractmethod
    def judge(self, gram: Gram, weights: Tensor) -> tuple[Tensor, dict[int, str]]:
        """The clients' shares, shape (K,), float64, none negative, of sum 1; and why the rule left clients out.

        Args:
            gram: of the clients and the origin.
            weights: shape (K,), float64, positive, of sum 1.
        """

    def apply(self, cohort: Cohort, memory: Memory) -> Fused:
        """See :meth:`FusionRule.apply`."""
        shares, reasons = self.judge(gram_of(cohort.posteriors, cohort.previous), cohort.weights)
        return judged(cohort, combine(cohort.posteriors, shares, None), shares, reasons, memory)


def judged(cohort: Cohort, mean: Tensor, shares: Tensor, reasons: dict[int, str], memory: Memory) -> Fused:
    """The outcome for a fused mean, shape (P,), and the clients' shares of the variance, shape (K,).

    Args:
        reasons: position of a client in the cohort → why it was left out.
    """
    return Fused(
        cohort.posteriors[0].unflatten(mean, combine_variances(cohort.posteriors, shares)),
        reliability=dict(zip(cohort.clients, shares.tolist(), strict=True)),
        excluded={cohort.clients[position]: reason for position, reason in reasons.items()},
        memory=memory,
    )
