"""Proper scores of the mean predictive of a classifier."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedbayes.metrics.functional.checks import check_predictive


def negative_log_likelihood(probs: Tensor, target: Tensor) -> Tensor:
    r"""Negative log-likelihood of each example, :math:`-\log \bar p_y`, in nats.

    A probability below the smallest normal number of its dtype (1.2e-38 in float32) counts as that number, so a
    class that was ruled out costs 87 nats (708 in float64) and not infinity.

    Args:
        probs: mean predictive, shape (batch, classes).
        target: class of each example, integers, shape (batch,).

    Returns: shape (batch,); its mean is the score.

    >>> negative_log_likelihood(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor([ 0.6931, 87.3365])
    """
    probs = check_predictive(probs, target)
    chosen = probs.gather(1, target.long().unsqueeze(1)).squeeze(1)
    return -chosen.clamp_min(torch.finfo(probs.dtype).tiny).log()


def brier_score(probs: Tensor, target: Tensor) -> Tensor:
    r"""Brier score of each example, :math:`\sum_c (\bar p_c - [c = y])^2`, from 0 (best) to 2.

    Unlike the log-likelihood it is bounded, so that a few confident errors do not dominate it. (For two classes this
    is twice the score that some define on the probability of one class.)

    Args:
        probs: mean predictive, shape (batch, classes).
        target: class of each example, integers, shape (batch,).

    Returns: shape (batch,); its mean is the score.

    Source: Brier (1950).

    >>> brier_score(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor([0.5000, 2.0000])
    """
    probs = check_predictive(probs, target)
    truth = target.long().unsqueeze(1)
    return probs.scatter_add(1, truth, -torch.ones_like(truth, dtype=probs.dtype)).square().sum(1)
