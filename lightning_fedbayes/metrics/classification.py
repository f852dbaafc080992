"""Proper scores of a classifier's mean predictive."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_fedbayes.metrics.functional.scores import brier_score, negative_log_likelihood
from lightning_fedbayes.metrics.mean import ExampleMean


class BrierScore(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.brier_score`, from 0 (best) to 2.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.

    >>> import torch
    >>> BrierScore()(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor(1.2500)
    """

    higher_is_better = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("brier_score", **kwargs)

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add mean predictives, shape (batch, classes), and classes, shape (batch,)."""
        self.add(brier_score(probs, target))


class NegativeLogLikelihood(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.negative_log_likelihood`, in nats.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.

    >>> import torch
    >>> NegativeLogLikelihood()(torch.full((3, 10), 0.1), torch.tensor([0, 4, 9]))
    tensor(2.3026)
    """

    higher_is_better = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("negative_log_likelihood", **kwargs)

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add mean predictives, shape (batch, classes), and classes, shape (batch,)."""
        self.add(negative_log_likelihood(probs, target))
