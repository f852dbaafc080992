"""Mean uncertainty of a classifier's predictions, of four kinds."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_fedbayes.metrics.functional.entropy import mutual_information, predictive_entropy
from lightning_fedbayes.metrics.functional.kwon import aleatoric_uncertainty, epistemic_uncertainty
from lightning_fedbayes.metrics.mean import ExampleMean


class PredictiveEntropy(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.predictive_entropy`: the total uncertainty.

    Args:
        normalize: divide by log C, so that 1 is the most uncertain prediction; without, nats.
        kwargs: arguments of :class:`torchmetrics.Metric`.

    >>> import torch
    >>> PredictiveEntropy()(torch.full((5, 2, 10), 0.1))
    tensor(1.)
    """

    def __init__(self, normalize: bool = True, **kwargs: Any) -> None:
        super().__init__(f"predictive_entropy_{'normalized' if normalize else 'nats'}", **kwargs)
        self.normalize = normalize

    def update(self, probs: Tensor) -> None:
        """Add class probabilities of each posterior sample, shape (samples, batch, classes)."""
        self.add(predictive_entropy(probs, self.normalize))


class AleatoricUncertainty(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.aleatoric_uncertainty`: noise in the labels.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("aleatoric_uncertainty", **kwargs)

    def update(self, probs: Tensor) -> None:
        """Add class probabilities of each posterior sample, shape (samples, batch, classes)."""
        self.add(aleatoric_uncertainty(probs))


class EpistemicUncertainty(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.epistemic_uncertainty`: disagreement of the samples.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("epistemic_uncertainty", **kwargs)

    def update(self, probs: Tensor) -> None:
        """Add class probabilities of each posterior sample, shape (samples, batch, classes)."""
        self.add(epistemic_uncertainty(probs))


class MutualInformation(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.mutual_information` between label and parameters.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("mutual_information", **kwargs)

    def update(self, probs: Tensor) -> None:
        """Add class probabilities of each posterior sample, shape (samples, batch, classes)."""
        self.add(mutual_information(probs))
