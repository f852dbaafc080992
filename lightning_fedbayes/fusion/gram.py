"""Matrices of all clients: blocks of their parameters, their Gram matrix, and rules that score clients by it."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.core.posterior import GaussianPosterior, is_zero, zeros_like
from lightning_fedbayes.fusion.rule import Cohort, Fused, ReliabilityRule, RuleState

ENTRIES = 2**19
"""Number of entries of a block: 4 MiB in double precision, which fits in a cache."""
SAMPLED = 4096
"""Number of coordinates by which the first centre is chosen."""
FAR = 1e4
"""Ratio of squared distances from which a centre is too far from the clients in the middle."""
ROUNDING = 64 * torch.finfo(torch.float64).eps
"""Part of the squared distances to the centre below which a squared distance is rounding."""


def columns(rows: Sequence[Mapping[str, Tensor]]) -> Iterator[Tensor]:
    """Yield blocks of the float64 matrix that has the tensors of ``rows[k]``, flattened, as row k.

    The blocks have shape (rows, width) and come left to right in the order of the first row's names. They are copies
    that the caller may change, on the tensors' device (the CPU for MPS, which has no float64).

    >>> a, b = {"w": torch.tensor([1.0, 2.0]), "v": torch.tensor(3.0)}, {"w": torch.zeros(2), "v": torch.tensor(5.0)}
    >>> torch.cat(list(columns([a, b])), 1)
    tensor([[1., 2., 3.],
            [0., 0., 5.]], dtype=torch.float64)
    """
    width = max(1, ENTRIES // len(rows))
    for name, like in rows[0].items():
        flat = [row[name].detach().reshape(-1) for row in rows]
        for start in range(0, like.numel(), width):
            yield in_double([each[start : start + width] for each in flat])


def sample(rows: Sequence[Mapping[str, Tensor]], most: int) -> Tensor:
    """Return at most ``most`` evenly spread columns of the matrix of :func:`columns`, shape (rows, columns)."""
    size = sum(tensor.numel() for tensor in rows[0].values())
    stride = max(1, -(-size // most))
    blocks, offset = [], 0
    for name, like in rows[0].items():
        first = -offset % stride
        if first < like.numel():
            blocks.append(in_double([row[name].detach().reshape(-1)[first::stride] for row in rows]))
        offset += like.numel()
    return torch.cat(blocks, 1) if blocks else torch.zeros(len(rows), 0, dtype=torch.float64)


def in_double(vectors: Sequence[Tensor]) -> Tensor:
    """Return ``vectors`` of equal length as the rows of a new float64 matrix."""
    if any(vector.device.type == "mps" for vector in vectors):
        vectors = [vector.cpu() for vector in vectors]
    if len({vector.dtype for vector in vectors}) > 1:  # each is exact in float64, but not in each other
        vectors = [vector.to(torch.float64) for vector in vectors]
    return torch.stack(list(vectors)).to(torch.float64)


def weighted_sum(rows: Sequence[Mapping[str, Tensor]], weights: Tensor) -> Tensor:
    """Return Σ_k w_k x_k of the rows x_k of :func:`columns`, shape (P,), float64, for weights of any sign."""
    counted = [k for k, weight in enumerate(weights.tolist()) if weight] or [0]
    weights = weights[counted]
    parts = []
    for name in rows[0]:
        tensors = [{name: rows[k][name]} for k in counted]
        if all(is_zero(each[name]) for each in tensors):
            tensors = tensors[:1]
        parts += [weights[: len(tensors)].to(block.device) @ block for block in columns(tensors)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def weighted_median(rows: Sequence[Mapping[str, Tensor]], weights: Tensor) -> Tensor:
    """Return the weighted median of ``rows``, entry by entry, the mean of the lower and the upper one, shape (P,).

    ``weights`` have shape (rows,), float64, none negative, of sum 1.

    >>> rows = [{"w": torch.tensor([value])} for value in (1.0, 9.0, 2.0, 4.0)]
    >>> weighted_median(rows, torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64))
    tensor([3.], dtype=torch.float64)
    """
    counted = [k for k, weight in enumerate(weights.tolist()) if weight]
    weights = weights[counted]
    parts = []
    for name in rows[0]:
        tensors = [{name: rows[k][name]} for k in counted]
        if len(counted) == 1 or all(is_zero(each[name]) for each in tensors):
            parts += [block[0] for block in columns(tensors[:1])]
            continue
        for block in columns(tensors):
            ordered, order = block.T.contiguous().sort(1)
            below = weights.to(block.device)[order].cumsum_(1)
            lower, upper = (
                ordered.gather(1, (below < half).sum(1, keepdim=True).clamp_max_(len(block) - 1)).squeeze(1)
                for half in (0.5 - 1e-12, 0.5 + 1e-12)  # weights sum to 1 up to rounding
            )
            parts.append((lower + upper) / 2)
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class Gram:
    """Inner products of the clients' means, and of an origin, relative to a centre c: (p_i − c)·(p_j − c).

    It gives all distances between clients and to any affine combination of them. A rule whose answer is a combination
    of the clients' means then reads the K × P parameters twice, and iterates on K + 1 numbers.

    Args:
        products: shape (K + 1, K + 1), float64, on the CPU, symmetric. Rows 0 to K − 1 are the clients. Row K is the
            origin, the mean of the previous global posterior, or 0.
        size: number of parameters P.
    """

    products: Tensor
    size: int

    def squared_distances(self) -> Tensor:
        """Return ‖x_i − x_j‖² between clients, shape (K, K). See :func:`squared_distances`."""
        return squared_distances(self.products[:-1, :-1])


class GramRule(ReliabilityRule):
    r"""An average of the clients, with shares inferred from their distances.

    .. math:: \mu = \sum_k a_k \mu_k, \qquad \sigma^2 = \operatorname{median}_k (\sigma_k^2; a_k)

    with the weighted median, entry by entry. The shares :math:`a_k` are the reliabilities. Distances are between means,
    since a client can claim any variance. As long as liars hold less than half of the shares, every fused variance lies
    between two honest ones. Point masses stay point masses.
    """

    by_columns: ClassVar[bool] = True

    @abstractmethod
    def infer_shares(self, gram: Gram, weights: Tensor) -> tuple[Tensor, dict[int, str]]:
        """Return the clients' shares, (K,), none negative, of sum 1, and position → why a client was left out."""

    def apply(self, cohort: Cohort, state: RuleState) -> Fused:
        """See :meth:`FusionRule.apply`."""
        shares, reasons = self.infer_shares(gram_of(cohort), cohort.weights)
        mean = weighted_sum([posterior.mean for posterior in cohort.posteriors], shares)
        return fused_by_shares(cohort, mean, shares, shares, reasons, state)


