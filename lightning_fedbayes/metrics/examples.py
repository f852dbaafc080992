"""Metrics whose value needs all examples at once."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class ExampleMetric(Metric):
    """Base of metrics that keep vectors of all examples; a subclass implements ``update`` and :meth:`score`.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.

    Attributes:
        kept: names of the vectors, one number per example each: so much the state grows.
    """

    full_state_update = False
    is_differentiable = False
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

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw the value so far, or the values ``val``, as torchmetrics does: (figure, axes)."""
        return self._plot(val, ax)
