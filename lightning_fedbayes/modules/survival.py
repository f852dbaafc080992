"""Survival analysis: the Cox loss, and a Cox regressor made from any network."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.core.posterior import check_tensor
from lightning_fedbayes.core.private_torch import outside_of_vmap
from lightning_fedbayes.layers import Estimator, Prior
from lightning_fedbayes.metrics.functional.survival import check_survival
from lightning_fedbayes.metrics.functional.utilities import at_least_float32
from lightning_fedbayes.metrics.survival import ConcordanceIndex, SurvivalMetric
from lightning_fedbayes.modules.bayesian_module import OPTIONS, BayesianModule, ScoredModule, Scores
from lightning_fedbayes.modules.networks import Init, hybrid
from lightning_fedbayes.modules.predictive import linear_moments


def cox_loss(log_risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    r"""Negative log partial likelihood of the Cox model per event, in nats.

    .. math:: -\frac{1}{\sum_i e_i} \sum_{i: e_i = 1} \Bigl( h_i - \log \sum_{j: t_j \ge t_i} e^{h_j} \Bigr)

    for the hazard :math:`\lambda_0(t) e^{h_i}` with any baseline :math:`\lambda_0`. The risk set of an event is all
    examples of the batch that are observed at least until then, those with the same time among them: ties are treated
    by Breslow's method. A constant added to all log risks changes nothing. Use it to train on times to an event of
    which some are censored; give batches as large as memory allows, or whole data sets, because risk sets lie within a
    batch. Times the share of events it is the loss of FLamby's Fed-TCGA-BRCA, which is a mean over all examples and,
    among equal times, depends on their order.

    Args:
        log_risk: log of the relative hazard h, shape (batch,).
        time: observed time to the event or to censoring, any unit, at least 0, shape (batch,).
        event: 1 (or True) where the event was observed, 0 where the example was censored, shape (batch,).

    Returns: a scalar, at least 0; 0 with gradients of 0 if no event was observed.

    Raises:
        FedBayesError: shapes differ, no examples, ``time`` is not finite or negative, or ``event`` is not 0 or 1.

    Source: Cox (1972); Breslow (1974); FLamby: Ogier du Terrail et al. (2022).

    >>> cox_loss(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 0, 0]))  # log 3
    tensor(1.0986)
    """
    happened = check_survival(time, event, log_risk=log_risk)
    return _summed_nll(at_least_float32(log_risk), time, happened) / happened.sum().clamp_min(1)


def _summed_nll(log_risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """Sum of the negative log partial likelihood over events, without a look at values: torch.vmap can map it."""
    order = time.argsort(descending=True)
    log_risk, time, event = log_risk[order], time[order], event[order]
    last_of_equal_time = torch.searchsorted(-time, -time, right=True) - 1
    log_risk_set = log_risk.logcumsumexp(0)[last_of_equal_time]
    return torch.where(event, log_risk_set - log_risk, 0).sum()


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


class CoxNLL(SurvivalMetric):
    """Negative log partial likelihood per example, with the risk sets of all batches together."""

    higher_is_better = False

    def score(self, *vectors: Tensor) -> Tensor:
        """Return :func:`cox_loss` times the share of events."""
        risk, time, event = vectors
        return cox_loss(risk, time, event) * event.float().mean()


class CoxRegressor(ScoredModule, BayesianModule):
    r"""Cox proportional hazards whose log risk is a network with Bayesian layers, for (inputs, target) batches.

    A target has two columns: event (1 observed, 0 censored) and time. The hazard of an example is
    :math:`\lambda_0(t) e^{h(x; \theta)}` with any baseline :math:`\lambda_0`; the likelihood is the partial likelihood
    of the batch, whose risk sets are those of the batch,

    .. math:: \mathcal L = \frac1B \sum_{i: e_i = 1} \Bigl( \log \sum_{j \in batch: t_j \ge t_i} e^{h_j} - h_i \Bigr)
              + \frac{\beta_t}{n}\, KL(q\|p), \qquad \theta \sim q.

    So it is no sum over examples: its value depends on the batch size, and with one batch per epoch it is the ELBO
    of the Cox model. In a federation the risk sets are those within each client, which makes it a Cox model that is
    stratified by client: each has its own :math:`\lambda_0`. Use it for times to an event of which some are censored.

    Validation and test log ``c_index``, Harrell's c of the mean log risk
    (:func:`~lightning_fedbayes.metrics.functional.concordance_index`), and ``nll``, the negative log partial
    likelihood of the mean log risk per example in nats, behind ``val/`` and ``test/``; both take the pairs and risk
    sets of all batches together. Their steps check times and events; training checks those of its first epoch.

    The likelihood does not fix a constant in h. The standard deviations of predictions include that of the network's
    constant: leave out the last layer's bias (``nn.Linear(features, 1, bias=False)``).

    Args:
        network: maps inputs to log risks of shape (batch,) or (batch, 1).
        bayesian_last: the last n linear or convolutional layers become Bayesian; None takes ``network`` as it is.
        estimator, prior_std, prior, init, posterior_std: see :func:`~lightning_fedbayes.bayesianize`.
        options: see :class:`BayesianModule`: samples, kl_weight, warmup_rounds, learning_rate, optimizer, predictive.

    Raises:
        ConversionError: the network has fewer layers to convert than asked for.
        FedBayesError: a target without two columns, or more than one output per example; in validation, test and the
            first epoch of training, what :func:`cox_loss` refuses.

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
        super().__init__(hybrid(network, bayesian_last, estimator, prior_std, prior, init, posterior_std), **options)
        self.save_hyperparameters({name: getattr(self, name) for name in OPTIONS})
        self.save_hyperparameters(ignore=["network", "prior", "optimizer"])
        metrics = MetricCollection({"c_index": ConcordanceIndex(), "nll": CoxNLL()}, compute_groups=False)
        self._scores = Scores(survival=metrics)

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log partial likelihood of the batch, divided by its number of examples, in nats.

        Args:
            outputs: log risks, shape (batch,) or (batch, 1).
            targets: event and time, shape (batch, 2).
        """
        event, time = event_and_time(targets)
        if not self.current_epoch:  # once, as a look at values waits for the device
            check_survival(outside_of_vmap(time).flatten(), outside_of_vmap(event).flatten())
        return _summed_nll(at_least_float32(_log_risks(outputs, 1)), time, event != 0) / len(time)

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> SurvivalPrediction:
        """Mean and standard deviation of the log risk of a batch: a tensor of inputs, or (inputs, targets)."""
        inputs = self.inputs_of(batch)
        draws = _log_risks(self.sample(inputs), 2)
        posterior = self.global_round.posterior
        if self.predictive == "closed_form" and posterior is not None:
            mean, variance = (part.flatten() for part in linear_moments(self.network, posterior, inputs))
            return SurvivalPrediction(mean, variance.sqrt(), draws)
        return SurvivalPrediction(draws.mean(0), draws.std(0, correction=0), draws)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Score a batch. Returns mean and standard deviation of the log risk, (batch,), and the targets, (batch, 2)."""
        inputs, targets = self.unpack(batch)
        prediction = self.predict_step(inputs)
        event, time = event_and_time(targets)
        self._scores.survival.update(prediction.log_risk, time, event)
        return {"log_risk": prediction.log_risk, "std": prediction.std, "target": targets}


def _log_risks(outputs: Tensor, dimensions: int) -> Tensor:
    """Return ``outputs`` with so many dimensions, without a last one of size 1; raise FedBayesError if it is larger."""
    if outputs.ndim == dimensions + 1 and outputs.shape[-1] == 1:
        return outputs.squeeze(-1)
    if outputs.ndim != dimensions:
        raise FedBayesError(
            f"the network's outputs have shape (batch, {', '.join(map(str, outputs.shape[dimensions:]))}), but one log "
            "risk per example is needed, shape (batch,) or (batch, 1); end the network with nn.Linear(features, 1)"
        )
    return outputs


def event_and_time(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns of ``targets``, shape (batch, 2).

    Raises:
        FedBayesError: another shape, or no tensor.
    """
    check_tensor("targets", targets, error=FedBayesError)
    if targets.ndim != 2 or targets.shape[1] != 2:
        raise FedBayesError(
            f"targets have shape {tuple(targets.shape)}, but two columns are needed, event (1 or 0) and time; "
            "stack them: torch.stack([event, time], 1)"
        )
    return targets[:, 0], targets[:, 1]
