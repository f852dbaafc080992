"""Nearest-neighbour mixing before another rule."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion.gram import Gram
from lightning_fedbayes.fusion.preaggregation import Preaggregation
from lightning_fedbayes.fusion.registry import register_fusion
from lightning_fedbayes.fusion.rule import FusionRule


@register_fusion("nearest_neighbour_mixing", aliases=("nnm",))
class NearestNeighbourMixing(Preaggregation):
    r"""Every client is replaced by the average of its K − f nearest clients, itself included; then a rule fuses.

    .. math:: \mu_k' = \frac{1}{K - f} \sum_{j \in N_k} \mu_j, \qquad
              {\sigma_k'}^2 = \frac{1}{K - f} \sum_{j \in N_k} \sigma_j^2

    When to use it: clients whose data differ. A robust rule then takes an honest client of unusual data for a bad one,
    and what it loses grows with the differences; mixing shrinks them first, so that the rule behind it reaches the
    best order of error that is possible. The clients' weights, if the rule takes them, go to the mixed clients.

    Args:
        then: the rule that fuses, best a robust one: a name, an alias or a rule object.
        byzantine: f, the number of clients that may send anything; :math:`2f < K`. None: the largest allowed.

    Raises:
        FusionError: ``byzantine`` too large for the cohort, or no rule of the name ``then``.

    Source: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan 2023, "Fixing by mixing", Algorithm 2. The
    variance is ours: they mix points.
    """

    def __init__(self, then: str | FusionRule = "geometric_median", byzantine: int | None = None) -> None:
        super().__init__(then)
        if byzantine is not None and byzantine < 0:
            raise FusionError(
                f"nearest_neighbour_mixing: byzantine must be a number of clients, at least 0, got {byzantine}"
            )
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
        distances.fill_diagonal_(-1)  # itself before clients that are equal to it
        near = distances.sort(dim=1, stable=True).indices[:, : count - byzantine]
        mixing = torch.zeros_like(distances).scatter_(1, near, 1 / (count - byzantine))
        return torch.cat([mixing, mixing.new_zeros(count, 1)], 1), mixing
