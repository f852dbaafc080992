"""Entropy of the predictive distribution, and how much of it is disagreement between posterior samples."""

from __future__ import annotations

import math

from torch import Tensor
from torch.special import entr

from lightning_fedbayes.metrics.functional.checks import check_samples


def predictive_entropy(probs: Tensor, normalize: bool = True) -> Tensor:
    r"""Entropy of the mean predictive, :math:`\tilde H = -\sum_c \bar p_c \log \bar p_c / \log C`.

    The total uncertainty: 0 when one class is certain, 1 (normalised) when all are equally likely.

    Args:
        probs: class probabilities of each posterior sample, shape (samples, batch, classes).
        normalize: divide by log C; without, the entropy is in nats.

    Returns: shape (batch,).

    Source: Federated Bayesian deep learning (2024) eq. (8).

    >>> import torch
    >>> predictive_entropy(torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]))
    tensor([1., 0.])
    """
    entropy = entr(check_samples(probs).mean(0)).sum(-1)
    return entropy / math.log(probs.shape[-1]) if normalize else entropy


def mutual_information(probs: Tensor) -> Tensor:
    r"""Information the label carries about the parameters, :math:`H(\bar p) - \frac1M \sum_m H(p_m) \ge 0`, in nats.

    The epistemic part of the predictive entropy (BALD): 0 when all posterior samples agree.

    Args:
        probs: class probabilities of each posterior sample, shape (samples, batch, classes).

    Returns: shape (batch,).

    Source: Houlsby et al. (2011); Depeweg et al. (2018).

    >>> import torch
    >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))  # log 2
    tensor([0.6931])
    """
    probs = check_samples(probs)
    return (entr(probs.mean(0)).sum(-1) - entr(probs).sum(-1).mean(0)).clamp_min(0)
