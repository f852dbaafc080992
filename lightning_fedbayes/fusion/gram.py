r"""The Gram matrix of a cohort, and rules that score clients by it.

It holds all distances between clients, and to any affine combination of them. A rule whose answer is a combination of
the clients' means reads the K × P parameters once for the Gram matrix and once for the answer; its iterations in
between work on K + 1 numbers and cost nothing in P.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.core.posterior import GaussianPosterior, zeros_like
from lightning_fedbayes.fusion.columns import columns, sample, weighted_median, weighted_sum
from lightning_fedbayes.fusion.rule import Cohort, Fused, ReliabilityRule, RuleState

SAMPLED = 4096
"""Number of coordinates by which the first centre is chosen."""
FAR = 1e4
"""Ratio of squared distances from which a centre is too far from the clients in the middle."""
ROUNDING = 64 * torch.finfo(torch.float64).eps
"""Part of the squared distances to the centre below which a squared distance is nothing but rounding."""


@dataclass(frozen=True)
class Gram:
    """Inner products of the clients' means, and of an origin, relative to a centre c: (p_i − c)·(p_j − c).

    Args:
        products: shape (K + 1, K + 1), float64, on the CPU, symmetric. Rows 0 to K − 1 are the clients, row K is the
            origin: the mean of the previous global posterior, 0 if there is none.
        size: number of parameters P.
    """

    products: Tensor
    size: int

    def squared_distances(self) -> Tensor:
        """Return ‖x_i − x_j‖² between clients, shape (K, K); see :func:`squared_distances`."""
        return squared_distances(self.products[:-1, :-1])


class GramRule(ReliabilityRule):
    r"""A rule whose answer is an average of the clients, with shares that it infers from their distances.

    .. math:: \mu = \sum_k a_k \mu_k, \qquad \sigma^2 = \operatorname{median}_k (\sigma_k^2; a_k)

    with the weighted median, entry by entry. The shares :math:`a_k` are the reliabilities that it reports. Distances
    are those of the means alone: a client can claim any variance, but as long as such clients hold less than half of
    the shares every fused variance lies between two honest ones. Point masses stay point masses.
    """

    by_columns: ClassVar[bool] = True

    @abstractmethod
    def infer_shares(self, gram: Gram, weights: Tensor) -> tuple[Tensor, dict[int, str]]:
        """Return the clients' shares, shape (K,), float64, none negative, of sum 1; and why clients were left out.

        Args:
            gram: of the clients and the origin.
            weights: shape (K,), float64, positive, of sum 1.

        Returns: the shares, and position of a client in the cohort → why it was left out.
        """

    def apply(self, cohort: Cohort, state: RuleState) -> Fused:
        """See :meth:`FusionRule.apply`."""
        shares, reasons = self.infer_shares(gram_of(cohort), cohort.weights)
        mean = weighted_sum([posterior.mean for posterior in cohort.posteriors], shares)
        variance = weighted_median([posterior.variance for posterior in cohort.posteriors], shares)
        return fused_by_shares(cohort, mean, variance, shares, reasons, state)


def fused_by_shares(
    cohort: Cohort, mean: Tensor, variance: Tensor, shares: Tensor, reasons: dict[int, str], state: RuleState
) -> Fused:
    """Return the result for fused moments, (P,), and the clients' shares, (K,); ``reasons`` are by position."""
    return Fused(
        cohort.posteriors[0].unflatten(mean, variance),
        reliability=dict(zip(cohort.clients, shares.tolist(), strict=True)),
        excluded={cohort.clients[position]: reason for position, reason in reasons.items()},
        state=state,
    )


def gram_of(cohort: Cohort) -> Gram:
    r"""Return the Gram matrix of the clients' means and the origin, in one pass over their parameters.

    .. math:: G_{ij} = (p_i - c) \cdot (p_j - c), \qquad
              \|p_i - p_j\|^2 = G_{ii} + G_{jj} - 2 G_{ij}

    The subtraction on the right cancels: distances smaller than :math:`10^{-8}` times those to the centre c are lost.
    So c is a client in the middle. Then neither a common offset of all clients nor an outlier, however far, costs the
    others a digit; around the mean of the clients it would, since one outlier carries the mean away. The first guess
    of c is the client nearest to the coordinate-wise median of at most 4,096 evenly spread coordinates. That client may
    lie far off in the other coordinates: if the median of its squared distances to the clients is more than
    :math:`10^4` times the least such median, the client with the least median becomes c and the products are computed
    again. Nothing is drawn at random: the same clients give the same matrix.

    Differences and products are computed in float64, in blocks of a few MiB, whatever the clients' dtypes.

    Raises:
        FusionError: a client so far from the others that its squared distance exceeds float64 (about 1e154).
    """
    few = sample([posterior.mean for posterior in cohort.posteriors], SAMPLED)
    far = (few - few.median(0).values).square().sum(1) if few.numel() else few.new_zeros(len(few))  # from the middle
    centre = int(cohort.collective.all_reduce(far.cpu()).argmin())
    gram = _around(centre, cohort)
    for _ in cohort.posteriors:  # the second centre is good enough; K of them are a bound
        spread = median_distances(gram)
        if spread[centre] <= FAR * spread.min():
            break
        centre = int(spread.argmin())
        gram = _around(centre, cohort)
    return gram


