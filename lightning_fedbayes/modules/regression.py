"""What every regressor predicts, and how it is scored."""

from __future__ import annotations

from abc import abstractmethod
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, MetricCollection

from lightning_fedbayes.errors import FedBayesError
from lightning_fedbayes.metrics import DeterminantSharpness, GaussianCRPS, GaussianNLL, IntervalCoverage
from lightning_fedbayes.modules.bayesian_module import BayesianModule


class RegressionPrediction(NamedTuple):
    """What a Bayesian regressor says of a batch, in the units of the targets it was trained on.

    Attributes:
        mean: predictive mean, shape (batch, targets).
        variance: predictive variance, aleatoric + epistemic, shape (batch, targets).
        aleatoric: variance of the observation noise, shape (batch, targets).
        epistemic: variance of the mean over draws of the parameters, shape (batch, targets).
        samples: the mean under each draw of the parameters, shape (draws, batch, targets).
    """

    mean: Tensor
    variance: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    samples: Tensor

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Ends of the central interval that holds ``level`` of a Gaussian with this mean and variance.

        Args:
            level: strictly between 0 and 1.

        Returns: lower and upper end, shape (batch, targets) each.

        Raises:
            FedBayesError: ``level`` is not strictly between 0 and 1.
        """
        if not 0 < level < 1:
            raise FedBayesError(f"level={level}: the part of the distribution in an interval lies in (0, 1)")
        half = NormalDist().inv_cdf((1 + level) / 2) * self.variance.sqrt()
        return self.mean - half, self.mean + half


class Regressor(BayesianModule):
    """A :class:`BayesianModule` whose predictions are :class:`RegressionPrediction`, and that scores them.

    Validation and test log RMSE, NLL, CRPS, coverage of the 90 % interval and sharpness. Subclass it: implement
    :meth:`negative_log_likelihood` and :meth:`predict_step`.

    Args:
        network, options: see :class:`BayesianModule`.
    """

    def __init__(self, network: nn.Module, **options: Any) -> None:
        super().__init__(network, **options)
        self._gaussian_metrics = MetricCollection(
            {"nll": GaussianNLL(), "crps": GaussianCRPS(), "coverage90": IntervalCoverage(level=0.9)},
            compute_groups=False,
        )
        self._sharpness = DeterminantSharpness()
        self._squared_error = MeanSquaredError(squared=False)

    @abstractmethod
    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> RegressionPrediction:
        """Mean prediction and decomposed variance of a batch: a tensor of inputs, or (inputs, targets)."""

    def inputs_of(self, batch: Any) -> Tensor:
        """The inputs of a batch: a tensor of inputs, or (inputs, targets)."""
        return batch if isinstance(batch, Tensor) else self.unpack(batch)[0]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Score a batch. Returns predictive mean and variance and the targets, each (batch, targets)."""
        return self._score(batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """As :meth:`validation_step`."""
        return self._score(batch)

    def on_validation_epoch_end(self) -> None:
        """Log the scores over all batches."""
        self._log_scores("val")

    def on_test_epoch_end(self) -> None:
        """As :meth:`on_validation_epoch_end`."""
        self._log_scores("test")

    def _score(self, batch: Any) -> dict[str, Tensor]:
        inputs, targets = self.unpack(batch)
        prediction = self.predict_step(inputs)
        mean, variance = prediction.mean, prediction.variance
        targets = shaped_like(targets, mean)
        self._gaussian_metrics.update(mean, variance, targets)
        self._sharpness.update(torch.diag_embed(variance))
        self._squared_error.update(mean.contiguous(), targets.contiguous())
        return {"mean": mean, "variance": variance, "target": targets}

    def _log_scores(self, stage: str) -> None:
        scores = self._gaussian_metrics.compute()
        scores |= {"sharpness": self._sharpness.compute(), "rmse": self._squared_error.compute()}
        self.log_dict({f"{stage}/{name}": score for name, score in scores.items()})
        for metric in (self._gaussian_metrics, self._sharpness, self._squared_error):
            metric.reset()


def shaped_like(targets: Tensor, outputs: Tensor) -> Tensor:
    """``targets`` in the shape of ``outputs``, (batch, *), so that (batch,) and (batch, 1) are one.

    Raises:
        FedBayesError: they do not have as many entries.
    """
    if targets.numel() != outputs.numel():
        raise FedBayesError(
            f"targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}: give the "
            "network one output per target"
        )
    return targets.reshape(outputs.shape)
