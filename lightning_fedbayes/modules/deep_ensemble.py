"""A deep ensemble: networks that predict mean and variance, each from its initial parameters."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_fedbayes.core.errors import FedBayesError, check_kind
from lightning_fedbayes.layers.scaler import FederatedScaler
from lightning_fedbayes.metrics.likelihoods import Gaussian, RegressionPrediction
from lightning_fedbayes.modules.bayesian_module import LikelihoodModule

MIN_VARIANCE = 1e-6
"""Least variance that a member predicts, in squared units of the targets it is trained on."""


class Ensemble(nn.Module):
    """Networks side by side: inputs (batch, *) to outputs (batch, members, outputs)."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return every member's output."""
        return torch.stack([member(inputs) for member in self.members], 1)


class DeepEnsembleRegressor(LikelihoodModule):
    r"""Regresses with the mixture of several networks, each of which predicts a mean and a variance.

    The loss is the sum of the members' Gaussian NLLs on every example, so that all train at once and independently:

    .. math:: \mathcal L = \sum_m \tfrac12 \log 2\pi\sigma_m^2(x) + \frac{(y - \mu_m(x))^2}{2\sigma_m^2(x)}, \qquad
              \sigma_m^2 = \mathrm{softplus}(r_m) + 10^{-6}

    where the first half of a network's outputs is μ and the second half r. The prediction is the mixture's mean and
    variance, the mean of the members' variances (aleatoric) plus the spread of their means (epistemic):

    .. math:: \mu = \frac1M\sum_m \mu_m, \qquad \sigma^2 = \frac1M\sum_m \sigma_m^2 + \frac1M\sum_m (\mu_m - \mu)^2

    When to use it: the noise differs from input to input, or a strong baseline is wanted at M times the cost. Fuse by
    "weighted_average". Each draw of members with Bayesian layers or Monte Carlo dropout counts as a further member.

    Args:
        networks: with different initial parameters, mapping inputs to (batch, 2 · targets); [FedAG] takes five.
        scaler: see :class:`HybridBayesianRegressor`. Outputs of the networks are in its units.
        learning_rate, optimizer: see :class:`BayesianModule`.

    Raises FedBayesError: no network, two with equal initial parameters, or outputs that are not two per target.
    Source: Lakshminarayanan, Pritzel and Blundell (2017) §2.4, without adversarial examples; [FedAG], §4.3.

    >>> model = DeepEnsembleRegressor([nn.Linear(3, 2) for _ in range(5)])
    >>> prediction = model.predict_step(torch.zeros(4, 3))
    >>> prediction.mean.shape, prediction.samples.shape
    (torch.Size([4, 1]), torch.Size([5, 4, 1]))
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        *,
        learning_rate: float = 1e-3,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        scaler: FederatedScaler | bool = True,
    ) -> None:
        why = "give a list of modules, at least one"
        check_kind("networks", networks, Sequence | nn.ModuleList, why, error=FedBayesError)
        if not len(networks):
            raise FedBayesError("networks is empty: an ensemble has at least one member")
        for network in networks:
            check_kind("a network", network, nn.Module, "give a torch.nn.Module", error=FedBayesError)
        for number, network in enumerate(networks):
            pairs = [list(zip(other.parameters(), network.parameters())) for other in networks[:number]]
            twins = [other for other, each in enumerate(pairs) if each and all(torch.equal(a, b) for a, b in each)]
            if twins:
                what = f"networks {twins[0]} and {number} have equal parameters, and would learn the same"
                raise FedBayesError(f"{what}: build each one, as in [mlp(3, 2) for _ in range(5)]")
        options: Any = {"learning_rate": learning_rate, "optimizer": optimizer, "scaler": scaler}
        super().__init__(Ensemble(networks), Gaussian("output"), **options)
        self.save_hyperparameters(ignore=["networks", "optimizer", "scaler"])

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the Gaussian NLL in nats, a mean over the batch, summed over members and targets.

        Outputs are means, then raw variances, (batch, members, 2 · targets). Targets (batch,) or (batch, targets).
        """
        mean, variance = mean_and_variance(outputs)
        if targets.numel() * mean.shape[1] != mean.numel():
            why = "the networks of an ensemble have two outputs per target, mean and raw variance"
            raise FedBayesError(f"{outputs.shape[-1]} outputs for targets of shape {tuple(targets.shape)}: {why}")
        of_each = targets.reshape(len(mean), 1, -1).expand_as(mean).flatten(0, 1)
        members = torch.cat([mean, variance.log()], -1).flatten(0, 1)
        return self._known().nll(members, of_each).sum() / len(outputs)

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> RegressionPrediction:
        """Return mean and decomposed variance of the mixture for inputs, or for (inputs, targets)."""
        means, variances = mean_and_variance(self.sample(self.inputs_of(batch)).movedim(2, 1).flatten(0, 1))
        return self._known().predict(torch.cat([means, variances.log()], -1))


def mean_and_variance(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Split outputs (*, 2 · targets) into means and variances. Raise FedBayesError if their number is odd."""
    if outputs.shape[-1] % 2:
        why = "a network that predicts mean and variance has two outputs per target"
        raise FedBayesError(f"{outputs.shape[-1]} outputs: {why}")
    mean, raw = outputs.chunk(2, -1)
    return mean, F.softplus(raw) + MIN_VARIANCE