def squared_distances(products: Tensor) -> Tensor:
    """Return ‖p_i − p_j‖² of points of Gram matrix ``products``: exactly 0 on the diagonal, symmetric, never negative.

    Squared distances below :data:`ROUNDING` times those to the centre are set to 0.
    """
    squares = products.diagonal()
    sums = squares[:, None] + squares
    distances = sums - 2 * products
    return torch.where(distances > ROUNDING * sums, distances, 0).fill_diagonal_(0)


def median_distances(gram: Gram) -> Tensor:
    """Return each client's median squared distance to all clients, itself included, the upper of two: shape (K,)."""
    distances = gram.squared_distances()
    return distances.sort(1).values[:, len(distances) // 2]


def points_of(
    posteriors: Sequence[GaussianPosterior], previous: GaussianPosterior | None
) -> list[Mapping[str, Tensor]]:
    """Return the K means of the clients and, last, the origin."""
    clients = [posterior.mean for posterior in posteriors]
    return [*clients, {n: zeros_like(m) for n, m in clients[0].items()} if previous is None else previous.mean]


def _around(centre: int, cohort: Cohort) -> Gram:
    """Return the Gram matrix of the clients and the origin relative to the client in place ``centre``."""
    points = points_of(cohort.posteriors, cohort.previous)
    products, size = torch.zeros(len(points), len(points), dtype=torch.float64), 0
    for block in columns(points):
        products = products.to(block.device)
        block -= block[centre].clone()
        products.addmm_(block, block.T)
        size += block.shape[1]
    summed = cohort.collective.all_reduce(torch.cat([products.flatten(), products.new_tensor([size])]).cpu())
    products, size = summed[:-1].view(len(points), len(points)), int(summed[-1])
    for k in (~torch.isfinite(products.diagonal())).nonzero().flatten().tolist():
        who = f"client {cohort.clients[k]}" if k < len(points) - 1 else "the previous global posterior (0 if none)"
        raise FusionError(
            f"{who}: its squared distance to client {cohort.clients[centre]} is beyond double precision; leave out a "
            "client whose parameters exceed 1e150"
        )
    return Gram((products + products.T) / 2, size)


def combine(
    posteriors: Sequence[GaussianPosterior], coefficients: Tensor, previous: GaussianPosterior | None
) -> Tensor:
    r"""Return :math:`\sum_k a_k x_k + (1 - \sum_k a_k)\, o` of the clients' means x and the origin o.

    Args:
        posteriors: the K clients of the Gram matrix.
        coefficients: :math:`a`, shape (K,), float64, of any sign and sum.
        previous: the global posterior whose mean is the origin; None: the origin is 0.

    Returns: shape (P,), float64, in the order of the first client's names.
    """
    if previous is None:
        return weighted_sum([posterior.mean for posterior in posteriors], coefficients)
    return weighted_sum(points_of(posteriors, previous), torch.cat([coefficients, 1 - coefficients.sum()[None]]))


def squared_distances_to(products: Tensor, coefficients: Tensor) -> Tensor:
    r"""Return the squared distances of all points to an affine combination of them, from their Gram matrix alone.

    .. math:: \Bigl\|p_i - \sum_j a_j p_j\Bigr\|^2 = G_{ii} - 2 (G a)_i + a^\top G a

    Args:
        products: :math:`G`, shape (n, n): that of a :class:`Gram`, or the clients' rows and columns of it.
        coefficients: :math:`a`, shape (n,), float64, of sum 1.

    Returns: shape (n,), none negative.

    >>> points = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> squared_distances_to(points @ points.T, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    tensor([4., 4., 8.], dtype=torch.float64)
    """
    towards = products @ coefficients
    return (products.diagonal() - 2 * towards + coefficients @ towards).clamp_min(0)
