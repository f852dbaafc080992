"""The accuracy–retained curve with a state of constant size."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics import Metric

from lightning_fedbayes import plots
from lightning_fedbayes.errors import FedBayesError
from lightning_fedbayes.metrics.functional.accuracy_retained import area_of_groups, curve_of_groups
from lightning_fedbayes.metrics.functional.checks import check_bins, check_vectors
from lightning_fedbayes.metrics.functional.groups import sum_by_index

ROUNDING = 1e-3


class RetainedCurve(NamedTuple):
    """Accuracy of the least uncertain examples; the first two of shape (points,)."""

    fraction: Tensor
    """Fraction of the examples that is retained, ascending, the last is 1."""
    accuracy: Tensor
    """Accuracy of the retained examples."""
    area: Tensor
    """Mean accuracy over all retained numbers, a scalar: 1 − AURC."""


class AccuracyRetained(Metric):
    """Accuracy against fraction retained when the most uncertain examples are discarded, over all batches.

    The uncertainties are kept in a histogram whose cells are equally wide in √u, so that small ones, such as
    epistemic uncertainties, are told apart too; examples in one cell count as equally uncertain. The
    state does not grow with the data.

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
            correct: whether each example was classified correctly, shape (batch,).
            uncertainty: in [0, 1], shape (batch,): normalised entropy, aleatoric or epistemic trace.

        Raises:
            FedBayesError: an uncertainty beyond [0, 1] by more than rounding, or NaN.
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
        """The curve and its area so far; log the ``area``."""
        counts, hits = self.counts.cpu().double(), self.hits.cpu().double()
        values = (*curve_of_groups(counts, hits), area_of_groups(counts, hits))
        return RetainedCurve(*(value.float().to(self.device) for value in values))

    def plot(self, label: str = "model") -> tuple[Figure, Axes]:
        """The curve so far: (figure, axes)."""
        curve = self.compute()
        figure = plots.accuracy_retained({label: (curve.fraction, curve.accuracy)})
        return figure, figure.axes[0]
