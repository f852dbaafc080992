"""Scores of a regression's predictive distribution."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_fedbayes.metrics.functional.ensemble import ensemble_crps
from lightning_fedbayes.metrics.functional.gaussian import gaussian_crps, gaussian_nll, interval_coverage
from lightning_fedbayes.metrics.functional.sharpness import determinant_sharpness
from lightning_fedbayes.metrics.mean import ExampleMean


class GaussianNLL(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.gaussian_nll`, in nats.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.

    >>> import torch
    >>> GaussianNLL()(torch.zeros(4), torch.ones(4), torch.zeros(4))  # log √2π
    tensor(0.9189)
    """

    higher_is_better = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("gaussian_nll", **kwargs)

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Add predictive means, variances (noise included) and targets, all of one shape."""
        self.add(gaussian_nll(mean, variance, target))


class GaussianCRPS(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.gaussian_crps`, in the units of the target.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    higher_is_better = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("gaussian_crps", **kwargs)

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Add predictive means, variances (noise included) and targets, all of one shape."""
        self.add(gaussian_crps(mean, variance, target))


class EnsembleCRPS(ExampleMean):
    """Mean of the fair :func:`~lightning_fedbayes.metrics.functional.ensemble_crps`, in the units of the target.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    higher_is_better = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("ensemble_crps", **kwargs)

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
        super().__init__(f"interval_coverage_{level}".replace(".", "_"), **kwargs)
        self.level = level

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Add predictive means, variances (noise included) and targets, all of one shape."""
        self.add(interval_coverage(mean, variance, target, self.level))


class DeterminantSharpness(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.determinant_sharpness`, in the units of the targets.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    higher_is_better = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("determinant_sharpness", **kwargs)

    def update(self, covariance: Tensor) -> None:
        """Add predictive covariances, shape (*, d, d)."""
        self.add(determinant_sharpness(covariance))