def fused_by_shares(
    cohort: Cohort, mean: Tensor, shares: Tensor, reliability: Tensor, reasons: Mapping[int, str], state: RuleState
) -> Fused:
    """Return the result for a mean, (P,), and medians of the variances by ``shares``. Reasons are by position."""
    variance = weighted_median([posterior.variance for posterior in cohort.posteriors], shares)
    return Fused(
        cohort.posteriors[0].unflatten(mean, variance),
        reliability=dict(zip(cohort.clients, reliability.tolist(), strict=True)),
        excluded={cohort.clients[position]: reason for position, reason in reasons.items()},
        state=state,
    )


def gram_of(cohort: Cohort) -> Gram:
    r"""Return the Gram matrix of the clients' means and the origin, in one pass over their parameters.

    .. math:: G_{ij} = (p_i - c) \cdot (p_j - c), \qquad \|p_i - p_j\|^2 = G_{ii} + G_{jj} - 2 G_{ij}

    The subtraction on the right cancels: distances smaller than :math:`10^{-8}` times the distance to the centre c are
    lost. So c is a client in the middle, and neither a common offset nor an outlier costs the others a digit. The first
    c is the client nearest to the median of at most 4,096 evenly spread coordinates. If its median squared distance to
    the clients is more than :math:`10^4` times the least such median, the client with the least becomes c, and the
    products are computed again, in float64 and in blocks of a few MiB.

    Raises FusionError: a client is so far from the others that its squared distance exceeds float64 (about 1e154).
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
    """Return ‖p_i − p_j‖² of points of a Gram matrix: symmetric, never negative, 0 where rounding dominates."""
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
        what = f"{who}: its squared distance to client {cohort.clients[centre]} is beyond double precision"
        raise FusionError(f"{what}; leave out a client with parameters above 1e150")
    return Gram((products + products.T) / 2, size)


def combine(
    posteriors: Sequence[GaussianPosterior], coefficients: Tensor, previous: GaussianPosterior | None
) -> Tensor:
    r"""Return :math:`\sum_k a_k x_k + (1 - \sum_k a_k)\, o`, (P,), for means x, any a, and an origin o, else 0."""
    if previous is None:
        return weighted_sum([posterior.mean for posterior in posteriors], coefficients)
    return weighted_sum(points_of(posteriors, previous), torch.cat([coefficients, 1 - coefficients.sum()[None]]))


def squared_distances_to(products: Tensor, coefficients: Tensor) -> Tensor:
    r"""Return the squared distances of all points to an affine combination of them, shape (n,), from their Gram matrix.

    .. math:: \Bigl\|p_i - \sum_j a_j p_j\Bigr\|^2 = G_{ii} - 2 (G a)_i + a^\top G a

    >>> points = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> squared_distances_to(points @ points.T, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    tensor([4., 4., 8.], dtype=torch.float64)
    """
    towards = products @ coefficients
    return (products.diagonal() - 2 * towards + coefficients @ towards).clamp_min(0)
