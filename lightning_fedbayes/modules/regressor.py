"""Regression: predictions, their scores, and a hybrid Bayesian regressor made from any network."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_choice, check_number
from lightning_fedbayes.layers import Estimator, Prior
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.layers.scaler import FederatedScaler
from lightning_fedbayes.metrics.likelihoods import Gaussian, shaped_like
from lightning_fedbayes.modules.bayesian_module import OPTIONS, LikelihoodModule
from lightning_fedbayes.modules.networks import Init, hybrid, layers_to_convert

Noise = Literal["learnt", "per_client", "fixed", "residual", "none"]
NOISES: tuple[Noise, ...] = ("learnt", "per_client", "fixed", "residual", "none")
MEASURED: tuple[Noise, ...] = ("learnt", "per_client", "residual")
OF_SQUARES: tuple[Noise, ...] = ("residual", "none")

WINDOWS = 3
"""Windows of the running mean in an epoch: after one, all clients have left 5 % of what they received, whatever their
sizes, so that averages are those of all examples; and the standard error is 1.2 times that of the epoch's own mean."""


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
        noise: assumption about the observation noise. "learnt": σ² is the mean squared error of training, a running
            mean over about a third of an epoch, in a buffer that federations average, weighted by examples, so that it
            is the pooled one: where training stands still, the σ² of the largest ELBO.
            "per_client": each client has its own σ, which stays with it, weights its errors and predicts for it; the
            global model has the pooled one. "fixed": σ stays ``noise_std``. "residual": as "learnt", but training
            minimises the squared error, as for a network without a likelihood. "none": the squared error, and σ = 0 in
            predictions: only the disagreement of draws counts, as in [FedAG]. What is measured is of training errors,
            so small where the network over-fits.
        noise_std: standard deviation σ of the noise, in units of the target; the initial value if σ is measured, in
            the units of the network, as ``noise_variance`` is then.
        targets: number of targets if each has its own σ; None: one σ for all.
        options: see :class:`BayesianModule`: samples, kl_weight, warmup_rounds, learning_rate, optimizer, predictive.
        scaler: True: the network trains on targets in units of their mean and standard deviation over all clients, and
            predictions are in the units of the data; a :class:`~lightning_fedbayes.FederatedScaler` with numbers of
            your own; False: it sees targets as they are. Draws (:meth:`sample`) are in the units of the network.

    Raises:
        FedBayesError: ``noise_std`` is not positive; an unknown ``noise``; or ``noise`` "residual" or "none" for a
            network with Bayesian layers, whose ELBO needs a likelihood.
        ConversionError: the network has fewer layers to convert than asked for.

    >>> model = HybridBayesianRegressor(nn.Linear(3, 1), bayesian_last=1, noise="fixed", noise_std=0.5)
    >>> model.predict_step(torch.zeros(2, 3)).aleatoric.flatten()
    tensor([0.2500, 0.2500])
    """

    pooled_variance: Tensor
    client_variance: Tensor | None

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
        scaler: FederatedScaler | bool = True,
        **options: Any,
    ) -> None:
        check_number("noise_std", noise_std, "(0, inf)", error=FedBayesError, why="it is a standard deviation")
        check_choice("noise", noise, NOISES, error=FedBayesError)
        if targets is not None:
            check_at_least("targets", targets, 1, error=FedBayesError)
        if noise not in OF_SQUARES and options.get("predictive", "layers") == "layers":
            bayesian_last = layers_to_convert(network, bayesian_last)
        network = hybrid(network, bayesian_last, estimator, prior_std, prior, init, posterior_std)
        super().__init__(network, Gaussian(noise_std if noise == "fixed" else "learnt"), scaler=scaler, **options)
        self.save_hyperparameters({name: getattr(self, name) for name in OPTIONS})
        if noise in OF_SQUARES and gaussian_parameters(self.network):
            raise FedBayesError(
                f"noise='{noise}' trains on the squared error, and a network with Bayesian layers needs a likelihood "
                "beside its KL: use noise='learnt' or 'fixed'"
            )
        self.noise: Noise = noise
        self.save_hyperparameters(ignore=["network", "prior", "optimizer", "scaler"])
        start = torch.full(() if targets is None else (targets,), 0.0 if noise == "none" else noise_std**2)
        self.register_buffer("pooled_variance", start, persistent=noise in MEASURED)
        self.register_buffer("client_variance", torch.zeros_like(start) if noise == "per_client" else None)

    @property
    def local_parameters(self) -> tuple[str, ...]:
        """Names of what never leaves a client: its own noise, if it has one."""
        return ("client_variance",) if self.noise == "per_client" else ()

    @property
    def noise_variance(self) -> Tensor:
        """Variance of the observation noise, a scalar or shape (targets,): the client's own where it is known."""
        own = self.client_variance
        return self.pooled_variance if own is None else torch.where(own > 0, own, self.pooled_variance)

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Gaussian NLL of means (batch, *), in nats, summed over targets; ``targets`` has as many entries.

        The squared error instead if ``noise`` is "residual" or "none". In training the noise is measured, too.
        """
        known = self._known()  # with the noise of the examples before, so that no error weights itself
        assert isinstance(known, Gaussian)
        errors = known.standard(shaped_like(targets, outputs), outputs) - outputs
        if self.training and self.noise in MEASURED:
            self._measure(errors.detach().square())
        if self.noise in OF_SQUARES:
            return errors.square().sum() / len(outputs)
        return known.loss(outputs, targets)

    def _measure(self, squares: Tensor) -> None:
        """Move the variances of the noise towards the mean of squared errors, shape (batch, *)."""
        mean = squares.mean(0) if self.pooled_variance.ndim else squares.mean()
        epoch = torch.as_tensor(len(squares) if self.num_examples is None else self.num_examples)
        for variance, windows in ((self.client_variance, 1), (self.pooled_variance, WINDOWS)):
            if variance is not None:  # 0 is that of a client that was never measured
                part = torch.where(variance > 0, 1 - torch.exp(-windows * len(squares) / epoch), 1.0)
                variance.copy_(variance + part * (mean.reshape(variance.shape) - variance))
