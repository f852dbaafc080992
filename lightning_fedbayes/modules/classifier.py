"""A hybrid Bayesian classifier out of any network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_fedbayes.layers import Estimator, Prior, bayesianize
from lightning_fedbayes.metrics import (
    AleatoricUncertainty,
    BrierScore,
    EpistemicUncertainty,
    NegativeLogLikelihood,
    PredictiveEntropy,
    ReliabilityDiagram,
)
from lightning_fedbayes.metrics.functional import (
    aleatoric_uncertainty,
    epistemic_uncertainty,
    mutual_information,
    predictive_entropy,
)
from lightning_fedbayes.modules.bayesian_module import BayesianModule


class ClassPrediction(NamedTuple):
    """What a Bayesian classifier says of a batch.

    Attributes:
        probs: mean predictive probabilities, shape (batch, classes).
        label: most probable class, shape (batch,).
        entropy: normalised predictive entropy in [0, 1], the total uncertainty, shape (batch,).
        aleatoric: trace of Kwon's aleatoric covariance, shape (batch,).
        epistemic: trace of Kwon's epistemic covariance, shape (batch,).
        mutual_information: between label and parameters, in nats, shape (batch,).
    """

    probs: Tensor
    label: Tensor
    entropy: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    mutual_information: Tensor


class HybridBayesianClassifier(BayesianModule):
    r"""Classifies with a network whose last layers are Bayesian.

    Validation and test score the mean predictive :math:`\bar p = \frac1S\sum_s \mathrm{softmax}(f(x;\theta_s))`:
    accuracy, NLL, ECE (15 bins), Brier score, and total, aleatoric and epistemic uncertainty.

    Args:
        network: maps inputs to logits of shape (batch, classes).
        bayesian_last: the last n linear or convolutional layers become Bayesian; None takes ``network`` as it is,
            Bayesian layers included.
        estimator: see :func:`~lightning_fedbayes.bayesianize`, as are the next four.
        prior_std: standard deviation of the Gaussian prior; 1 by default.
        prior: any other prior.
        init: "fresh", or "pretrained" (MOPED) to start from the network's weights.
        posterior_std: initial standard deviation.
        samples, kl_weight, warmup_rounds, learning_rate, optimizer: see :class:`BayesianModule`.

    Raises:
        ConversionError: the network has fewer layers to convert than asked for.

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
        init: Literal["fresh", "pretrained"] = "fresh",
        posterior_std: float | None = None,
        samples: int = 10,
        kl_weight: float = 1.0,
        warmup_rounds: int = 0,
        learning_rate: float = 1e-3,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    ) -> None:
        if bayesian_last is not None:
            network = bayesianize(
                network,
                last=bayesian_last,
                estimator=estimator,
                prior_std=prior_std,
                prior=prior,
                init=init,
                posterior_std=posterior_std,
            )
        super().__init__(
            network,
            samples=samples,
            kl_weight=kl_weight,
            warmup_rounds=warmup_rounds,
            learning_rate=learning_rate,
            optimizer=optimizer,
        )
        self.save_hyperparameters(ignore=["network", "prior", "optimizer"])
        self._predictive_metrics = nn.ModuleDict(
            {"ece": ReliabilityDiagram(), "nll": NegativeLogLikelihood(), "brier": BrierScore()}
        )
        self._sample_metrics = nn.ModuleDict(
            {"entropy": PredictiveEntropy(), "aleatoric": AleatoricUncertainty(), "epistemic": EpistemicUncertainty()}
        )

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of logits (batch, classes) and classes (batch,), in nats."""
        return F.cross_entropy(outputs, targets)

    def sample_probs(self, inputs: Tensor, samples: int | None = None) -> Tensor:
        """Class probabilities of each draw of the parameters, shape (samples, batch, classes)."""
        return self.sample(inputs, samples).softmax(-1)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Score a batch. Returns sampled probabilities (samples, batch, classes) and targets (batch,)."""
        return self._score(batch)

    def on_validation_epoch_end(self) -> None:
        """Log the scores over all batches."""
        self._log_scores("val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """As :meth:`validation_step`."""
        return self._score(batch)

    def on_test_epoch_end(self) -> None:
        """As :meth:`on_validation_epoch_end`."""
        self._log_scores("test")

    def _score(self, batch: Any) -> dict[str, Tensor]:
        inputs, targets = self.unpack(batch)
        probs = self.sample_probs(inputs)
        mean = probs.mean(0)
        for metric in self._predictive_metrics.values():
            metric.update(mean, targets)
        for metric in self._sample_metrics.values():
            metric.update(probs)
        return {"probs": probs, "target": targets}

    def _log_scores(self, stage: str) -> None:
        # once per epoch: a call of self.log costs as much as the forward pass of a small network
        reliability = self._predictive_metrics["ece"].compute()
        hits = (reliability.accuracy * reliability.counts).nansum() / reliability.counts.sum()
        scores = {"accuracy": hits, "ece": reliability.ece}
        for name, metric in (*self._predictive_metrics.items(), *self._sample_metrics.items()):
            if name != "ece":
                scores[name] = metric.compute()
            metric.reset()
        self.log_dict({f"{stage}/{name}": score for name, score in scores.items()})

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> ClassPrediction:
        """Mean prediction and decomposed uncertainty of a batch: a tensor of inputs, or (inputs, targets)."""
        inputs = batch if isinstance(batch, Tensor) else self.unpack(batch)[0]
        probs = self.sample_probs(inputs)
        mean = probs.mean(0)
        return ClassPrediction(
            mean,
            mean.argmax(-1),
            predictive_entropy(probs),
            aleatoric_uncertainty(probs),
            epistemic_uncertainty(probs),
            mutual_information(probs),
        )
