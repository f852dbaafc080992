"""A hybrid Bayesian regressor out of any network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedbayes.errors import FedBayesError, nearest
from lightning_fedbayes.layers import Estimator, Prior
from lightning_fedbayes.layers.sites import gaussian_sites
from lightning_fedbayes.modules.hybrid import Init, hybrid
from lightning_fedbayes.modules.predictive import Predictive, linear_moments
from lightning_fedbayes.modules.regression import RegressionPrediction, Regressor, shaped_like

Noise = Literal["learnt", "fixed", "residual", "none"]
NOISES: tuple[Noise, ...] = ("learnt", "fixed", "residual", "none")

RESIDUAL_MEMORY = 0.99
"""What a squared error counts, for the residual variance, one example later."""


class HybridBayesianRegressor(Regressor):
    r"""Regresses with a network whose last layers are Bayesian, under Gaussian observation noise.

    .. math:: y = f(x;\theta) + \varepsilon, \quad \varepsilon \sim N(0, \sigma^2), \qquad
              \mathrm{Var}[y|x] = \sigma^2 + \mathrm{Var}_\theta f(x;\theta)

    Validation and test score the predictive distribution: RMSE, NLL, CRPS, coverage of the 90 % interval, sharpness.

    Args:
        network: maps inputs to means of shape (batch,) or (batch, targets).
        bayesian_last: the last n linear or convolutional layers become Bayesian; None takes ``network`` as it is.
        estimator, prior_std, prior, init, posterior_std: see :func:`~lightning_fedbayes.bayesianize`.
        noise: what is known of the observation noise. "learnt": σ is a deterministic parameter of the likelihood.
            "fixed": it stays ``noise_std``. "residual": training minimises the squared error, as for a network without
            a likelihood, and σ² is a running mean of it (over about the last hundred examples), a buffer that
            federations average like BatchNorm's statistics; it is too small where the network over-fits. "none":
            the squared error, and σ = 0 in predictions: only the disagreement of draws counts (what [FedAG] does).
        noise_std: standard deviation σ of the noise, in units of the target; the initial one if it is learnt or
            estimated.
        targets: number of targets if each has a noise of its own; None: one for all.
        samples, kl_weight, warmup_rounds, learning_rate, optimizer, predictive: see :class:`BayesianModule`.

    Raises:
        FedBayesError: ``noise_std`` is not positive; an unknown ``noise``; or ``noise`` "residual" or "none" for a
            network with Bayesian layers, whose KL needs a likelihood beside it.
        ConversionError: the network has fewer layers to convert than asked for.

    >>> model = HybridBayesianRegressor(nn.Linear(3, 1), bayesian_last=1, noise="fixed", noise_std=0.5)
    >>> model.predict_step(torch.zeros(2, 3)).aleatoric.flatten()
    tensor([0.2500, 0.2500])
    """

    residual_variance: Tensor
    log_noise_std: Tensor

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
        noise: Noise = "learnt",
        noise_std: float = 1.0,
        targets: int | None = None,
        samples: int = 10,
        kl_weight: float = 1.0,
        warmup_rounds: int = 0,
        learning_rate: float = 1e-3,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        predictive: Predictive = "layers",
    ) -> None:
        if not noise_std > 0:
            raise FedBayesError(f"noise_std={noise_std}: the noise has a positive standard deviation")
        if noise not in NOISES:
            raise FedBayesError(f"noise='{noise}': {nearest(noise, NOISES)}")
        super().__init__(
            hybrid(network, bayesian_last, estimator, prior_std, prior, init, posterior_std),
            samples=samples,
            kl_weight=kl_weight,
            warmup_rounds=warmup_rounds,
            learning_rate=learning_rate,
            optimizer=optimizer,
            predictive=predictive,
        )
        if noise in ("residual", "none") and gaussian_sites(self.network):
            raise FedBayesError(
                f"noise='{noise}' trains on the squared error, and a network with Bayesian layers needs a likelihood "
                "beside its KL: use noise='learnt' or 'fixed'"
            )
        self.noise: Noise = noise
        self.save_hyperparameters(ignore=["network", "prior", "optimizer"])
        shape = () if targets is None else (targets,)
        if noise in ("learnt", "fixed"):
            log_noise_std = torch.full(shape, math.log(noise_std))
            self.log_noise_std = nn.Parameter(log_noise_std, requires_grad=noise == "learnt")
        elif noise == "residual":
            self.register_buffer("residual_variance", torch.full(shape, noise_std**2))

    @property
    def noise_variance(self) -> Tensor:
        """Variance of the observation noise: a scalar, or shape (targets,)."""
        if self.noise == "none":
            return torch.zeros((), device=self.device)
        return self.residual_variance if self.noise == "residual" else torch.exp(2 * self.log_noise_std)

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Gaussian NLL of means (batch, *) and targets of as many entries, in nats, summed over targets.

        With ``noise`` "residual" or "none" it is the squared error instead.
        """
        errors = shaped_like(targets, outputs) - outputs
        if self.noise == "none":
            return errors.square().sum() / len(outputs)
        if self.noise == "residual":
            self._remember(errors.detach())
            return errors.square().sum() / len(outputs)
        errors = errors * torch.exp(-self.log_noise_std)
        per_target = 0.5 * errors.square() + self.log_noise_std + 0.5 * math.log(2 * math.pi)
        return per_target.sum() / len(outputs)

    def _remember(self, errors: Tensor) -> None:
        """Let the residual variance follow the squared errors, shape (batch, *)."""
        if self.training:
            known = self.residual_variance
            mean = errors.square().mean(0) if known.ndim else errors.square().mean()
            known.add_((1 - RESIDUAL_MEMORY ** len(errors)) * (mean.reshape(known.shape) - known))

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> RegressionPrediction:
        """Mean prediction and decomposed variance of a batch: a tensor of inputs, or (inputs, targets)."""
        inputs = self.inputs_of(batch)
        draws = self.sample(inputs)
        draws = draws.unsqueeze(-1) if draws.ndim == 2 else draws
        posterior = self.global_round.posterior
        if self.predictive == "closed_form" and posterior is not None:
            mean, epistemic = linear_moments(self.network, posterior, inputs)
        else:
            mean, epistemic = draws.mean(0), draws.var(0, correction=0)
        aleatoric = self.noise_variance.expand_as(epistemic)
        return RegressionPrediction(mean, aleatoric + epistemic, aleatoric, epistemic, draws)
