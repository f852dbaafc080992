"""The state that most metrics share: a sum over examples and their number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class ExampleMean(Metric):
    """Mean over all examples of a value that each example has by itself.

    A subclass implements ``update`` and hands the values to :meth:`add`. The state is one sum and one count, so batches
    and processes of any size combine exactly.

    Args:
        name: name of the state, different for metrics that compute different things: a MetricCollection takes two
            metrics whose states have equal names and, after the first batch, equal values for the same metric.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    full_state_update = False
    is_differentiable = False

    count: Tensor

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.total_name = f"{name}_total"
        self.add_state(self.total_name, torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def add(self, values: Tensor) -> None:
        """Add the values of some examples, any shape."""
        setattr(self, self.total_name, getattr(self, self.total_name) + values.detach().sum())
        self.count = self.count + values.numel()

    def compute(self) -> Tensor:
        """The mean so far."""
        return getattr(self, self.total_name) / self.count

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """The value so far, or the values ``val``, as torchmetrics draws them: (figure, axes)."""
        return self._plot(val, ax)
