r"""Predictions for a batch, and the base class of likelihoods.

Outputs are as torch's losses take them, (batch, channels, \*positions), targets (batch, \*positions), or (batch,
labels, \*positions) where each channel has a label; (batch,) and (batch, 1) both mean one output per example.
"""

import math
from abc import ABC, abstractmethod
from statistics import NormalDist
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError, shown
from lightning_fedbayes.core.posterior import check_tensor

Rows: TypeAlias = dict[str, Tensor]
r"""Rows that are scored, one for each example and position, N of them.

Of classes "probs" and perhaps "logits", (samples, N, classes), and "target", (N,). Of numbers "mean", "variance" and
"target", (N, targets), and perhaps "nll", (N,). Of risks "log_risk" and "std", (N,), and "target", (N, 2). "counts",
(batch,), are the rows of each example, which follow one another.
"""

LIKELIHOODS: "dict[str, type[Likelihood]]" = {}
"""Likelihoods that have a name."""


class ClassPrediction(NamedTuple):
    r"""Prediction of classes for a batch. Of a Bernoulli all fields have the shape of its outputs.

    Attributes:
        probs: mean predictive probabilities, shape (batch, classes, \*positions). Of a Bernoulli the probability of 1.
        label: most probable class, shape (batch, \*positions), as of all below.
        entropy: normalised predictive entropy in [0, 1], the total uncertainty.
        epistemic: mutual information between label and parameters, in nats.
        kwon_aleatoric: trace of Kwon's aleatoric covariance.
        kwon_epistemic: trace of Kwon's epistemic covariance.
    """

    probs: Tensor
    label: Tensor
    entropy: Tensor
    epistemic: Tensor
    kwon_aleatoric: Tensor
    kwon_epistemic: Tensor


