"""Standardising with the statistics of the training examples, constant and missing values included."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Standardisation(NamedTuple):
    r"""Mean and standard deviation of every column, and what they make of other examples.

    .. math:: z = (x - m) / s, \qquad z = 0 \text{ where } x \text{ is missing or } s = 0

    A missing value so becomes the training mean. A column without any spread in training becomes 0 everywhere: what a
    network does with another value there was never learnt.

    Attributes:
        mean: m, shape (columns,), in the units of the columns; 0 where every value is missing.
        std: s, shape (columns,), population standard deviation (divided by n), exactly 0 for a constant column.
    """

    mean: Tensor
    std: Tensor

    def apply(self, values: Tensor) -> Tensor:
        """Standardised ``values``, shape (examples, columns), float32; NaN in ``values`` means missing."""
        scaled = (values - self.mean) / self.std
        return scaled.masked_fill(values.isnan() | (self.std == 0), 0).float()


def standardisation_of(values: Tensor) -> Standardisation:
    """Mean and standard deviation of the values that are there; those of several clients follow from sums.

    Args:
        values: float64, shape (examples, columns); NaN means missing.

    >>> import torch
    >>> scale = standardisation_of(torch.tensor([[1.0, 7.0], [3.0, 7.0], [torch.nan, 7.0]], dtype=torch.float64))
    >>> scale.mean, scale.std
    (tensor([2., 7.], dtype=torch.float64), tensor([1., 0.], dtype=torch.float64))
    """
    mean = values.nanmean(0).nan_to_num()
    std = (values - mean).square().nanmean(0).sqrt()
    # rounding gives equal values a deviation of 1e-16 times their size
    constant = values.nan_to_num(float("inf")).amin(0) >= values.nan_to_num(-float("inf")).amax(0)
    return Standardisation(mean, std.masked_fill(constant, 0))
