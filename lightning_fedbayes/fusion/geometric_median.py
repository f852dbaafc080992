"""The geometric median of the clients."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion.gram import Gram, squared_distances_to
from lightning_fedbayes.fusion.gram_rule import GramRule
from lightning_fedbayes.fusion.registry import register_fusion


@register_fusion("geometric_median", aliases=("rfa",))
class GeometricMedian(GramRule):
    r"""Minimiser of the weighted sum of distances, by the smoothed Weiszfeld algorithm.

    .. math:: \mu = \arg\min_y \sum_k \omega_k \|\mu_k - y\|, \qquad
              \beta_k = \frac{\omega_k}{\max(\nu, \|\mu_k - y\|)}, \qquad
              y \leftarrow \frac{\sum_k \beta_k \mu_k}{\sum_k \beta_k}

    and :math:`\sigma^2 = \sum_k a_k \sigma_k^2` with the last :math:`a_k = \beta_k / \sum_j \beta_j`, which is also
    the reliability of client k. All iterates are combinations of the clients, so they need their Gram matrix only.

    When to use it: some clients may send anything, and those hold less than half of the weight. Then the result stays
    within a bound that the honest clients set. A client that claims many examples gets a large weight and with it
    that half: with the weighting ``"train_size"`` the sizes that clients report are trusted. Use
    ``weighting="equal"`` where they must not be.

    Where half of the weight or more sits on one point, that point is the answer. Of clients on one line with an even
    split the minimiser is not unique; the one that is returned does not depend on their order.

    Args:
        smoothing: ν in units of the scale of the distances, the least median distance of a client to all. The
            minimiser of the smoothed objective is at most ν / 2 worse in the objective.
        tolerance: stop when an iteration moves y by less than this, in the same units.
        max_iterations: stop after so many iterations in any case; each costs O(K²).

    Raises:
        FusionError: an argument that is not positive.

    Source: Pillutla, Kakade and Harchaoui 2019, "Robust aggregation for federated learning", Algorithm 2 and eq. (4);
    [Untrusted] baseline.
    """

    uses_weights: ClassVar[bool] = True

    def __init__(self, smoothing: float = 1e-6, tolerance: float = 1e-9, max_iterations: int = 1000) -> None:
        for name, value in (("smoothing", smoothing), ("tolerance", tolerance), ("max_iterations", max_iterations)):
            if not value > 0:
                raise FusionError(f"geometric_median: {name} must be positive, got {value}")
        self.smoothing = smoothing
        self.tolerance = tolerance
        self.max_iterations = max_iterations

    def judge(self, gram: Gram, weights: Tensor) -> tuple[Tensor, dict[int, str]]:
        """See :meth:`GramRule.judge`."""
        shares, scale = start(gram.squared_distances().sqrt(), weights)
        products = gram.products[:-1, :-1]
        for _ in range(self.max_iterations if scale > 0 else 0):
            distances = squared_distances_to(products, shares).sqrt()
            before, shares = shares, normalised(weights / distances.clamp_min(self.smoothing * scale))
            step = shares - before
            if float(step @ products @ step) <= (self.tolerance * scale) ** 2:
                break
        return shares, {}


def start(distances: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    r"""Shares of the clients to start from, shape (K,), and the scale of the distances.

    With :math:`r_k` the weighted median of the distances from client k to all clients, itself among them, the scale is
    the least :math:`r_k` and the shares are :math:`\omega_k / r_k^2`, normalised. A minority of the weight, however
    far away, then moves the start by no more than the scale, so the iterations need not walk back from there. If
    :math:`r_k = 0`, half of the weight is in that point, and the shares are all there.

    Args:
        distances: between clients, shape (K, K).
        weights: shape (K,), float64, positive, of sum 1.
    """
    ordered, order = distances.sort(1)
    half = (weights[order].cumsum(1) < 0.5 - 1e-12).sum(1, keepdim=True)
    spread = ordered.gather(1, half).squeeze(1)
    scale = spread.min()
    nearness = torch.where(spread > 0, scale / spread, 1.0)
    return normalised(weights * nearness.square()), float(scale)


def normalised(values: Tensor) -> Tensor:
    """``values`` divided by their sum."""
    return values / values.sum()
