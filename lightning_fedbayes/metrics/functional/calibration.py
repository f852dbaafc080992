"""Calibration: confidence against accuracy, in bins of equal width or of equal mass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fedbayes.metrics.functional.utilities import check_bins, check_predictive, sum_by_index, sum_by_value


class CalibrationBins(NamedTuple):
    """Data of a calibration diagram: three vectors of shape (bins,), and the ECE."""

    confidence: Tensor
    """Mean confidence; NaN in empty bins."""
    accuracy: Tensor
    """Accuracy; NaN in empty bins."""
    counts: Tensor
    """Number of examples."""
    ece: Tensor
    """Expected calibration error, a scalar."""


def calibration_diagram(probs: Tensor, target: Tensor, bins: int = 15) -> CalibrationBins:
    r"""Calibration diagram: confidence, accuracy and number of examples of B bins of equal width, and their ECE.

    .. math:: \mathrm{ECE} = \sum_b \frac{n_b}{N} |\mathrm{acc}_b - \mathrm{conf}_b|

    The diagram is also called a reliability diagram. Confidence is the largest probability; the ECE equals that of
    torchmetrics.

    Args:
        probs: mean predictive, shape (batch, classes).
        target: class of each example, integers, shape (batch,).
        bins: number of bins B.

    Source: Guo et al. (2017).

    >>> diagram = calibration_diagram(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]), bins=2)
    >>> diagram.accuracy, diagram.ece
    (tensor([   nan, 0.5000]), tensor(0.3500))
    """
    return calibration_of_sums(*calibration_sums(probs, target, bins))


def calibration_sums(probs: Tensor, target: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, per bin, the number of examples, the sum of their confidences and the number of correct ones."""
    check_bins(bins)
    probs = check_predictive(probs, target)
    confidence, predicted = probs.max(1)
    index = (confidence * bins).long().clamp(0, bins - 1)
    counts, confidences, hits = sum_by_index(index, bins, confidence, (predicted == target).to(probs.dtype))
    return counts.long(), confidences, hits.long()


def calibration_of_sums(counts: Tensor, confidences: Tensor, hits: Tensor) -> CalibrationBins:
    """Return the diagram from the sums of :func:`calibration_sums`."""
    ece = (hits - confidences).abs().sum() / counts.sum()
    return CalibrationBins(confidences / counts, hits / counts, counts, ece)


def adaptive_calibration_error(probs: Tensor, target: Tensor, bins: int = 15) -> Tensor:
    r"""Adaptive ECE, :math:`\sum_b \frac1B |\mathrm{acc}_b - \mathrm{conf}_b|` over B bins with N/B examples each.

    Confidence is the largest probability. Bins of equal width put nearly all examples of a confident network into the
    last bin; bins of equal mass are fine where the examples are. If a bin's boundary falls among examples of equal
    confidence, each bin gets its share of their mean accuracy, so the order of the data does not matter.

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
    """Return the adaptive ECE of groups of examples in ascending order of confidence, shape (groups,), float64."""
    gap = (hits - confidences)[counts > 0]
    mass = counts[counts > 0].cumsum(0)
    edges = torch.linspace(0, 1, bins + 1, dtype=mass.dtype) * mass[-1]
    x, y = (torch.cat([mass.new_zeros(1), each]) for each in (mass, gap.cumsum(0)))
    right = torch.searchsorted(x, edges).clamp(1, len(x) - 1)  # and between the points linearly
    between = torch.lerp(y[right - 1], y[right], (edges - x[right - 1]) / (x[right] - x[right - 1]))
    return between.diff().abs().sum() / mass[-1]
