"""A hybrid Bayesian regressor out of any network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanSquaredError, MetricCollection

from lightning_fedbayes.errors import FedBayesError
from lightning_fedbayes.layers import Estimator, Prior
from lightning_fedbayes.metrics import DeterminantSharpness, GaussianCRPS, GaussianNLL, IntervalCoverage
from lightning_fedbayes.modules.bayesian_module import BayesianModule
from lightning_fedbayes.modules.hybrid import Init, hybrid


class RegressionPrediction(NamedTuple):
    """What a Bayesian regressor says of a batch, in the units of the targets it was trained on.

    Attributes:
        mean: predictive mean, shape (batch, targets).
        variance: predictive variance, aleatoric + epistemic, shape (batch, targets).
        aleatoric: variance of the observation noise, shape (batch, targets).
        epistemic: variance of the mean over draws of the parameters, shape (batch, targets).
    """

    mean: Tensor
    variance: Tensor
    aleatoric: Tensor
    epistemic: Tensor


class HybridBayesianRegressor(BayesianModule):
    r"""Regresses with a network whose last layers are Bayesian, under Gaussian observation noise.

    .. math:: y = f(x;\theta) + \varepsilon, \quad \varepsilon \sim N(0, \sigma^2), \qquad
              \mathrm{Var}[y|x] = \sigma^2 + \mathrm{Var}_\theta f(x;\theta)

    Validation and test score the predictive distribution: RMSE, NLL, CRPS, coverage of the 90 % interval, sharpness.

    Args:
        network: maps inputs to means of shape (batch,) or (batch, targets).
        bayesian_last: the last n linear or convolutional layers become Bayesian; None takes ``network`` as it is.
        estimator, prior_std, prior, init, posterior_std: see :func:`~lightning_fedbayes.bayesianize`.
        noise_std: standard deviation σ of the noise, in units of the target; the initial one if it is learnt.
        learn_noise: learn σ, as a deterministic parameter.
        samples, kl_weight, warmup_rounds, learning_rate, optimizer: see :class:`BayesianModule`.

    Raises:
        FedBayesError: ``noise_std`` is not positive.
        ConversionError: the network has fewer layers to convert than asked for.

    >>> model = HybridBayesianRegressor(nn.Linear(3, 1), bayesian_last=1, noise_std=0.5, learn_noise=False)
    >>> model.predict_step(torch.zeros(2, 3)).aleatoric.flatten()
    tensor([0.2500, 0.2500])
    """

    def __init__(
        self,
        network: nn.Module,
        bayesian_last: int | None = None,
        estimator: Estimator = "local_reparameterization",
        *,
        prior_std: float | None = None,
        prior: Prior | None = None,
        init: Init = "fresh",
        posterior_std: float | None = None,
        noise_std: float = 1.0,
        learn_noise: bool = True,
        samples: int = 10,
        kl_weight: float = 1.0,
        warmup_rounds: int = 0,
        learning_rate: float = 1e-3,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    ) -> None:
        if not noise_std > 0:
            raise FedBayesError(f"noise_std={noise_std}: the noise has a positive standard deviation")
        super().__init__(
            hybrid(network, bayesian_last, estimator, prior_std, prior, init, posterior_std),
            samples=samples,
            kl_weight=kl_weight,
            warmup_rounds=warmup_rounds,
            learning_rate=learning_rate,
            optimizer=optimizer,
        )
        self.save_hyperparameters(ignore=["network", "prior", "optimizer"])
        self._gaussian_metrics = MetricCollection(
            {"nll": GaussianNLL(), "crps": GaussianCRPS(), "coverage90": IntervalCoverage(level=0.9)},
            compute_groups=False,
        )
        self._sharpness = DeterminantSharpness()
        self._squared_error = MeanSquaredError(squared=False)
        self.log_noise_std = nn.Parameter(torch.tensor(math.log(noise_std)), requires_grad=learn_noise)

    @property
    def noise_variance(self) -> Tensor:
        """Variance of the observation noise, a scalar."""
        return torch.exp(2 * self.log_noise_std)

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Gaussian NLL of means (batch, *) and targets of as many entries, in nats, summed over targets."""
        errors = (targets.reshape(outputs.shape) - outputs) * torch.exp(-self.log_noise_std)
        per_target = 0.5 * errors.square() + self.log_noise_std + 0.5 * math.log(2 * math.pi)
        return per_target.sum() / len(outputs)

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
        targets = targets.reshape(mean.shape)
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

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> RegressionPrediction:
        """Mean prediction and decomposed variance of a batch: a tensor of inputs, or (inputs, targets)."""
        inputs = batch if isinstance(batch, Tensor) else self.unpack(batch)[0]
        draws = self.sample(inputs)
        draws = draws.unsqueeze(-1) if draws.ndim == 2 else draws
        epistemic = draws.var(0, correction=0)
        aleatoric = self.noise_variance.expand_as(epistemic)
        return RegressionPrediction(draws.mean(0), aleatoric + epistemic, aleatoric, epistemic)
