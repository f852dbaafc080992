"""Adaptive calibration error with a state of constant size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fedbayes.metrics.functional.calibration import equal_mass_error
from lightning_fedbayes.metrics.functional.checks import check_bins
from lightning_fedbayes.metrics.functional.reliability import reliability_sums


class AdaptiveCalibrationError(Metric):
    """Calibration error with bins of equal mass (see the function of the same name), over all batches.

    Confidences are kept in a fine histogram, so the state does not grow with the data. Examples in one of its cells
    count as equally confident: with the default of 10,000 cells this matters only for confidences that differ by less
    than 1e-4 and happen to lie at the boundary of a bin.

    Args:
        bins: number of bins of equal mass.
        resolution: number of cells of the histogram over [0, 1].
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = False

    counts: Tensor
    confidences: Tensor
    hits: Tensor

    def __init__(self, bins: int = 15, resolution: int = 10_000, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_bins(bins)
        check_bins(resolution)
        self.bins, self.resolution = bins, resolution
        self.add_state("counts", torch.zeros(resolution, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("confidences", torch.zeros(resolution), dist_reduce_fx="sum")
        self.add_state("hits", torch.zeros(resolution, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add mean predictives, shape (batch, classes), and classes, shape (batch,)."""
        counts, confidences, hits = reliability_sums(probs.detach(), target, self.resolution)
        self.counts = self.counts + counts
        self.confidences = self.confidences + confidences
        self.hits = self.hits + hits

    def compute(self) -> Tensor:
        """The calibration error so far, a scalar."""
        sums = (sums.cpu().double() for sums in (self.counts, self.confidences, self.hits))
        return equal_mass_error(*sums, bins=self.bins).float().to(self.device)

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """The value so far, or the values ``val``, as torchmetrics draws them: (figure, axes)."""
        return self._plot(val, ax)
