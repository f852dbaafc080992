r"""The prior of a Laplace approximation, chosen by its evidence.

The standard deviation :math:`s = a^{-1/2}` has a prior of its own, half-Cauchy of scale 1, as evidence alone has its
maximum at 0 where few data happen to show no effect. Per log a that is :math:`\sqrt{a} / (1 + a)`, which hardly counts
beside many parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

LARGEST = 1e6
"""Bounds of the search for a prior precision: a standard deviation of 0.001 to 1,000."""
GRID = 50
"""Precisions, evenly spaced in their logarithm, among which the most probable one is looked for first."""


def chosen_precision(information: Iterable[Tensor], mean: Iterable[Tensor]) -> float:
    r"""Return the most probable precision a of the prior N(0, 1/a), by Laplace's evidence.

    .. math:: \log p(D \mid a) \approx \log p(D \mid \hat\theta)
              + \tfrac12 \sum_i \left(\log a - a \hat\theta_i^2 - \log(F_i + a)\right)

    with the mean and the information F as they are. There :math:`a \|\hat\theta\|^2 = \gamma + (1 - a) / (1 + a)`, with
    the number of parameters that the data determine, :math:`\gamma = \sum_i F_i / (F_i + a)`. The right side falls with
    a, so there is one such a, which bisection finds; nothing to learn from gives 1, the prior's own.

    Args:
        information: F, tensors of any shapes, none negative.
        mean: :math:`\hat\theta`, of the same shapes.

    Source: MacKay 1992; Immer, Bauer, Fortuin, Rätsch and Khan 2021, for networks; Gelman 2006 for the half-Cauchy.
    """
    information = torch.cat([each.flatten().double() for each in information])
    size = sum(float(each.detach().double().square().sum()) for each in mean)
    low, high = -math.log(LARGEST), math.log(LARGEST)
    while high - low > 1e-9:
        middle = (low + high) / 2
        precision = math.exp(middle)
        determined = float((information / (information + precision)).sum())
        low, high = (middle, high) if determined + _pull(precision) > precision * size else (low, middle)
    return math.exp((low + high) / 2)


def evident_precision(information: Tensor, pull: Tensor, near: float | None = None, factor: float = 2.0) -> float:
    r"""Return the most probable precision a of the prior N(0, 1/a) beside a quadratic loss.

    .. math:: L(\theta) = \tfrac12 \theta^\top F \theta - t^\top \theta, \qquad
              \log p(D \mid a) = \text{const} + \tfrac12 \sum_i \left(\frac{t_i^2}{F_i + a} - \log(1 + F_i / a)\right)

    Unlike :func:`chosen_precision` it lets the mode move with a, :math:`\hat\theta_i = t_i / (F_i + a)`; where both
    have arrived they are one. With the expectations of the loss's derivatives under a Gaussian it is the maximum of
    the variational bound.

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
        found = float((squares / (information + a)).sum() - torch.log1p(information / a).sum())
        return found + log - 2 * math.log1p(a)

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
        low, high = (middle, high) if slope + _pull(a) > 0 else (low, middle)
    return math.exp((low + high) / 2)


def _pull(precision: float) -> float:
    """Return twice the slope of the half-Cauchy's logarithm by that of the precision."""
    return (1 - precision) / (1 + precision)
