"""A Cox regressor made from any network."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_fedbayes.layers import Estimator, Prior
from lightning_fedbayes.metrics.likelihoods import Cox
from lightning_fedbayes.modules.bayesian_module import OPTIONS, LikelihoodModule
from lightning_fedbayes.modules.networks import Init, hybrid


class CoxRegressor(LikelihoodModule):
    r"""Cox proportional hazards whose log risk is a network with Bayesian layers, for (inputs, target) batches.

    The likelihood is :class:`~lightning_fedbayes.Cox`; a target has two columns, event (1 observed, 0 censored) and
    time. The loss is the partial likelihood of the batch divided by its number of examples, and a share of the KL. So
    it is no sum over examples: its value depends on the batch size, and with one batch per epoch it is the ELBO of the
    Cox model, in a federation of one that is stratified by client. Use it for times to an event of which some are
    censored.

    Validation and test log "c_index", Harrell's c of the mean log risk, and "nll", its negative log partial likelihood
    per example in nats; both take the pairs and risk sets of all batches together. Their steps check times and events;
    training checks those of its first epoch.

    The likelihood does not fix a constant in log risks. The standard deviations of predictions include that of the
    network's constant: leave out the last layer's bias (``nn.Linear(features, 1, bias=False)``).

    Args:
        network: maps inputs to log risks of shape (batch,) or (batch, 1).
        bayesian_last: the last n linear or convolutional layers become Bayesian; None takes ``network`` as it is.
        estimator, prior_std, prior, init, posterior_std: see :func:`~lightning_fedbayes.bayesianize`.
        options: see :class:`BayesianModule`: samples, kl_weight, warmup_rounds, learning_rate, optimizer, predictive.

    Raises:
        ConversionError: the network has fewer layers to convert than asked for.
        FedBayesError: a target without two columns, or more than one output per example; in validation, test and the
            first epoch of training, a time that is negative or not finite, or an event that is not 0 or 1.

    Source: Cox (1972).

    >>> model = CoxRegressor(nn.Linear(3, 1, bias=False), bayesian_last=1, samples=4)
    >>> import torch
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
        network = hybrid(network, bayesian_last, estimator, prior_std, prior, init, posterior_std)
        super().__init__(network, Cox(), **options)
        self.save_hyperparameters({name: getattr(self, name) for name in OPTIONS})
        self.save_hyperparameters(ignore=["network", "prior", "optimizer"])

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See :class:`LikelihoodModule`; times and events are checked in the first epoch."""
        if not self.current_epoch:  # once, as a look at values waits for the device
            self.likelihood.check(outputs, targets)
        return super().negative_log_likelihood(outputs, targets)
