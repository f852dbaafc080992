r"""The Gram matrix of a cohort: all distances between clients, and to any affine combination of them.

A rule whose answer is a combination of the clients' means reads the K × P parameters once for the Gram matrix and once
for the answer; its iterations in between work on K + 1 numbers and cost nothing in P.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion.columns import columns, sample, total, weighted_sum
from lightning_fedbayes.posterior import GaussianPosterior, zeros_like

SAMPLED = 4096
"""Coordinates by which the first centre is chosen."""
FAR = 1e4
"""Ratio of squared distances from which a centre is too far from the clients in the middle."""

ROUNDING = 64 * torch.finfo(torch.float64).eps
"""Squared distances below this share of those to the centre are rounding."""


@dataclass(frozen=True)
class Gram:
    """Inner products of the clients' means, and of an origin, as seen from a centre c: (p_i − c)·(p_j − c).

    Args:
        products: shape (K + 1, K + 1), float64, on the CPU, symmetric. Rows 0 to K − 1 are the clients, row K is the
            origin: the mean of the previous global posterior, 0 if there is none.
        size: number of parameters P.
    """

    products: Tensor
    size: int

    def squared_distances(self) -> Tensor:
        """‖x_i − x_j‖² between clients, shape (K, K); see :func:`squared_distances`."""
        return squared_distances(self.products[:-1, :-1])


def gram_of(posteriors: Sequence[GaussianPosterior], previous: GaussianPosterior | None) -> Gram:
    r"""The Gram matrix of the clients' means and the origin, in one pass over their parameters.

    .. math:: G_{ij} = (p_i - c) \cdot (p_j - c), \qquad
              \|p_i - p_j\|^2 = G_{ii} + G_{jj} - 2 G_{ij}

    The centre c decides what is left after the subtraction on the right: distances smaller than :math:`10^{-8}` times
    those to the centre are lost. So c is a client in the middle. Neither a common offset of all clients nor an outlier
    then costs the others a digit, however far it lies, which the mean of the clients would not achieve: one outlier
    carries it away. The middle is first guessed, as the client nearest to the coordinate-wise median of at most 4,096
    evenly spread coordinates. A client that is like the others there and far off elsewhere is found out by the
    distances: if the median of its squared distances to the clients is more than :math:`10^4` times the least such
    median, the client of the least takes its place and the products are taken again. No draw is involved: the same
    clients give the same matrix.

    Args:
        posteriors: at least one, of equal names and shapes, all values finite. Any floating-point dtype; differences
            and products are taken in float64, in blocks of a few MiB.
        previous: the global posterior that the clients started from: the origin. None: the origin is 0.

    Raises:
        FusionError: a client so far from the others that its squared distance exceeds float64 (about 1e154).
    """
    points = points_of(posteriors, previous)
    few = sample(points[:-1], SAMPLED)
    centre = int(total(far_from_middle(few).cpu()).argmin())
    gram = _around(centre, points)
    for _ in posteriors:  # the second look settles it; K looks are a bound
        spread = median_distances(gram)
        if spread[centre] <= FAR * spread.min():
            break
        centre = int(spread.argmin())
        gram = _around(centre, points)
    return gram


def far_from_middle(rows: Tensor) -> Tensor:
    """Squared distance of each row to the coordinate-wise median, shape (rows,)."""
    return (rows - rows.median(0).values).square().sum(1) if rows.numel() else rows.new_zeros(len(rows))


def squared_distances(products: Tensor) -> Tensor:
    """‖p_i − p_j‖² of points of Gram matrix ``products``: exactly 0 on the diagonal, symmetric, never negative.

    What rounding cannot tell from 0 is 0: less than :data:`ROUNDING` of the squared distances to the centre.
    """
    squares = products.diagonal()
    sums = squares[:, None] + squares
    distances = sums - 2 * products
    return torch.where(distances > ROUNDING * sums, distances, 0).fill_diagonal_(0)


def median_distances(gram: Gram) -> Tensor:
    """Median of each client's squared distances to all clients, itself among them, the upper of two: shape (K,)."""
    distances = gram.squared_distances()
    return distances.sort(1).values[:, len(distances) // 2]


def points_of(
    posteriors: Sequence[GaussianPosterior], previous: GaussianPosterior | None
) -> list[Mapping[str, Tensor]]:
    """The K means of the clients and, last, the origin."""
    clients = [posterior.mean for posterior in posteriors]
    return [*clients, {n: zeros_like(m) for n, m in clients[0].items()} if previous is None else previous.mean]


def _around(centre: int, points: list[Mapping[str, Tensor]]) -> Gram:
    """The Gram matrix of ``points`` as seen from one of them."""
    products, size = torch.zeros(len(points), len(points), dtype=torch.float64), 0
    for block in columns(points):
        products = products.to(block.device)
        block -= block[centre].clone()
        products.addmm_(block, block.T)
        size += block.shape[1]
    summed = total(torch.cat([products.flatten(), products.new_tensor([size])]).cpu())
    products, size = summed[:-1].view(len(points), len(points)), int(summed[-1])
    for k in (~torch.isfinite(products.diagonal())).nonzero().flatten().tolist():
        who = f"client {k}" if k < len(points) - 1 else "the previous global posterior (0 if there is none)"
        raise FusionError(
            f"{who}: its squared distance to client {centre} is beyond double precision; leave out a client whose "
            "parameters exceed 1e150"
        )
    return Gram((products + products.T) / 2, size)


def combine(
    posteriors: Sequence[GaussianPosterior], coefficients: Tensor, previous: GaussianPosterior | None
) -> Tensor:
    r"""The point :math:`\sum_k a_k x_k + (1 - \sum_k a_k)\, o` of the clients' means x and the origin o.

    Args:
        posteriors: the K clients of the Gram matrix.
        coefficients: :math:`a`, shape (K,), float64, of any sign and sum.
        previous: the global posterior whose mean is the origin; None: the origin is 0.

    Returns: shape (P,), float64, in the order of the first client's names.
    """
    if previous is None:
        return weighted_sum([posterior.mean for posterior in posteriors], coefficients)
    return weighted_sum(points_of(posteriors, previous), torch.cat([coefficients, 1 - coefficients.sum()[None]]))


def combine_variances(posteriors: Sequence[GaussianPosterior], coefficients: Tensor) -> Tensor:
    r"""The average variance :math:`\sum_k a_k \sigma_k^2`, shape (P,), float64.

    Args:
        posteriors: the K clients.
        coefficients: :math:`a`, shape (K,), float64, none negative, of sum 1.
    """
    return weighted_sum([posterior.variance for posterior in posteriors], coefficients)


def squared_distances_to(products: Tensor, coefficients: Tensor) -> Tensor:
    r"""Squared distances of all points to one affine combination of them, from their Gram matrix alone.

    .. math:: \Bigl\|p_i - \sum_j a_j p_j\Bigr\|^2 = G_{ii} - 2 (G a)_i + a^\top G a

    Args:
        products: :math:`G`, shape (n, n): that of a :class:`Gram`, or the part of it that belongs to the clients.
        coefficients: :math:`a`, shape (n,), float64, of sum 1.

    Returns: shape (n,), none negative.

    >>> points = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> squared_distances_to(points @ points.T, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    tensor([4., 4., 8.], dtype=torch.float64)
    """
    towards = products @ coefficients
    return (products.diagonal() - 2 * towards + coefficients @ towards).clamp_min(0)
