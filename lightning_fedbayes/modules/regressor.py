"""Regression: predictions, their scores, and a hybrid Bayesian regressor made from any network."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_choice, check_number
from lightning_fedbayes.layers import Estimator, Prior
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.metrics.likelihoods import Gaussian, RegressionPrediction, shaped_like
from lightning_fedbayes.modules.bayesian_module import OPTIONS, LikelihoodModule
from lightning_fedbayes.modules.networks import Init, hybrid, layers_to_convert
from lightning_fedbayes.modules.predictive import linear_moments

Noise = Literal["learnt", "fixed", "residual", "none"]
NOISES: tuple[Noise, ...] = ("learnt", "fixed", "residual", "none")

RESIDUAL_DECAY = 0.99
"""Factor by which the weight of a squared error in the residual variance shrinks with each example after it."""


class HybridBayesianRegressor(LikelihoodModule):
    r"""Regresses with a network whose last layers are Bayesian, under Gaussian observation noise.

    .. math:: y = f(x;\theta) + \varepsilon, \quad \varepsilon \sim N(0, \sigma^2), \qquad
              \mathrm{Var}[y|x] = \sigma^2 + \mathrm{Var}_\theta f(x;\theta)

    Validation and test score the predictive distribution: RMSE, NLL, CRPS, coverage of the 90 % interval, sharpness.

    Args:
        network: maps inputs to means of shape (batch,) or (batch, targets).
        bayesian_last: the last n linear or convolutional layers become Bayesian; 0 takes ``network`` as it is. None is
            1, or 0 where the network is Bayesian or drops out already, where ``noise`` is "residual" or "none", and
            where ``predictive`` is not "layers".
        estimator, prior_std, prior, init, posterior_std: see :func:`~lightning_fedbayes.bayesianize`.
        noise: assumption about the observation noise. "learnt": σ is a deterministic parameter of the likelihood.
            "fixed": σ stays ``noise_std``. "residual": training minimises the squared error, as for a network without
            a likelihood, and σ² is a running mean of it (over about the last hundred examples), a buffer that
            federations average like BatchNorm's statistics; errors of training, so small where the network over-fits.
            "none": the squared error, and σ = 0 in predictions: only the disagreement of draws counts, as in [FedAG].
        noise_std: standard deviation σ of the noise, in units of the target; the initial value if σ is learnt or
            estimated.
        targets: number of targets if each has its own σ; None: one σ for all.
        options: see :class:`BayesianModule`: samples, kl_weight, warmup_rounds, learning_rate, optimizer, predictive.

    Raises:
        FedBayesError: ``noise_std`` is not positive; an unknown ``noise``; or ``noise`` "residual" or "none" for a
            network with Bayesian layers, whose ELBO needs a likelihood.
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
        **options: Any,
    ) -> None:
        check_number("noise_std", noise_std, "(0, inf)", error=FedBayesError, why="it is a standard deviation")
        check_choice("noise", noise, NOISES, error=FedBayesError)
        if targets is not None:
            check_at_least("targets", targets, 1, error=FedBayesError)
        if noise in ("learnt", "fixed") and options.get("predictive", "layers") == "layers":
            bayesian_last = layers_to_convert(network, bayesian_last)
        network = hybrid(network, bayesian_last, estimator, prior_std, prior, init, posterior_std)
        super().__init__(network, Gaussian(), **options)
        self.save_hyperparameters({name: getattr(self, name) for name in OPTIONS})
        if noise in ("residual", "none") and gaussian_parameters(self.network):
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
        """Gaussian NLL of means (batch, *), in nats, summed over targets; ``targets`` has as many entries.

        The squared error instead if ``noise`` is "residual" or "none".
        """
        errors = shaped_like(targets, outputs) - outputs
        if self.noise == "none":
            return errors.square().sum() / len(outputs)
        if self.noise == "residual":
            self._update_residual_variance(errors.detach())
            return errors.square().sum() / len(outputs)
        errors = errors * torch.exp(-self.log_noise_std)
        per_target = 0.5 * errors.square() + self.log_noise_std + 0.5 * math.log(2 * math.pi)
        return per_target.sum() / len(outputs)

    def _update_residual_variance(self, errors: Tensor) -> None:
        """Move the residual variance towards the mean square of ``errors``, shape (batch, *)."""
        if self.training:
            variance = self.residual_variance
            mean = errors.square().mean(0) if variance.ndim else errors.square().mean()
            variance.add_((1 - RESIDUAL_DECAY ** len(errors)) * (mean.reshape(variance.shape) - variance))

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> RegressionPrediction:
        """Mean prediction and decomposed variance of a batch: a tensor of inputs, or (inputs, targets)."""
        inputs = self.inputs_of(batch)
        draws = self.sample(inputs)
        posterior = self.global_round.posterior
        moments = None
        if self.predictive == "closed_form" and posterior is not None:
            moments = linear_moments(self.network, posterior, inputs)
        known = self._known()
        assert isinstance(known, Gaussian)
        return known.predict(draws, moments)
