"""Bayesian modules whose likelihood says how they train, predict and are scored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, MetricCollection

from lightning_fedbayes.likelihoods import Likelihood, Rows, get_likelihood, said_by
from lightning_fedbayes.metrics import (
    BrierScore,
    CalibrationDiagram,
    DeterminantSharpness,
    GaussianCRPS,
    GaussianNLL,
    IntervalCoverage,
    KwonAleatoric,
    KwonEpistemic,
    MutualInformation,
    NegativeLogLikelihood,
    PredictiveEntropy,
)
from lightning_fedbayes.modules.bayesian_module import BayesianModule


class ClassScores(nn.Module):
    """Scores of a classifier: accuracy, NLL, ECE (15 bins), Brier score; and its uncertainty.

    That is the entropy, the mutual information as "epistemic", and the traces of Kwon's two covariances.
    """

    def __init__(self) -> None:
        super().__init__()
        self.predictive = MetricCollection(
            {"ece": CalibrationDiagram(), "nll": NegativeLogLikelihood(), "brier": BrierScore()}, compute_groups=False
        )
        self.sampled = MetricCollection(
            {"entropy": PredictiveEntropy(), "epistemic": MutualInformation(),
             "kwon_aleatoric": KwonAleatoric(), "kwon_epistemic": KwonEpistemic()},
            compute_groups=False,
        )

    def update(self, rows: Rows) -> None:
        """Add "probs", (samples, N, classes), and "target", (N,)."""
        self.predictive.update(rows["probs"].mean(0), rows["target"])
        self.sampled.update(rows["probs"])

    def take(self, stage: str) -> dict[str, Tensor]:
        """Return the scores since the last call, with names that begin with ``stage``."""
        scores = {**self.predictive.compute(), **self.sampled.compute()}
        calibration = scores["ece"]
        scores["ece"] = calibration.ece
        scores["accuracy"] = (calibration.accuracy * calibration.counts).nansum() / calibration.counts.sum()
        self.predictive.reset()
        self.sampled.reset()
        return {f"{stage}/{name}": score for name, score in scores.items()}


class GaussianScores(nn.Module):
    """RMSE, NLL, CRPS, coverage of the 90 % interval and sharpness of a regressor."""

    def __init__(self) -> None:
        super().__init__()
        self.gaussian = MetricCollection(
            {"nll": GaussianNLL(), "crps": GaussianCRPS(), "coverage90": IntervalCoverage(level=0.9)},
            compute_groups=False,
        )
        self.sharpness = DeterminantSharpness()
        self.squared_error = MeanSquaredError(squared=False)

    def update(self, rows: Rows) -> None:
        """Add "mean", "variance" and "target", each (N, targets)."""
        mean, variance, targets = (rows[name] for name in ("mean", "variance", "target"))
        self.gaussian.update(mean, variance, targets)
        self.sharpness.update(torch.diag_embed(variance))
        self.squared_error.update(mean.contiguous(), targets.contiguous())

    def take(self, stage: str) -> dict[str, Tensor]:
        """Return the scores since the last call, with names that begin with ``stage``."""
        scores = self.gaussian.compute()
        scores |= {"sharpness": self.sharpness.compute(), "rmse": self.squared_error.compute()}
        for metric in (self.gaussian, self.sharpness, self.squared_error):
            metric.reset()
        return {f"{stage}/{name}": score for name, score in scores.items()}


class LikelihoodModule(BayesianModule):
    r"""A :class:`BayesianModule` that trains on the NLL of its likelihood, and predicts and is scored by it.

    Validation and test log, behind "val/" and "test/", of classes accuracy, NLL, ECE (15 bins), Brier score, entropy,
    mutual information ("epistemic") and Kwon's two traces, a mean over examples and positions; of numbers RMSE, NLL,
    CRPS, coverage of the 90 % interval and sharpness. Their steps return what is scored,
    :data:`~lightning_fedbayes.likelihoods.Rows`.

    Args:
        network, options: see :class:`BayesianModule`.
        likelihood: a :class:`~lightning_fedbayes.Likelihood` or its name.
    """

    def __init__(self, network: nn.Module, likelihood: Likelihood | str, **options: Any) -> None:
        super().__init__(network, **options)
        self.likelihood: Likelihood = get_likelihood(likelihood)
        self._scores = ClassScores() if self.likelihood.of_classes else GaussianScores()

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the NLL of outputs and targets, summed over positions, a mean over the batch, in nats."""
        return self.likelihood.loss(outputs, targets)

    def inputs_of(self, batch: Any) -> Tensor:
        """The inputs of a batch: a tensor of inputs, or (inputs, targets)."""
        return batch if isinstance(batch, Tensor) else self.unpack(batch)[0]

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
        """Return mean prediction and decomposed uncertainty of a batch: a tensor of inputs, or (inputs, targets)."""
        return self._known().predict(self.sample(self.inputs_of(batch)))

    def _known(self) -> Likelihood:
        """Return the likelihood with the noise that the module has."""
        return said_by(self) or self.likelihood

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Rows:
        """Score a batch, and return its rows."""
        inputs, targets = self.unpack(batch)
        known = self._known()
        rows = known.rows(self.sample(inputs), targets) if known.of_classes else known.rows_of(
            self.predict_step(inputs), targets)
        self._scores.update(rows)
        return rows

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Rows:
        """As :meth:`validation_step`."""
        return self.validation_step(batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        """Log the scores over all batches."""
        self.log_dict(self._scores.take("val"))  # at once: a call costs as much as the forward pass of a small network

    def on_test_epoch_end(self) -> None:
        """As :meth:`on_validation_epoch_end`."""
        self.log_dict(self._scores.take("test"))
