"""Attacks by adversaries that know the posteriors of the honest clients of the round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from torch import Tensor

from lightning_fedbayes.clients.adversaries.base import Attackers, Knowledge, UpdateAttack
from lightning_fedbayes.core.errors import check_at_least


@dataclass(frozen=True)
class ALittleIsEnough(UpdateAttack):
    r"""Sends the honest mean, shifted within the spread of the honest clients, :math:`\bar\mu - z\,s`.

    :math:`\bar\mu` and s are, per entry, mean and standard deviation (of the population, √(Σ(x − x̄)²/n)) of the means
    that the valid honest clients of the round sent. When to use it: against medians, trimmed means and rules by
    distance, which do not notice so small a shift. If no honest client is valid, the adversary sends its own update.

    Args:
        clients: see :class:`~lightning_fedbayes.clients.adversaries.Attack`.
        z: shift in standard deviations, any finite number; None: :func:`largest_unnoticed_shift` of the round.

    Raises:
        FederationError: ``clients`` or ``z`` cannot be used.

    Source: Baruch et al. 2019, A Little Is Enough. There, the adversaries estimate mean and deviation from their own
    honest updates.
    """

    clients: Attackers
    z: float | None = None
    needs_honest: ClassVar[bool] = True
    ranges: ClassVar[Mapping[str, str]] = {"z": "(-inf, inf)"}

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return honest mean − z × honest standard deviation."""
        z = largest_unnoticed_shift(knowledge.cohort, knowledge.adversaries) if self.z is None else self.z
        return knowledge.honest.mean - z * knowledge.honest.std


def largest_unnoticed_shift(cohort: int, adversaries: int) -> float:
    r"""Largest shift, in standard deviations, with which adversaries are nearer the centre than s honest clients.

    .. math:: z_{max} = \Phi^{-1}\Big(\frac{n - m - s}{n - m}\Big), \qquad s = \lfloor n/2 + 1 \rfloor - m

    s is the number of honest clients that the m adversaries need on their side to be a majority of n. If few attack,
    s is more than half of the honest clients and z is negative: the shift is to the other side. If the adversaries are
    the majority by themselves (s ≤ 0), any shift would do; s = 1 then keeps the quantile finite. With at most one
    honest client there is no spread, and z is 0.

    Args:
        cohort: number of clients in the round, n.
        adversaries: number of them that attack, 1 ≤ m ≤ n.

    >>> largest_unnoticed_shift(cohort=51, adversaries=12)
    0.361
    """
    check_at_least("cohort", cohort, 1)
    check_at_least("adversaries", adversaries, 0, cohort)
    honest = cohort - adversaries
    if honest <= 1:
        return 0.0
    supporters = max(cohort // 2 + 1 - adversaries, 1)
    return NormalDist().inv_cdf((honest - supporters) / honest)


@dataclass(frozen=True)
class InnerProductManipulation(UpdateAttack):
    r"""Sends the reversed mean of the honest updates, :math:`\mu_o - \varepsilon\,\overline{(\mu - \mu_o)}`.

    The mean is over the valid honest clients of the round. It makes the inner product of the fused update with the
    honest one negative: for an average, once ε m > n − m. When to use it: with a small ε against rules that choose
    clients by their distances, with a large one against averages. If no honest client is valid, the adversary sends
    its own update.

    Args:
        clients: see :class:`~lightning_fedbayes.clients.adversaries.Attack`.
        epsilon: ε > 0.

    Raises:
        FederationError: ``clients`` or ``epsilon`` cannot be used.

    Source: Xie et al. 2020, Fall of Empires.
    """

    clients: Attackers
    epsilon: float = 0.1
    needs_honest: ClassVar[bool] = True
    ranges: ClassVar[Mapping[str, str]] = {"epsilon": "(0, inf)"}

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return μ_o − ε × mean of the honest updates."""
        return knowledge.previous - self.epsilon * (knowledge.honest.mean - knowledge.previous)
