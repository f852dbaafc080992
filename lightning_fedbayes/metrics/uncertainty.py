"""Uncertainty of a classifier's predictions: means, what they are worth, and detection of out-of-distribution data."""

from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lightning_fedbayes.core import plots
from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_flag, check_number
from lightning_fedbayes.metrics.functional import uncertainty as measures
from lightning_fedbayes.metrics.functional.utilities import check_not_nan, check_vectors, sum_by_index
from lightning_fedbayes.metrics.scores import ExampleMean, ExampleMetric, HitCounts

ROUNDING = 1e-3
"""Largest excess over [0, 1] of an uncertainty that counts as rounding."""


class PredictiveEntropy(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.predictive_entropy`: the total uncertainty.

    Args:
        normalize: divide by log C, so that 1 is the most uncertain prediction. Otherwise the mean is in nats.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    def __init__(self, normalize: bool = True, **kwargs: Any) -> None:
        check_flag("normalize", normalize, error=FedBayesError)
        super().__init__(f"predictive_entropy_{'normalized' if normalize else 'nats'}", **kwargs)
        self.normalize = normalize

    def update(self, probs: Tensor) -> None:
        """Add class probabilities of each posterior sample, shape (samples, batch, classes)."""
        self.add(measures.predictive_entropy(probs, self.normalize))


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


class RetainedCurve(NamedTuple):
    """Fractions retained, ascending to 1, and their accuracies, shape (points,) each. Area, a scalar: 1 − AURC."""

    fraction: Tensor
    accuracy: Tensor
    area: Tensor


class AccuracyRetained(HitCounts):
    """Accuracy against the fraction retained when the most uncertain examples are discarded, over all batches.

    Uncertainties u are kept in a histogram of ``resolution`` cells, equally wide in √u to resolve small u. Examples in
    one cell count as equally uncertain. Other arguments are those of :class:`torchmetrics.Metric`.

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

    def compute(self) -> RetainedCurve:
        """Return the curve and its area so far. Log the ``area``."""
        groups = self.counts.cpu().double(), self.hits.cpu().double()
        values = (*measures.curve_of_groups(*groups), measures.area_of_groups(*groups))
        return RetainedCurve(*(value.float().to(self.device) for value in values))

    def plot(self, label: str = "model") -> tuple[Figure, Axes]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Draw the curve so far: (figure, axes)."""
        curve = self.compute()
        figure = plots.accuracy_retained({label: (curve.fraction, curve.accuracy)})
        return figure, figure.axes[0]


class OutOfDistributionMetric(ExampleMetric):
    """Keep uncertainty and side of every example. A subclass implements :meth:`separation`."""

    kept = ("uncertainty", "out")

    def update(self, uncertainty: Tensor, out: Tensor | bool) -> None:
        """Add any measure of uncertainty, (batch,), without NaN, and what is out of distribution, bool, (batch,)."""
        check_vectors(uncertainty=uncertainty)
        if isinstance(out, bool):
            out = torch.full_like(uncertainty, out, dtype=torch.bool)
        check_vectors(uncertainty=uncertainty, out=out)
        if out.dtype != torch.bool:
            raise FedBayesError(f"out is of {out.dtype}: give torch.bool, True for out-of-distribution examples")
        check_not_nan(uncertainty=uncertainty)
        self.keep(uncertainty, out.to(uncertainty.device))

    def score(self, *vectors: Tensor) -> Tensor:
        """Return the value of all examples. NaN as long as one side has none."""
        uncertainty, out = vectors
        if not 0 < int(out.sum()) < len(out):
            return torch.tensor(torch.nan, device=self.device)
        return self.separation(uncertainty[~out], uncertainty[out])

    def separation(self, uncertainty_in: Tensor, uncertainty_out: Tensor) -> Tensor:
        """Return the value of both sides' uncertainties, a scalar."""
        raise NotImplementedError


class OutOfDistributionAUROC(OutOfDistributionMetric):
    """AUROC of an uncertainty (:func:`~lightning_fedbayes.metrics.functional.ood_auroc`) over all batches."""

    higher_is_better = True

    def separation(self, uncertainty_in: Tensor, uncertainty_out: Tensor) -> Tensor:
        """Return the AUROC."""
        return measures.ood_auroc(uncertainty_in, uncertainty_out)


class OutOfDistributionFPR(OutOfDistributionMetric):
    """False-positive rate of an uncertainty (:func:`~lightning_fedbayes.metrics.functional.ood_fpr`) over all batches.

    Args:
        recall: share of out-of-distribution examples to be found, in (0, 1], else FedBayesError.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    higher_is_better = False

    def __init__(self, recall: float = 0.95, **kwargs: Any) -> None:
        check_number("recall", recall, "(0, 1]", error=FedBayesError, why="it is the share of examples to be found")
        super().__init__(**kwargs)
        self.recall = recall

    def separation(self, uncertainty_in: Tensor, uncertainty_out: Tensor) -> Tensor:
        """Return the false-positive rate."""
        return measures.ood_fpr(uncertainty_in, uncertainty_out, self.recall)
