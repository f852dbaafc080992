"""Bases of the metrics: means over examples, counts in groups of examples, and scores of all examples at once."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class Plotted(Metric):
    """A metric that torchmetrics can plot, without gradients."""

    full_state_update = False
    is_differentiable = False

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw the value so far, or the values ``val``, as torchmetrics does: (figure, axes)."""
        return self._plot(val, ax)


class ExampleMean(Plotted):
    """Mean over all examples of one value per example; a subclass passes the values to :meth:`add` in ``update``.

    The state is one sum and one count, so batches and processes of any size combine exactly.

    Args:
        name: name of the state, unique to what the metric computes, by default the class name: a MetricCollection
            takes two metrics for one if their states have equal names and, after the first batch, equal values.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    count: Tensor

    def __init__(self, name: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.total_name = f"{name or type(self).__name__}_total"
        self.add_state(self.total_name, torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def add(self, values: Tensor) -> None:
        """Add the values of some examples, any shape."""
        setattr(self, self.total_name, getattr(self, self.total_name) + values.detach().sum())
        self.count = self.count + values.numel()

    def compute(self) -> Tensor:
        """Return the mean so far."""
        return getattr(self, self.total_name) / self.count


class HitCounts(Plotted):
    """Numbers of examples and of correct ones in ``groups`` groups; kwargs are arguments of torchmetrics.Metric."""

    counts: Tensor
    hits: Tensor

    def __init__(self, groups: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("counts", torch.zeros(groups, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("hits", torch.zeros(groups, dtype=torch.int64), dist_reduce_fx="sum")

    def add(self, counts: Tensor, hits: Tensor) -> None:
        """Add counts of examples and of correct ones, shape (groups,)."""
        self.counts = self.counts + counts
        self.hits = self.hits + hits


class ExampleMetric(Plotted):
    """Base of metrics that keep vectors of all examples; a subclass implements ``update`` and :meth:`score`.

    Attributes:
        kept: names of the vectors, one number per example each: the state grows by so much.
    """

    kept: ClassVar[tuple[str, ...]]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in self.kept:
            self.add_state(name, [], dist_reduce_fx="cat")

    def keep(self, *vectors: Tensor) -> None:
        """Add vectors of shape (batch,), in the order of :attr:`kept`."""
        for name, vector in zip(self.kept, vectors, strict=True):
            getattr(self, name).append(vector.detach())

    def compute(self) -> Tensor:
        """Return the value so far; NaN before the first example."""
        vectors = [getattr(self, name) for name in self.kept]
        if not len(vectors[0]):
            return torch.tensor(torch.nan, device=self.device)
        return self.score(*map(dim_zero_cat, vectors))

    def score(self, *vectors: Tensor) -> Tensor:
        """Return the value of all examples, a scalar."""
        raise NotImplementedError
