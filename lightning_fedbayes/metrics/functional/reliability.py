"""Confidence against accuracy, in bins of equal width."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lightning_fedbayes.metrics.functional.checks import check_bins, check_predictive
from lightning_fedbayes.metrics.functional.groups import sum_by_index


class Reliability(NamedTuple):
    """A reliability diagram: per bin, shape (bins,), and what it comes to."""

    confidence: Tensor
    """Mean confidence; NaN in empty bins."""
    accuracy: Tensor
    """Accuracy; NaN in empty bins."""
    counts: Tensor
    """Number of examples."""
    ece: Tensor
    """Expected calibration error, a scalar."""


def reliability(probs: Tensor, target: Tensor, bins: int = 15) -> Reliability:
    r"""Confidence, accuracy and number of examples of B bins of equal width, and their ECE.

    .. math:: \mathrm{ECE} = \sum_b \frac{n_b}{N} |\mathrm{acc}_b - \mathrm{conf}_b|

    Confidence is the largest probability. Use it for the picture; the ECE is that of torchmetrics.

    Args:
        probs: mean predictive, shape (batch, classes).
        target: class of each example, integers, shape (batch,).
        bins: number of bins B.

    Source: Guo et al. (2017).

    >>> import torch
    >>> diagram = reliability(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]), bins=2)
    >>> diagram.accuracy, diagram.ece
    (tensor([   nan, 0.5000]), tensor(0.3500))
    """
    return reliability_of_sums(*reliability_sums(probs, target, bins))


def reliability_sums(probs: Tensor, target: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per bin the number of examples, the sum of their confidences, and the number of correct ones."""
    check_bins(bins)
    probs = check_predictive(probs, target)
    confidence, predicted = probs.max(1)
    index = (confidence * bins).long().clamp(0, bins - 1)
    counts, confidences, hits = sum_by_index(index, bins, confidence, (predicted == target).to(probs.dtype))
    return counts.long(), confidences, hits.long()


def reliability_of_sums(counts: Tensor, confidences: Tensor, hits: Tensor) -> Reliability:
    """The diagram from the sums of :func:`reliability_sums`."""
    ece = (hits - confidences).abs().sum() / counts.sum()
    return Reliability(confidences / counts, hits / counts, counts, ece)
