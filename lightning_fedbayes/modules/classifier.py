"""A hybrid Bayesian classifier made from any network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedbayes.core.errors import FedBayesError, check_number
from lightning_fedbayes.layers import Estimator, Prior
from lightning_fedbayes.metrics.likelihoods import Categorical, Likelihood
from lightning_fedbayes.modules.bayesian_module import OPTIONS, LikelihoodModule
from lightning_fedbayes.modules.networks import Init, hybrid, layers_to_convert


def generalized_cross_entropy(logits: Tensor, target: Tensor, exponent: float) -> Tensor:
    r"""Generalised cross-entropy of each example, :math:`(1 - p_y^\delta) / \delta`, with p the softmax of the logits.

    From :math:`-\log p_y` (:math:`\delta \to 0`) to :math:`1 - p_y` (:math:`\delta = 1`). The gradient is that of the
    cross-entropy times :math:`p_y^\delta`.

    Args:
        logits: shape (batch, classes).
        target: class of each example, integers, shape (batch,).
        exponent: :math:`\delta` in [0, 1].

    Returns: shape (batch,).

    Source: Zhang and Sabuncu 2018, eq. (6).

    >>> generalized_cross_entropy(torch.zeros(1, 2), torch.tensor([0]), 1.0)
    tensor([0.5000])
    """
    nll = F.cross_entropy(logits, target, reduction="none")
    return -torch.expm1(-exponent * nll) / exponent if exponent else nll


class HybridBayesianClassifier(LikelihoodModule):
    r"""Classifies with a network whose last layers are Bayesian.

    Validation and test score the mean predictive :math:`\bar p = \frac1S\sum_s \mathrm{softmax}(f(x;\theta_s))`:
    accuracy, NLL, ECE (15 bins), Brier score, and uncertainty: entropy, mutual information ("epistemic") and Kwon's
    traces.

    Args:
        network: maps inputs to logits of shape (batch, classes).
        bayesian_last: the last n linear or convolutional layers become Bayesian; 0 takes ``network`` as it is. None is
            1, or 0 if ``network`` has Bayesian layers or Monte Carlo dropout already.
        estimator: see :func:`~lightning_fedbayes.bayesianize`, as are the next four.
        prior_std: standard deviation of the Gaussian prior; 1 by default.
        prior: any other prior.
        init: "fresh", or "pretrained" (MOPED) to start from the network's weights.
        posterior_std: initial standard deviation.
        robustness: :math:`\delta` in [0, 1]. What is trained is the generalised cross-entropy
            :math:`(1 - p_y^\delta) / \delta`, under which a label that the network finds improbable counts little: for
            data with wrong labels. 0 is the cross-entropy. Logged and scored is the NLL in any case.
        likelihood: "categorical", or "bernoulli" for yes or no.
        options: see :class:`BayesianModule`: samples, kl_weight, warmup_rounds, learning_rate, optimizer, predictive.

    Source of the robust loss: Zhang and Sabuncu 2018, eq. (6); Mildner et al. 2025.

    Raises:
        FedBayesError: ``robustness`` or an argument of :class:`BayesianModule` is out of range.
        ConversionError: the network has fewer layers to convert than asked for, or an argument of the conversion is
            given for a network that is taken as it is.

    >>> model = HybridBayesianClassifier(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), bayesian_last=1)
    >>> import torch
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
        bayesian_last = layers_to_convert(network, bayesian_last)
        network = hybrid(network, bayesian_last, estimator, prior_std, prior, init, posterior_std)
        super().__init__(network, likelihood, **options)
        self.save_hyperparameters({name: getattr(self, name) for name in OPTIONS})
        if not self.likelihood.of_classes:
            raise FedBayesError(
                f"likelihood '{self.likelihood.name}' is not of classes: give 'categorical' or 'bernoulli', or take a "
                "HybridBayesianRegressor or a CoxRegressor"
            )
        if robustness and self.likelihood != Categorical():
            raise FedBayesError(f"robustness={robustness} is of one class per example: take likelihood='categorical'")
        self.robustness = robustness
        self.save_hyperparameters(ignore=["network", "prior", "optimizer", "likelihood"])

    def loss_and_nll(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`BayesianModule.loss_and_nll`, with the generalised cross-entropy if ``robustness`` is above 0."""
        loss, nll = super().loss_and_nll(outputs, targets)
        return (generalized_cross_entropy(outputs, targets, self.robustness).mean() if self.robustness else loss), nll
