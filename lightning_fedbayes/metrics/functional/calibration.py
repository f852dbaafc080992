"""Calibration error with bins of equal mass."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedbayes.metrics.functional.checks import check_bins, check_predictive
from lightning_fedbayes.metrics.functional.groups import sum_by_value


def adaptive_calibration_error(probs: Tensor, target: Tensor, bins: int = 15) -> Tensor:
    r"""Adaptive ECE, :math:`\sum_b \frac1B |\mathrm{acc}_b - \mathrm{conf}_b|` over B bins with N/B examples each.

    Confidence is the largest probability. Equal-width bins leave most bins of a confident network empty and put nearly
    all examples into the last; equal-mass bins look closely where the examples are. Examples of equal
    confidence are alike: where a bin's boundary falls among them, each bin gets its share of their mean accuracy, so
    the order of the data does not matter.

    Args:
        probs: mean predictive, shape (batch, classes).
        target: class of each example, integers, shape (batch,).
        bins: number of bins B.

    Returns: a scalar in [0, 1].

    Source: Nguyen and O'Connor (2015); Mukhoti et al. (2020), "AdaECE".

    >>> adaptive_calibration_error(torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([0, 1]))
    tensor(0.)
    """
    check_bins(bins)
    probs = check_predictive(probs, target)
    confidence, predicted = probs.max(1)
    counts, confidences, hits = sum_by_value(confidence, confidence, predicted == target)
    return equal_mass_error(counts, confidences, hits, bins).float().to(probs.device)


def equal_mass_error(counts: Tensor, confidences: Tensor, hits: Tensor, bins: int) -> Tensor:
    """Adaptive ECE of groups of examples in ascending order of confidence.

    Args:
        counts: examples in each group, float64, shape (groups,).
        confidences: sum of their confidences, shape (groups,).
        hits: number of correct ones, shape (groups,).
        bins: number of bins.
    """
    gap = (hits - confidences)[counts > 0]
    mass = counts[counts > 0].cumsum(0)
    edges = torch.linspace(0, 1, bins + 1, dtype=mass.dtype) * mass[-1]
    zero = mass.new_zeros(1)
    return _interpolate(edges, torch.cat([zero, mass]), torch.cat([zero, gap.cumsum(0)])).diff().abs().sum() / mass[-1]


def _interpolate(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The piecewise linear function through (x, y), x strictly ascending, at points between the first and last x."""
    right = torch.searchsorted(x, at).clamp(1, len(x) - 1)
    share = (at - x[right - 1]) / (x[right] - x[right - 1])
    return torch.lerp(y[right - 1], y[right], share)
