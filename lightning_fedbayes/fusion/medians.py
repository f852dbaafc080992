"""Rules that look at one parameter at a time: the coordinate-wise median and the trimmed mean."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion.columns import columns
from lightning_fedbayes.fusion.registry import register_fusion
from lightning_fedbayes.fusion.rule import FusionRule
from lightning_fedbayes.posterior import GaussianPosterior, is_zero


class _CoordinateRule(FusionRule):
    """The mean of what is left in the middle, per coordinate; of the means and of the variances alike."""

    uses_weights: ClassVar[bool] = False
    by_columns: ClassVar[bool] = True

    @abstractmethod
    def dropped(self, count: int) -> int:
        """How many of ``count`` clients are dropped at either end, less than half."""

    def fuse(
        self, posteriors: Sequence[GaussianPosterior], weights: Tensor, previous: GaussianPosterior | None
    ) -> GaussianPosterior:
        """See :meth:`FusionRule.fuse`."""
        drop = self.dropped(len(posteriors))
        mean = middle([posterior.mean for posterior in posteriors], drop)
        variances = [posterior.variance for posterior in posteriors]
        point_mass = all(is_zero(each) for variance in variances for each in variance.values())
        return posteriors[0].unflatten(mean, None if point_mass else middle(variances, drop))


@register_fusion("coordinate_median")
class CoordinateMedian(_CoordinateRule):
    r"""Median of the clients, coordinate by coordinate, of the means and of the variances.

    .. math:: \mu_i = \operatorname{median}_k \mu_{ki}, \qquad \sigma_i^2 = \operatorname{median}_k \sigma_{ki}^2

    the mean of the two in the middle for an even number of clients.

    When to use it: fewer than half of the clients may send anything, means or variances; every fused value then lies
    between two honest ones. The clients' values of one parameter must be comparable, and much of what they have in
    common across parameters is lost when K is small. It takes no weights.

    Source: Yin, Chen, Ramchandran and Bartlett 2018, "Byzantine-robust distributed learning", Definition 1;
    [Untrusted] baseline. The variance is ours: they fuse points.
    """

    def dropped(self, count: int) -> int:
        """All but one, or but two of an even number."""
        return (count - 1) // 2


@register_fusion("trimmed_mean")
class TrimmedMean(_CoordinateRule):
    r"""Mean of the clients without the f smallest and the f largest, coordinate by coordinate.

    .. math:: \mu_i = \frac{1}{K - 2f} \sum_{k = f + 1}^{K - f} \mu_{(k)i}

    with :math:`\mu_{(1)i} \le \dots \le \mu_{(K)i}`, and the same of the variances. f = 0 is the plain average, the
    largest f the coordinate median.

    When to use it: at most f of the clients may send anything, and the average of the others shall still smooth their
    noise. It takes no weights.

    Args:
        trim: a fraction in [0, 0.5) of the clients that is dropped at *either* end: f is ``trim`` · K, rounded up so
            that a fraction ``trim`` of bad clients is covered in a small cohort too, and at most so many that a
            client is left. Or an integer: f itself.

    Raises:
        FusionError: a fraction outside [0, 0.5), a negative count, or a count that leaves no client.

    Source: Yin et al. 2018, Definition 2. The variance is ours: they fuse points.
    """

    def __init__(self, trim: float = 0.1) -> None:
        if isinstance(trim, int) and trim < 0:
            raise FusionError(f"trimmed_mean: trim={trim} is not a number of clients; give at least 0")
        if not isinstance(trim, int) and not 0 <= trim < 0.5:
            raise FusionError(f"trimmed_mean: trim={trim} is not in [0, 0.5); as a number of clients give an integer")
        self.trim = trim

    def dropped(self, count: int) -> int:
        """f."""
        most = (count - 1) // 2
        if not isinstance(self.trim, int):
            return min(most, math.ceil(self.trim * count - 1e-9))  # 0.07 * 100 is 7.000000000000001
        if self.trim > most:
            raise FusionError(
                f"trimmed_mean: trim={self.trim} at either end of {count} clients leaves none; give at most {most}, "
                "or a fraction"
            )
        return self.trim


def middle(rows: Sequence[Mapping[str, Tensor]], drop: int) -> Tensor:
    """Mean over ``rows`` without the ``drop`` smallest and largest, per coordinate: shape (P,), float64.

    >>> middle([{"w": torch.tensor([1.0, 9.0])}, {"w": torch.tensor([3.0, 2.0])}, {"w": torch.tensor([50.0, 1.0])}], 1)
    tensor([3., 2.], dtype=torch.float64)
    """
    kept = slice(drop, len(rows) - drop)
    parts = [block.T.contiguous().sort(1).values[:, kept].mean(1) for block in columns(rows)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