class RegressionPrediction(NamedTuple):
    r"""Prediction of numbers for a batch, in the units of the targets, shape (batch, targets, \*positions).

    Attributes:
        mean: predictive mean.
        variance: predictive variance, aleatoric + epistemic.
        aleatoric: variance of the observation noise.
        epistemic: variance of the mean over draws of the parameters.
        samples: the mean under each draw of the parameters, shape (draws, batch, targets, \*positions).
    """

    mean: Tensor
    variance: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    samples: Tensor

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the central interval of a Gaussian with this mean and variance, in the mean's shape.

        Args:
            level: probability of the interval, strictly between 0 and 1, else FedBayesError.
        """
        if not 0 < level < 1:
            raise FedBayesError(f"level={level}: the part of the distribution in an interval lies in (0, 1)")
        half = NormalDist().inv_cdf((1 + level) / 2) * self.variance.sqrt()
        return self.mean - half, self.mean + half


class SurvivalPrediction(NamedTuple):
    """Prediction of a Bayesian Cox model for a batch.

    Attributes:
        log_risk: mean log of the relative hazard over draws of the parameters, shape (batch,).
        std: standard deviation of the log risk over draws of the parameters, shape (batch,).
        samples: the log risk under each draw of the parameters, shape (draws, batch).
    """

    log_risk: Tensor
    std: Tensor
    samples: Tensor


class Likelihood(ABC):
    """Meaning of a network's outputs: plain data and pure functions.

    A module names it by an attribute ``likelihood``, this object or its name. Modules, predictions, reports,
    calibrations and Laplace read it there. To write another one, subclass it with :meth:`nll` and :meth:`predict`.
    """

    name: ClassVar[str] = "own"
    of_classes: ClassVar[bool] = False
    """True if targets are one of some classes, each with a probability."""
    by_example: ClassVar[bool] = True
    """False if the term of an example depends on the others of its batch."""
    by_moments: ClassVar[bool] = False
    """True if a prediction is scored by its moments, without the mixture of draws."""

    @abstractmethod
    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        r"""Return :math:`-\log p(y \mid f)` in nats, one value for each example, and position or target.

        Args:
            outputs: f, shape (batch, \*).
            targets: y.
        """

    @abstractmethod
    def predict(self, draws: Tensor) -> Any:
        r"""Return the prediction of draws of the outputs, shape (samples, batch, \*)."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of :meth:`nll` over positions, averaged over the batch, a scalar: what training minimises."""
        return self.nll(outputs, targets).sum() / len(outputs)

    def unfit(self, outputs: Tensor, targets: Tensor) -> str:
        """Return why outputs and targets of a batch do not go together. "" if they do."""
        return ""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise FedBayesError unless outputs and targets of a batch go together."""
        why = self.unfit(outputs, targets)
        if why:
            both = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} of {targets.dtype}"
            remedy = f"give the module another likelihood, one of {', '.join(LIKELIHOODS)}"
            raise FedBayesError(f"likelihood '{self.name}': {both}: {why}; {remedy}")

    def check_draws(self, draws: Tensor, targets: Tensor) -> None:
        """Raise FedBayesError unless draws of outputs and the targets of a batch go together."""
        check_tensor("draws", draws, error=FedBayesError)
        check_tensor("targets", targets, error=FedBayesError)
        if draws.ndim < 2 or not len(draws) or not targets.ndim or not draws.is_floating_point():
            raise FedBayesError(f"draws are {shown(draws)} and targets {shown(targets)}: give (samples, batch, *)")
        self.check(draws[0], targets)

    def refuse_examples(self, why: str, error: type[FedBayesError] = FedBayesError) -> None:
        """Raise ``error``, with ``why``, unless :attr:`by_example`."""
        if not self.by_example:
            raise error(f"likelihood '{self.name}': what an example says depends on the others of its batch. {why}")

    def rows(self, draws: Tensor, targets: Tensor) -> Rows:
        r"""Return what is scored of a batch: here predictive moments, and the NLL of the mixture of draws.

        .. math:: -\log \tfrac1S \textstyle\sum_s p(y \mid f_s)

        Args:
            draws: of the outputs, shape (samples, batch, \*).
            targets: of the batch.
        """
        self.check_draws(draws, targets)
        found = self.rows_of(self.predict(draws), targets)
        if self.by_moments:
            return found
        nll = -torch.stack([-self.nll(each, targets) for each in draws]).logsumexp(0) + math.log(len(draws))
        return {**found, "nll": nll.reshape(len(found["target"]), -1).sum(1)}

    def rows_of(self, prediction: Any, targets: Tensor) -> Rows:
        """Return what is scored of a batch's prediction."""
        if not isinstance(prediction, RegressionPrediction):
            remedy = "return a ClassPrediction or a RegressionPrediction to score examples"
            raise FedBayesError(f"likelihood '{self.name}' predicts {shown(prediction)}: {remedy}")
        parts = prediction.mean, prediction.variance, shaped_like(targets, prediction.mean)
        mean, variance, target = (each.movedim(1, -1).flatten(0, -2) for each in parts)
        counts = torch.full((len(targets),), len(mean) // max(1, len(targets)))
        return {"mean": mean, "variance": variance, "target": target, "counts": counts}

    def terms(self, output: Tensor, target: Tensor) -> Tensor:
        r"""Return functions of one example's output, shape (terms,). Their squared gradients sum to its information.

        Here with :math:`H = \nabla^2_f (-\log p(y \mid f)) = R R^\top` they are :math:`R^\top f`.

        Args:
            output: f of one example.
            target: its target.
        """
        self.refuse_examples("No information of single examples adds up to that of all")
        flat = output.reshape(-1)

        def nll(each: Tensor) -> Tensor:
            return self.nll(each.view(1, *output.shape), target[None]).sum()

        values, vectors = torch.linalg.eigh(torch.func.jacrev(torch.func.grad(nll))(flat.detach()))
        return (vectors * values.clamp_min(0).sqrt()).T @ flat


def shaped_like(targets: Tensor, outputs: Tensor) -> Tensor:
    r"""Return ``targets`` in the shape of ``outputs``, (batch, \*), so that (batch,) and (batch, 1) are the same.

    Raises: FedBayesError if the numbers of entries differ.
    """
    if targets.numel() != outputs.numel():
        shapes = f"targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}"
        raise FedBayesError(f"{shapes}: give the network one output per target")
    return targets.reshape(outputs.shape)
