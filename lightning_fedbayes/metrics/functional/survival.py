"""Times to an event, some of them censored: the order of predicted risks, and the Cox loss."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.metrics.functional.utilities import at_least_float32, check_not_nan, check_vectors

PAIRS = 2**24
"""Most pairs of examples that are compared at once."""


def concordance_index(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    r"""Harrell's c: share of comparable pairs in which the example with the earlier event has the higher risk.

    .. math:: c = \frac{\sum_{(i, j) \in P} [r_i > r_j] + \tfrac12 [r_i = r_j]}{|P|}, \qquad
              P = \{(i, j): e_i = 1,\ t_i < t_j \text{ or } (t_i = t_j,\ e_j = 0)\}

    A pair is comparable if it is known which event came first. An example that is censored at the time of another one's
    event outlived it; two events at the same time are not comparable. Equal risks count half, as in lifelines and
    scikit-survival (which also takes risks within 1e-8 for equal). 1 is a perfect order, 0.5 is chance. Use it for the
    discrimination of a survival model; it does not measure calibration, and it depends on how many examples are
    censored. Time grows with events times examples, memory does not.

    Args:
        risk: predicted risk, higher for an earlier event, any unit, such as the log risk of a Cox model; for
            predicted times give minus them. Shape (batch,).
        time: observed time to the event or to censoring, any unit, at least 0, shape (batch,).
        event: 1 (or True) where the event was observed, 0 where the example was censored, shape (batch,).

    Returns: a scalar in [0, 1]; NaN if no pair is comparable.

    Raises:
        FedBayesError: shapes differ, no examples, ``risk`` holds NaN, ``time`` is not finite or negative, or ``event``
            is not 0 or 1.

    Source: Harrell et al. (1982).

    >>> concordance_index(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 1, 0]))
    tensor(0.6667)
    """
    happened = check_survival(time, event, risk=risk)
    check_not_nan(risk=risk)
    halves = pairs = happened.new_zeros((), dtype=torch.int64)
    for index in happened.nonzero().split(max(1, PAIRS // len(time))):
        outlived = (time[index] < time) | ((time[index] == time) & ~happened)
        pairs = pairs + outlived.sum()
        halves = halves + 2 * (outlived & (risk[index] > risk)).sum() + (outlived & (risk[index] == risk)).sum()
    return halves / (2 * pairs)


def cox_loss(log_risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    r"""Negative log partial likelihood of the Cox model per event, in nats.

    .. math:: -\frac{1}{\sum_i e_i} \sum_{i: e_i = 1} \Bigl( h_i - \log \sum_{j: t_j \ge t_i} e^{h_j} \Bigr)

    for the hazard :math:`\lambda_0(t) e^{h_i}` with any baseline :math:`\lambda_0`. The risk set of an event is all
    examples of the batch that are observed at least until then, with equal times included (Breslow's method for ties).
    A constant added to all log risks does not change it. Use it to train on censored times to an event; give batches as
    large as memory allows, because risk sets lie within a batch. Times the share of events it is the loss of FLamby's
    Fed-TCGA-BRCA, which is a mean over all examples and, among equal times, depends on their order.

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
    return cox_terms(log_risk, time, happened)[0].sum() / happened.sum().clamp_min(1)


def cox_terms(log_risk: Tensor, time: Tensor, event: Tensor) -> tuple[Tensor, Tensor]:
    """Return each example's term of :func:`cox_loss`, last time first, and the examples' order; ``vmap`` can map it."""
    order = time.argsort(descending=True)
    log_risk, time, event = at_least_float32(log_risk)[order], time[order], event[order]
    last_of_equal_time = torch.searchsorted(-time, -time, right=True) - 1
    log_risk_set = log_risk.logcumsumexp(0)[last_of_equal_time]
    return torch.where(event != 0, log_risk_set - log_risk, 0), order


def check_survival(time: Tensor, event: Tensor, **predicted: Tensor) -> Tensor:
    """Return ``event`` as bool; raise FedBayesError unless it is 0 or 1 and ``time`` finite and at least 0."""
    check_vectors(**predicted, time=time, event=event)
    if not len(time):
        raise FedBayesError("time and event have no entries, but at least one example is needed; skip an empty batch")
    wrong = ~(time.isfinite() & (time >= 0))
    if bool(wrong.any()):
        raise FedBayesError(
            f"time holds {time[wrong][0].item():.6g} among {int(wrong.sum())} of {len(time)} entries that are not "
            "finite or negative; drop those examples, or censor them at the last time known, which is at least 0"
        )
    wrong = (event != 0) & (event != 1)
    if bool(wrong.any()):
        raise FedBayesError(
            f"event holds {event[wrong][0].item():.6g} among {int(wrong.sum())} of {len(event)} entries that are "
            "neither 0 nor 1; give 1 where the event was observed and 0 where it was censored (swapped with time?)"
        )
    return event != 0
