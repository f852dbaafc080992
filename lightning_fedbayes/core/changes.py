r"""A posterior as its change from another one, in half precision: half the bytes, and only the change is rounded.

.. math:: c = \frac{\mu' - \mu}{\sigma}, \qquad g = \log \frac{\sigma'^2}{\sigma^2}

Both are numbers without a unit, of size one or less where a posterior moves by less than its own width, so half
precision holds them to 2⁻¹² of themselves, whatever the units of the parameters.
"""

from __future__ import annotations

from torch import Tensor

Moments = tuple[Tensor, Tensor]
"""Means and variances, float64, of one shape."""


def coded(new: Moments, base: Moments) -> Moments:
    """Return c and g of ``new`` moments, float16; infinite where half precision ends, and g at a variance of 0.

    >>> import torch
    >>> one = torch.ones(1, dtype=torch.float64)
    >>> coded((1.5 * one, 4 * one), (one, 4 * one))
    (tensor([0.2500], dtype=torch.float16), tensor([0.], dtype=torch.float16))
    """
    scale = _scale(base)
    return ((new[0] - base[0]) / scale.sqrt()).half(), (new[1] / scale).log().half()


def decoded(code: Moments, base: Moments) -> Moments:
    """Return the moments of a code of :func:`coded`, about the same ``base``."""
    scale = _scale(base)
    return base[0] + code[0].double() * scale.sqrt(), scale * code[1].double().exp()


def _scale(base: Moments) -> Tensor:
    """Return the variances that changes are measured in; 1 where there is none."""
    return base[1].where(base[1] > 0, 1.0)
