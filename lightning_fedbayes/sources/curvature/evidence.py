"""The prior of a Laplace approximation, chosen by its evidence."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

LARGEST = 1e6
"""Bounds of a chosen prior precision: a standard deviation of 0.001 to 1,000."""


def chosen_precision(information: Iterable[Tensor], mean: Iterable[Tensor]) -> float:
    r"""Return the precision a of the prior N(0, 1/a) that maximises Laplace's evidence.

    .. math:: \log p(D) \approx \log p(D \mid \hat\theta)
              + \tfrac12 \sum_i \left(\log a - a \hat\theta_i^2 - \log(F_i + a)\right)

    with the mean and the information F as they are. At the maximum :math:`a \|\hat\theta\|^2 = \gamma`, with the number
    of parameters that the data determine, :math:`\gamma = \sum_i F_i / (F_i + a)`. As :math:`\gamma / a` falls with a
    there is one such a, which bisection finds; where it lies beyond 1 / :data:`LARGEST` or :data:`LARGEST`, or does
    not exist because F or :math:`\hat\theta` is 0, the nearest bound is taken.

    Args:
        information: F, tensors of any shapes, none negative.
        mean: :math:`\hat\theta`, of the same shapes.

    Source: MacKay 1992; Immer, Bauer, Fortuin, Rätsch and Khan 2021, for networks.
    """
    information = torch.cat([each.flatten().double() for each in information])
    size = sum(float(each.detach().double().square().sum()) for each in mean)
    low, high = -math.log(LARGEST), math.log(LARGEST)
    while high - low > 1e-9:
        middle = (low + high) / 2
        precision = math.exp(middle)
        determined = float((information / (information + precision)).sum())
        low, high = (middle, high) if determined > precision * size else (low, middle)
    return math.exp((low + high) / 2)
