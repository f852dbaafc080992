"""Uncertainty of a classifier's predictions: four means, and accuracy when uncertain examples are discarded."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics import Metric

from lightning_fedbayes.core import plots
from lightning_fedbayes.core.errors import FedBayesError, check_flag
from lightning_fedbayes.metrics.functional.uncertainty import (
    area_of_groups,
    curve_of_groups,
    kwon_aleatoric,
    kwon_epistemic,
    mutual_information,
    predictive_entropy,
)
from lightning_fedbayes.metrics.functional.utilities import check_bins, check_vectors, sum_by_index
from lightning_fedbayes.metrics.scores import ExampleMean

ROUNDING = 1e-3
"""Largest excess over [0, 1] of an uncertainty that counts as rounding."""


class PredictiveEntropy(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.predictive_entropy`: the total uncertainty.

    Args:
        normalize: divide by log C, so that 1 is the most uncertain prediction; otherwise the mean is in nats.
        kwargs: arguments of :class:`torchmetrics.Metric`.

    >>> PredictiveEntropy()(torch.full((5, 2, 10), 0.1))
    tensor(1.)
    """

    def __init__(self, normalize: bool = True, **kwargs: Any) -> None:
        check_flag("normalize", normalize, error=FedBayesError)
        super().__init__(f"predictive_entropy_{'normalized' if normalize else 'nats'}", **kwargs)
        self.normalize = normalize

    def update(self, probs: Tensor) -> None:
        """Add class probabilities of each posterior sample, shape (samples, batch, classes)."""
        self.add(predictive_entropy(probs, self.normalize))


class KwonAleatoric(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.kwon_aleatoric`: noise in the labels."""

    def update(self, probs: Tensor) -> None:
        """Add class probabilities of each posterior sample, shape (samples, batch, classes)."""
        self.add(kwon_aleatoric(probs))


class KwonEpistemic(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.kwon_epistemic`: disagreement of the samples."""

    def update(self, probs: Tensor) -> None:
        """Add class probabilities of each posterior sample, shape (samples, batch, classes)."""
        self.add(kwon_epistemic(probs))


class MutualInformation(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.mutual_information` between label and parameters."""

    def update(self, probs: Tensor) -> None:
        """Add class probabilities of each posterior sample, shape (samples, batch, classes)."""
        self.add(mutual_information(probs))


class RetainedCurve(NamedTuple):
    """Accuracy of the least uncertain examples: two vectors of shape (points,), and the area."""

    fraction: Tensor
    """Fraction of the examples that is retained, ascending; the last is 1."""
    accuracy: Tensor
    """Accuracy of the retained examples."""
    area: Tensor
    """Mean accuracy over all retained numbers, a scalar: 1 − AURC."""


class AccuracyRetained(Metric):
    """Accuracy against the fraction retained when the most uncertain examples are discarded, over all batches.

    The uncertainties u are kept in a histogram, so the state does not grow with the data. Its cells are equally wide in
    √u, to resolve small u such as epistemic ones; examples in one cell count as equally uncertain.

    Args:
        resolution: number of cells.
        kwargs: arguments of :class:`torchmetrics.Metric`.

    >>> metric = AccuracyRetained()
    >>> metric.update(torch.tensor([True, False]), torch.tensor([0.1, 0.5]))
    >>> metric.compute().area
    tensor(0.7500)
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = True

    counts: Tensor
    hits: Tensor

    def __init__(self, resolution: int = 10_000, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_bins(resolution)
        self.resolution = resolution
        self.add_state("counts", torch.zeros(resolution, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("hits", torch.zeros(resolution, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, correct: Tensor, uncertainty: Tensor) -> None:
        """Add examples.

        Args:
            correct: true where the example was classified correctly, shape (batch,).
            uncertainty: in [0, 1], shape (batch,): normalised entropy, aleatoric or epistemic trace.

        Raises:
            FedBayesError: an uncertainty outside [0, 1] by more than rounding, or NaN.
        """
        check_vectors(correct=correct, uncertainty=uncertainty)
        if not ((uncertainty >= -ROUNDING) & (uncertainty <= 1 + ROUNDING)).all():
            raise FedBayesError(
                f"uncertainty ranges from {uncertainty.min():.3g} to {uncertainty.max():.3g}, but must lie in [0, 1]; "
                "normalise it (entropy and mutual information: divide by log C)"
            )
        cell = (uncertainty.detach().float().clamp(0, 1).sqrt() * self.resolution).long()
        counts, hits = sum_by_index(cell.clamp_max(self.resolution - 1), self.resolution, correct.long())
        self.counts = self.counts + counts
        self.hits = self.hits + hits

    def compute(self) -> RetainedCurve:
        """Return the curve and its area so far; log the ``area``."""
        counts, hits = self.counts.cpu().double(), self.hits.cpu().double()
        values = (*curve_of_groups(counts, hits), area_of_groups(counts, hits))
        return RetainedCurve(*(value.float().to(self.device) for value in values))

    def plot(self, label: str = "model") -> tuple[Figure, Axes]:
        """Draw the curve so far: (figure, axes)."""
        curve = self.compute()
        figure = plots.accuracy_retained({label: (curve.fraction, curve.accuracy)})
        return figure, figure.axes[0]
