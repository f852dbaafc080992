"""Krum: the client, or the clients, whose neighbours are nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion.gram import Gram
from lightning_fedbayes.fusion.gram_rule import GramRule
from lightning_fedbayes.fusion.registry import register_fusion


@register_fusion("multi_krum")
class MultiKrum(GramRule):
    r"""Average of the clients with the lowest Krum scores.

    .. math:: s_k = \sum_{j \in N_k} \|\mu_k - \mu_j\|^2, \qquad \mu = \frac1m \sum_{k \in S} \mu_k, \qquad
              \sigma^2 = \frac1m \sum_{k \in S} \sigma_k^2

    :math:`N_k` are the :math:`K - f - 2` clients nearest to k other than itself, and S the m clients of the lowest
    scores. Of equal scores, the one of the lesser sum of squared distances to all counts as lower, then the first.
    With fewer than three clients there are no neighbours to judge by, and all are averaged.

    When to use it: at most f of the clients may send anything, and a few honest clients lost do not matter. With m
    near :math:`K - f` it averages out nearly as much noise as the plain average. It takes no weights.

    Args:
        byzantine: f, the number of clients that may send anything; :math:`2f + 2 < K`. None: the largest allowed.
        keep: m. None: :math:`K - f`.

    Raises:
        FusionError: ``byzantine`` too large for the cohort, or ``keep`` not between 1 and K.

    Source: Blanchard, El Mhamdi, Guerraoui and Stainer 2017, "Machine learning with adversaries", §4 and §5.
    """

    def __init__(self, byzantine: int | None = None, keep: int | None = None) -> None:
        if byzantine is not None and byzantine < 0:
            raise FusionError(f"krum: byzantine must be a number of clients, at least 0, got {byzantine}")
        if keep is not None and keep < 1:
            raise FusionError(f"krum: keep must be a number of clients, at least 1, got {keep}")
        self.byzantine = byzantine
        self.keep = keep

    def judge(self, gram: Gram, weights: Tensor) -> tuple[Tensor, dict[int, str]]:
        """See :meth:`GramRule.judge`."""
        count = len(weights)
        if count < 3:
            return torch.full((count,), 1 / count, dtype=torch.float64), {}
        byzantine = (count - 3) // 2 if self.byzantine is None else self.byzantine
        if not 2 * byzantine + 2 < count:
            raise FusionError(
                f"krum: byzantine={byzantine} of {count} clients, but 2·byzantine + 2 must be less than the number of "
                f"clients; give at most {(count - 3) // 2}, or None for that"
            )
        keep = count - byzantine if self.keep is None else self.keep
        if keep > count:
            raise FusionError(f"krum: keep={keep} of {count} clients; give at most {count}")
        neighbours = count - byzantine - 2
        distances = gram.squared_distances()
        scores = krum_scores(distances, neighbours).tolist()
        totals = distances.sum(1).tolist()
        ranked = sorted(range(count), key=lambda k: (scores[k], totals[k]))
        shares = torch.zeros(count, dtype=torch.float64)
        shares[ranked[:keep]] = 1 / keep
        worst = scores[ranked[keep - 1]]
        return shares, {
            k: f"squared distances to its {neighbours} nearest clients sum to {scores[k]:.4g}; "
               f"those kept have at most {worst:.4g}"
            for k in sorted(ranked[keep:])
        }


@register_fusion("krum")
class Krum(MultiKrum):
    r"""The client with the lowest Krum score (see :class:`MultiKrum`), its mean and its variance.

    When to use it: as a reference. It is one of the clients, so it throws away what the others have learned; where
    their data differ, prefer multi_krum or the geometric median. Of two clients it is the average.

    Args:
        byzantine: f, the number of clients that may send anything; :math:`2f + 2 < K`. None: the largest allowed.

    Raises:
        FusionError: ``byzantine`` too large for the cohort.

    Source: Blanchard et al. 2017, §4.
    """

    def __init__(self, byzantine: int | None = None) -> None:
        super().__init__(byzantine, keep=1)


def krum_scores(squared_distances: Tensor, neighbours: int) -> Tensor:
    """Sum of the squared distances of each client to its nearest others, shape (K,).

    Args:
        squared_distances: between clients, shape (K, K), 0 on the diagonal.
        neighbours: how many of the others count, less than K.

    >>> krum_scores(torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 4.0], [9.0, 4.0, 0.0]]), 1)
    tensor([1., 1., 4.])
    """
    return squared_distances.sort(1).values[:, 1 : 1 + neighbours].sum(1)
