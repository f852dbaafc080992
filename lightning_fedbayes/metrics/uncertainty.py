"""Uncertainty of a classifier's predictions: means, and what they are worth."""

from typing import Any

from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError, check_at_least
from lightning_fedbayes.metrics.functional import uncertainty as measures
from lightning_fedbayes.metrics.functional.utilities import check_vectors, sum_by_index
from lightning_fedbayes.metrics.scores import ExampleMean, HitCounts

ROUNDING = 1e-3
"""Largest excess over [0, 1] of an uncertainty that counts as rounding."""


class PredictiveEntropy(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.predictive_entropy`: the total uncertainty, at most 1."""

    def update(self, probs: Tensor) -> None:
        """Add class probabilities of each posterior sample, shape (samples, batch, classes)."""
        self.add(measures.predictive_entropy(probs))


class KwonAleatoric(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.kwon_aleatoric`: noise in the labels."""

    def update(self, probs: Tensor) -> None:
        """Add class probabilities of each posterior sample, shape (samples, batch, classes)."""
        self.add(measures.kwon_aleatoric(probs))


class KwonEpistemic(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.kwon_epistemic`: disagreement of the samples."""

    def update(self, probs: Tensor) -> None:
        """Add class probabilities of each posterior sample, shape (samples, batch, classes)."""
        self.add(measures.kwon_epistemic(probs))


class MutualInformation(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.mutual_information` between label and parameters."""

    def update(self, probs: Tensor) -> None:
        """Add class probabilities of each posterior sample, shape (samples, batch, classes)."""
        self.add(measures.mutual_information(probs))


class AccuracyRetained(HitCounts):
    """Accuracy against the fraction retained when the most uncertain examples are discarded, over all batches.

    Uncertainties u are kept in a histogram of ``resolution`` cells, equally wide in √u to resolve small u. Examples in
    one cell count as equally uncertain. Other arguments are those of :class:`torchmetrics.Metric`.

    >>> import torch
    >>> metric = AccuracyRetained()
    >>> metric.update(torch.tensor([True, False]), torch.tensor([0.1, 0.5]))
    >>> metric.compute().area
    tensor(0.7500)
    """

    higher_is_better = True

    def __init__(self, resolution: int = 10_000, **kwargs: Any) -> None:
        check_at_least("resolution", resolution, 1, error=FedBayesError)
        super().__init__(resolution, **kwargs)
        self.resolution = resolution

    def update(self, correct: Tensor, uncertainty: Tensor) -> None:
        """Add examples.

        Args:
            correct: true where the example was classified correctly, shape (batch,).
            uncertainty: normalised entropy, aleatoric or epistemic trace, shape (batch,), in [0, 1] up to rounding.
        """
        check_vectors(correct=correct, uncertainty=uncertainty)
        if not ((uncertainty >= -ROUNDING) & (uncertainty <= 1 + ROUNDING)).all():
            given = f"uncertainty ranges from {uncertainty.min():.3g} to {uncertainty.max():.3g}"
            raise FedBayesError(f"{given}, but must lie in [0, 1]; normalise it (divide entropies by log C)")
        cell = (uncertainty.detach().float().clamp(0, 1).sqrt() * self.resolution).long()
        self.add(*sum_by_index(cell.clamp_max(self.resolution - 1), self.resolution, correct.long()))

    def compute(self) -> measures.RetainedCurve:
        """Return the curve and its area so far. Log the ``area``."""
        return measures.retained_of_groups(self.counts.cpu().double(), self.hits.cpu().double(), self.device)
