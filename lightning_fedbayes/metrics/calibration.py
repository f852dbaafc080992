"""Calibration of a classifier, with states of constant size."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics import Metric

from lightning_fedbayes.core import plots
from lightning_fedbayes.metrics.functional.calibration import (
    CalibrationBins,
    calibration_of_sums,
    calibration_sums,
    equal_mass_error,
)
from lightning_fedbayes.metrics.functional.utilities import check_bins


class CalibrationSums(Metric):
    """Sums of confidences and correct examples in cells of equal width over [0, 1]."""

    full_state_update = False
    is_differentiable = False
    higher_is_better = False

    counts: Tensor
    confidences: Tensor
    hits: Tensor

    def __init__(self, cells: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_bins(cells)
        self.cells = cells
        self.add_state("counts", torch.zeros(cells, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("confidences", torch.zeros(cells), dist_reduce_fx="sum")
        self.add_state("hits", torch.zeros(cells, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add mean predictives, shape (batch, classes), and classes, shape (batch,)."""
        counts, confidences, hits = calibration_sums(probs.detach(), target, self.cells)
        self.counts = self.counts + counts
        self.confidences = self.confidences + confidences
        self.hits = self.hits + hits


class CalibrationDiagram(CalibrationSums):
    """Calibration diagram, also called reliability diagram: confidence and accuracy in bins of equal width; ECE.

    ``compute()`` returns :class:`~lightning_fedbayes.metrics.functional.CalibrationBins`; log its ``ece``.

    Args:
        bins: number of bins; [BA-BFL] uses 100, most others 15.
        kwargs: arguments of :class:`torchmetrics.Metric`.

    >>> diagram = CalibrationDiagram(bins=2)
    >>> diagram.update(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
    >>> diagram.compute().ece
    tensor(0.3500)
    """

    def __init__(self, bins: int = 15, **kwargs: Any) -> None:
        super().__init__(bins, **kwargs)

    def compute(self) -> CalibrationBins:
        """Return the diagram so far."""
        return calibration_of_sums(self.counts, self.confidences, self.hits)

    def plot(self) -> tuple[Figure, Axes]:
        """Draw the diagram so far: (figure, axes)."""
        figure = plots.calibration_diagram(*self.compute())
        return figure, figure.axes[0]


class AdaptiveCalibrationError(CalibrationSums):
    """Calibration error with bins of equal mass (see the function of the same name), over all batches.

    Confidences are kept in a fine histogram, so the state does not grow with the data. Examples in one cell count as
    equally confident: with 10,000 cells this matters only at the boundary of a bin, for confidences that differ by less
    than 1e-4.

    Args:
        bins: number of bins of equal mass.
        resolution: number of cells of the histogram over [0, 1].
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    def __init__(self, bins: int = 15, resolution: int = 10_000, **kwargs: Any) -> None:
        check_bins(bins)
        super().__init__(resolution, **kwargs)
        self.bins = bins

    def compute(self) -> Tensor:
        """Return the calibration error so far, a scalar."""
        sums = (sums.cpu().double() for sums in (self.counts, self.confidences, self.hits))
        return equal_mass_error(*sums, bins=self.bins).float().to(self.device)

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw the value so far, or the values ``val``, as torchmetrics does: (figure, axes)."""
        return self._plot(val, ax)
