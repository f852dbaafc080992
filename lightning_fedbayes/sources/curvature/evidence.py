"""The prior of a Laplace approximation, chosen by its evidence."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

LARGEST = 1e6
"""Bounds of a chosen prior precision: a standard deviation of 0.001 to 1,000."""
GRID = 50
"""Precisions, evenly spaced in their logarithm, among which that of most evidence is looked for first."""


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


def evident_precision(
    information: Tensor, pull: Tensor, near: float | None = None, factor: float = 2.0
) -> float:
    r"""Return the precision a of the prior N(0, 1/a) of most evidence beside a quadratic loss.

    .. math:: L(\theta) = \tfrac12 \theta^\top F \theta - t^\top \theta, \qquad
              \log p(D) = \text{const} + \tfrac12 \sum_i \left(\frac{t_i^2}{F_i + a} - \log(1 + F_i / a)\right)

    Unlike :func:`chosen_precision` it lets the mode move with a, :math:`\hat\theta_i = t_i / (F_i + a)`; where both
    have arrived they are one: :math:`a \|\hat\theta\|^2 = \sum_i F_i / (F_i + a)` at the maximum. With the
    expectations of the loss's derivatives under a Gaussian it is the maximum of the variational bound.

    Args:
        information: F, the eigenvalues, shape (parameters,), none negative.
        pull: t, in the eigenvectors, of the same shape.
        near: search within a ``factor`` of this; None: between 1 / :data:`LARGEST` and :data:`LARGEST`.
        factor: see ``near``.

    Source: MacKay 1992.
    """
    heard = information > information.max() * torch.finfo(torch.float64).eps * len(information)  # the rest is rounding
    information, squares = information[heard].double(), pull[heard].double().square()

    def evidence(log: float) -> float:
        a = math.exp(log)
        return float((squares / (information + a)).sum() - torch.log1p(information / a).sum())

    low, high = -math.log(LARGEST), math.log(LARGEST)
    if near is not None:
        low, high = max(low, math.log(near / factor)), min(high, math.log(near * factor))
    grid = torch.linspace(low, high, GRID).tolist()
    best = max(range(GRID), key=[evidence(each) for each in grid].__getitem__)
    low, high = grid[max(0, best - 1)], grid[min(GRID - 1, best + 1)]
    while high - low > 1e-12:  # of the slope: the maximum itself is flat, and rounding moves it by 1e-8
        middle = (low + high) / 2
        a = math.exp(middle)
        slope = float((information / (information + a)).sum() - a * (squares / (information + a).square()).sum())
        low, high = (middle, high) if slope > 0 else (low, middle)
    return math.exp((low + high) / 2)
