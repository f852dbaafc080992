"""The reliability diagram over all batches."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics import Metric

from lightning_fedbayes import plots
from lightning_fedbayes.metrics.functional.checks import check_bins
from lightning_fedbayes.metrics.functional.reliability import Reliability, reliability_of_sums, reliability_sums


class ReliabilityDiagram(Metric):
    """Confidence, accuracy and number of examples in bins of equal width, and their ECE.

    ``compute()`` gives a :class:`~lightning_fedbayes.metrics.functional.Reliability`; log its ``ece``.

    Args:
        bins: number of bins; BA-BFL uses 100, most others 15.
        kwargs: arguments of :class:`torchmetrics.Metric`.

    >>> diagram = ReliabilityDiagram(bins=2)
    >>> diagram.update(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
    >>> diagram.compute().ece
    tensor(0.3500)
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = False

    counts: Tensor
    confidences: Tensor
    hits: Tensor

    def __init__(self, bins: int = 15, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_bins(bins)
        self.bins = bins
        self.add_state("counts", torch.zeros(bins, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("confidences", torch.zeros(bins), dist_reduce_fx="sum")
        self.add_state("hits", torch.zeros(bins, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add mean predictives, shape (batch, classes), and classes, shape (batch,)."""
        counts, confidences, hits = reliability_sums(probs.detach(), target, self.bins)
        self.counts = self.counts + counts
        self.confidences = self.confidences + confidences
        self.hits = self.hits + hits

    def compute(self) -> Reliability:
        """The diagram so far."""
        return reliability_of_sums(self.counts, self.confidences, self.hits)

    def plot(self) -> tuple[Figure, Axes]:
        """The diagram so far: (figure, axes)."""
        figure = plots.reliability_diagram(*self.compute())
        return figure, figure.axes[0]
