"""Ready modules with last layers that become Bayesian: a classifier, a regressor and a Cox regressor."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fedbayes.core.errors import ConversionError, FedBayesError, check_at_least, check_choice, check_number
from lightning_fedbayes.layers import Estimator, Prior, bayesianize
from lightning_fedbayes.layers.base import check_estimator
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.layers.scaler import FederatedScaler
from lightning_fedbayes.metrics.likelihoods import Categorical, Cox, Gaussian, Likelihood, shaped_like
from lightning_fedbayes.modules.bayesian_module import OPTIONS, LikelihoodModule
from lightning_fedbayes.modules.sampling import is_stochastic

Init = Literal["fresh", "pretrained"]


def hybrid(network: nn.Module, bayesian_last: int | None, **options: Any) -> nn.Module:
    """Return a copy with Bayesian last layers (:func:`bayesianize`), or ``network`` if no argument is given."""
    if bayesian_last is not None:
        return bayesianize(network, last=bayesian_last, **options)
    check_estimator(options["estimator"])
    defaults = {"init": "fresh", "estimator": "local_reparameterization"}
    ignored = [f"{name}={value!r}" for name, value in options.items() if value != defaults.get(name)]
    if ignored:
        why = "the network is taken as it is, so they would have no effect"
        remedy = "Give bayesian_last=n, or make the layers Bayesian yourself"
        raise ConversionError(f"{', '.join(ignored)} without bayesian_last: {why}. {remedy}")
    return network


def generalized_cross_entropy(logits: Tensor, target: Tensor, exponent: float) -> Tensor:
    r"""Return the generalised cross-entropy of each example, :math:`(1 - p_y^\delta) / \delta`, of logits and classes.

    From :math:`-\log p_y` (:math:`\delta \to 0`) to :math:`1 - p_y` (:math:`\delta = 1`). The gradient is the
    cross-entropy's times :math:`p_y^\delta`. Logits have shape (batch, classes), targets are classes, (batch,).

    Source: Zhang and Sabuncu 2018, eq. (6).

    >>> generalized_cross_entropy(torch.zeros(1, 2), torch.tensor([0]), 1.0)
    tensor([0.5000])
    """
    nll = nn.functional.cross_entropy(logits, target, reduction="none")
    return -torch.expm1(-exponent * nll) / exponent if exponent else nll


class HybridBayesianClassifier(LikelihoodModule):
    r"""Classifies with a network with Bayesian last layers, by :math:`\frac1S\sum_s \mathrm{softmax}(f(x;\theta_s))`.

    Args:
        network: maps inputs to logits of shape (batch, classes).
        bayesian_last: the last n linear or convolutional layers become Bayesian. 0 takes ``network`` as it is. None is
            1, or 0 if ``network`` has Bayesian layers or Monte Carlo dropout.
        estimator, posterior_std: see :func:`~lightning_fedbayes.bayesianize`.
        prior_std: standard deviation of the Gaussian prior. 1 by default.
        prior: any other prior.
        init: "fresh", or "pretrained" (MOPED) to start from the network's weights.
        robustness: :math:`\delta` in [0, 1]: train on the generalised cross-entropy :math:`(1 - p_y^\delta) / \delta`,
            for data with wrong labels. 0 is the cross-entropy. The NLL is logged and scored in any case.
        likelihood: "categorical", or "bernoulli" for yes or no.
        options: see :class:`BayesianModule`: samples, kl_weight, warmup_rounds, learning_rate, optimizer, predictive.

    Source of the robust loss: Zhang and Sabuncu 2018, eq. (6). Mildner et al. 2025.

    Raises:
        FedBayesError: ``robustness`` or an argument of :class:`BayesianModule` is out of range.
        ConversionError: the network has fewer layers to convert than asked for, or an argument of the conversion is
            given for a network that is taken as it is.

    >>> model = HybridBayesianClassifier(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), bayesian_last=1)
    >>> model.predict_step([torch.zeros(5, 4), None]).probs.shape
    torch.Size([5, 3])
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
        robustness: float = 0.0,
        likelihood: Likelihood | str = "categorical",
        **options: Any,
    ) -> None:
        check_number("robustness", robustness, "[0, 1]", error=FedBayesError, why="0 is the cross-entropy")
        bayesian_last = 1 if bayesian_last is None and not is_stochastic(network) else bayesian_last
        prior_options: Any = {"prior_std": prior_std, "prior": prior, "posterior_std": posterior_std}
        network = hybrid(network, bayesian_last, **prior_options, init=init, estimator=estimator)
        super().__init__(network, likelihood, **options)
        self.save_hyperparameters({name: getattr(self, name) for name in OPTIONS})
        if not self.likelihood.of_classes:
            remedy = "give 'categorical' or 'bernoulli', or take a HybridBayesianRegressor or a CoxRegressor"
            raise FedBayesError(f"likelihood '{self.likelihood.name}' is not of classes: {remedy}")
        if robustness and self.likelihood != Categorical():
            raise FedBayesError(f"robustness={robustness} is of one class per example: take likelihood='categorical'")
        self.robustness = robustness
        self.save_hyperparameters(ignore=["network", "prior", "optimizer", "likelihood"])

    def loss_and_nll(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss, nll = super().loss_and_nll(outputs, targets)
        return (generalized_cross_entropy(outputs, targets, self.robustness).mean() if self.robustness else loss), nll


Noise = Literal["learnt", "per_client", "fixed", "residual", "none"]
NOISES: tuple[Noise, ...] = ("learnt", "per_client", "fixed", "residual", "none")
MEASURED: tuple[Noise, ...] = ("learnt", "per_client", "residual")
OF_SQUARES: tuple[Noise, ...] = ("residual", "none")

WINDOWS = 3
"""Windows of the running mean in an epoch: after one, all clients have left 5 % of what they received, whatever
their sizes, so that averages cover all examples. The standard error is 1.2 times the error of the epoch's mean."""


class _Pass(nn.Module):
    """Counts the examples of a client in a round: a buffer that every client finds at 0."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)


class HybridBayesianRegressor(LikelihoodModule):
    r"""Regresses with a network with Bayesian last layers, under Gaussian observation noise.

    .. math:: y = f(x;\theta) + \varepsilon, \quad \varepsilon \sim N(0, \sigma^2), \qquad
              \mathrm{Var}[y|x] = \sigma^2 + \mathrm{Var}_\theta f(x;\theta)

    Args:
        network: maps inputs to means of shape (batch,) or (batch, targets).
        bayesian_last: as in :class:`HybridBayesianClassifier`, like arguments that are not listed here. None is 0 also
            where ``noise`` is "residual" or "none", and where ``predictive`` is not "layers".
        noise: assumption about the observation noise. "learnt": σ² is the mean squared error of training, a running
            mean over about a third of an epoch, in a buffer that federations average. From the second round on, clients
            measure it in the first of their local epochs, of a model that has not been fitted to their examples alone.
            "per_client": each client keeps its σ, and the global model has the pooled one. "fixed": σ stays
            ``noise_std``. "residual": as "learnt", but training minimises the squared error. "none": the squared error,
            and σ = 0 in predictions, as in [FedAG].
            Measured noise is too small where the network over-fits.
        noise_std: standard deviation σ of the noise, in units of the target. If σ is measured, its initial value, or
            the errors of the first batch if they are larger, in the units of the network, as ``noise_variance`` is.
        targets: number of targets if each has a σ. None: one σ for all.
        scaler: True: the network trains on targets in units of their mean and standard deviation over all clients, and
            predicts in the units of the data. A :class:`~lightning_fedbayes.FederatedScaler` with your numbers. False:
            it sees targets as they are. Draws (:meth:`sample`) are in the units of the network.

    Raises:
        FedBayesError: ``noise_std`` is not positive. An unknown ``noise``, or ``noise`` "residual" or "none" for a
            network with Bayesian layers, which needs a likelihood for its ELBO.
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
            bayesian_last = 1 if bayesian_last is None and not is_stochastic(network) else bayesian_last
        prior_options: Any = {"prior_std": prior_std, "prior": prior, "posterior_std": posterior_std}
        network = hybrid(network, bayesian_last, **prior_options, init=init, estimator=estimator)
        super().__init__(network, Gaussian(noise_std if noise == "fixed" else "learnt"), scaler=scaler, **options)
        self.save_hyperparameters({name: getattr(self, name) for name in OPTIONS})
        if noise in OF_SQUARES and gaussian_parameters(self.network):
            raise FedBayesError(
                f"noise='{noise}' trains on the squared error, and a network with Bayesian layers needs a likelihood "
                "and its KL: use noise='learnt' or 'fixed'"
            )
        self.noise: Noise = noise
        self.save_hyperparameters(ignore=["network", "prior", "optimizer", "scaler"])
        start = torch.full(() if targets is None else (targets,), 0.0 if noise == "none" else noise_std**2)
        self.register_buffer("pooled_variance", start, persistent=noise in MEASURED)
        self.register_buffer("client_variance", torch.zeros_like(start) if noise == "per_client" else None)
        self._round = _Pass()

    @property
    def local_parameters(self) -> tuple[str, ...]:
        """Names of parameters that never leave a client: its noise with ``noise="per_client"``."""
        return ("client_variance",) if self.noise == "per_client" else ()

    @property
    def noise_variance(self) -> Tensor:
        """Variance of the observation noise, a scalar or shape (targets,): the client's where it is known."""
        own = self.client_variance
        return self.pooled_variance if own is None else torch.where(own > 0, own, self.pooled_variance)

    def on_train_epoch_start(self) -> None:
        """Let a client that is alone, whose buffers nobody puts back, measure its noise again."""
        self._round.seen.zero_()

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the Gaussian NLL of means (batch, *), in nats, summed over targets, which have as many entries.

        It is the squared error if ``noise`` is "residual" or "none". In training it also measures the noise.
        """
        known = self._known()
        assert isinstance(known, Gaussian)
        errors = known.standard(shaped_like(targets, outputs), outputs) - outputs
        if self.training and self.noise in MEASURED:
            mean = errors.detach().square().mean(0 if self.pooled_variance.ndim else None)
            mean = mean.reshape(self.pooled_variance.shape)
            if self.current_epoch == 0:  # errors that are larger than noise_std have gradients out of proportion
                self.pooled_variance.copy_(mean.where(self._round.seen == 0, 0.0).maximum(self.pooled_variance))
            known = self._known()  # with the noise of the examples before, so that no error weights itself
            self._measure(mean, len(outputs))
        return errors.square().sum() / len(outputs) if self.noise in OF_SQUARES else known.loss(outputs, targets)

    def _measure(self, mean: Tensor, examples: int) -> None:
        """Move the variances of the noise towards the mean of squared errors."""
        epoch = torch.as_tensor(examples if self.num_examples is None else self.num_examples)
        is_whole = not self._federated or self.current_epoch == 0  # the model that came to the first round is untrained
        is_first = True if is_whole else self._round.seen < epoch
        for variance, windows in ((self.client_variance, 1), (self.pooled_variance, WINDOWS)):
            if variance is not None:  # 0 until a client is measured
                part = is_first * torch.where(variance > 0, 1 - torch.exp(-windows * examples / epoch), 1.0)
                variance.copy_(variance + part * (mean - variance))
        self._round.seen.add_(examples)


class CoxRegressor(LikelihoodModule):
    """Cox proportional hazards with a network with Bayesian layers as log risk, for (inputs, target) batches.

    The likelihood is :class:`~lightning_fedbayes.Cox`. A target has two columns, event (1 observed, 0 censored) and
    time. With one batch per epoch the loss is the ELBO of the Cox model per example, stratified by client.

    When to use it: times to an event, some of which are censored. The likelihood does not fix a constant in log risks,
    so leave out the last layer's bias (``nn.Linear(features, 1, bias=False)``), which would widen predictions.

    Validation and test log "c_index", Harrell's c of the mean log risk, and "nll", its negative log partial likelihood
    per example in nats, over the pairs and risk sets of all batches.

    Args:
        network: maps inputs to log risks of shape (batch,) or (batch, 1).
        bayesian_last: as in :class:`HybridBayesianClassifier`, like other arguments. None takes ``network`` as is.

    Raises:
        ConversionError: the network has fewer layers to convert than asked for.
        FedBayesError: a target without two columns, more than one output per example, a time that is negative or not
            finite, or an event that is not 0 or 1.

    Source: Cox (1972).

    >>> model = CoxRegressor(nn.Linear(3, 1, bias=False), bayesian_last=1, samples=4)
    >>> model.predict_step(torch.zeros(2, 3)).samples.shape
    torch.Size([4, 2])
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
        **options: Any,
    ) -> None:
        prior_options: Any = {"prior_std": prior_std, "prior": prior, "posterior_std": posterior_std}
        network = hybrid(network, bayesian_last, **prior_options, init=init, estimator=estimator)
        super().__init__(network, Cox(), **options)
        self.save_hyperparameters({name: getattr(self, name) for name in OPTIONS})
        self.save_hyperparameters(ignore=["network", "prior", "optimizer"])

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not self.current_epoch:  # once, as a look at values waits for the device
            self.likelihood.check(outputs, targets)
        return super().negative_log_likelihood(outputs, targets)
