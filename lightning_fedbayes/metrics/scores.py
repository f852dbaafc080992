"""Mean scores of a predictive distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fedbayes.core.errors import FedBayesError, check_number
from lightning_fedbayes.metrics.functional.scores import (
    brier_score,
    determinant_sharpness,
    ensemble_crps,
    gaussian_crps,
    gaussian_nll,
    interval_coverage,
    negative_log_likelihood,
)


class ExampleMean(Metric):
    """Mean over all examples of one value per example.

    A subclass implements ``update`` and passes the values to :meth:`add`. The state is one sum and one count, so
    batches and processes of any size combine exactly.

    Args:
        name: name of the state, unique to what the metric computes, by default that of the class: a MetricCollection
            takes two metrics for one if their states have equal names and, after the first batch, equal values.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    full_state_update = False
    is_differentiable = False

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

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw the value so far, or the values ``val``, as torchmetrics does: (figure, axes)."""
        return self._plot(val, ax)


class BrierScore(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.brier_score`, from 0 (best) to 2.

    >>> BrierScore()(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor(1.2500)
    """

    higher_is_better = False

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add mean predictives, shape (batch, classes), and classes, shape (batch,)."""
        self.add(brier_score(probs, target))


class NegativeLogLikelihood(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.negative_log_likelihood`, in nats.

    >>> NegativeLogLikelihood()(torch.full((3, 10), 0.1), torch.tensor([0, 4, 9]))
    tensor(2.3026)
    """

    higher_is_better = False

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add mean predictives, shape (batch, classes), and classes, shape (batch,)."""
        self.add(negative_log_likelihood(probs, target))


class GaussianNLL(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.gaussian_nll`, in nats.

    >>> GaussianNLL()(torch.zeros(4), torch.ones(4), torch.zeros(4))  # log √2π
    tensor(0.9189)
    """

    higher_is_better = False

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Add predictive means, variances (noise included) and targets, all of one shape."""
        self.add(gaussian_nll(mean, variance, target))


class GaussianCRPS(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.gaussian_crps`, in the units of the target."""

    higher_is_better = False

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Add predictive means, variances (noise included) and targets, all of one shape."""
        self.add(gaussian_crps(mean, variance, target))


class EnsembleCRPS(ExampleMean):
    """Mean of the fair :func:`~lightning_fedbayes.metrics.functional.ensemble_crps`, in the units of the target."""

    higher_is_better = False

    def update(self, samples: Tensor, target: Tensor) -> None:
        """Add draws from the predictive distribution, shape (samples, *), and targets, shape (*)."""
        self.add(ensemble_crps(samples, target))


class IntervalCoverage(ExampleMean):
    """Share of targets in the central interval (:func:`~lightning_fedbayes.metrics.functional.interval_coverage`).

    Compare it with ``level``: a smaller share means overconfident, a larger one underconfident.

    Args:
        level: probability of the interval.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    def __init__(self, level: float = 0.95, **kwargs: Any) -> None:
        check_number("level", level, "(0, 1)", error=FedBayesError, why="it is the probability of an interval")
        super().__init__(f"interval_coverage_{level}".replace(".", "_"), **kwargs)
        self.level = level

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Add predictive means, variances (noise included) and targets, all of one shape."""
        self.add(interval_coverage(mean, variance, target, self.level))


class DeterminantSharpness(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.determinant_sharpness`, in the units of the targets."""

    higher_is_better = False

    def update(self, covariance: Tensor) -> None:
        """Add predictive covariances, shape (*, d, d)."""
        self.add(determinant_sharpness(covariance))
