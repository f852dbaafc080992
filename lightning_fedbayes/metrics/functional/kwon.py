"""Predictive variance of the one-hot label, split into aleatoric and epistemic parts (Kwon et al. 2020)."""

from __future__ import annotations

from torch import Tensor

from lightning_fedbayes.metrics.functional.checks import check_samples


def aleatoric_uncertainty(probs: Tensor) -> Tensor:
    r"""Noise in the label itself: the trace of :func:`aleatoric_covariance`, :math:`1 - \frac1M \sum_{mc} p_{mc}^2`.

    From 0 (every sample certain) to 1 − 1/C.

    Args:
        probs: class probabilities of each posterior sample, shape (samples, batch, classes).

    Returns: shape (batch,).

    Source: Federated Bayesian deep learning (2024) eq. (9), reported as the trace.

    >>> import torch
    >>> aleatoric_uncertainty(torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]))
    tensor([0.5000, 0.0000])
    """
    probs = check_samples(probs)
    return (probs * (1 - probs)).sum(-1).mean(0)


def epistemic_uncertainty(probs: Tensor) -> Tensor:
    r"""Disagreement of samples: the trace of :func:`epistemic_covariance`, :math:`\frac1M \sum_m |p_m - \bar p|^2`.

    0 when all posterior samples agree (and always for a single one), at most 1 − 1/C.

    Args:
        probs: class probabilities of each posterior sample, shape (samples, batch, classes).

    Returns: shape (batch,).

    Source: Federated Bayesian deep learning (2024) eq. (9), reported as the trace.

    >>> import torch
    >>> epistemic_uncertainty(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([0.5000])
    """
    probs = check_samples(probs)
    return (probs - probs.mean(0)).square().sum(-1).mean(0)


def aleatoric_covariance(probs: Tensor) -> Tensor:
    r"""Aleatoric matrix :math:`\frac1M \sum_m \mathrm{diag}(p_m) - p_m p_m^\top`.

    Together with :func:`epistemic_covariance` it is the covariance of the one-hot label,
    :math:`\mathrm{diag}(\bar p) - \bar p \bar p^\top`. Use the trace for a single number.

    Args:
        probs: class probabilities of each posterior sample, shape (samples, batch, classes).

    Returns: shape (batch, classes, classes).

    Source: Federated Bayesian deep learning (2024) eq. (9).
    """
    probs = check_samples(probs)
    return probs.mean(0).diag_embed() - _mean_outer_product(probs)


def epistemic_covariance(probs: Tensor) -> Tensor:
    r"""Epistemic matrix :math:`\frac1M \sum_m (p_m - \bar p)(p_m - \bar p)^\top`.

    Args:
        probs: class probabilities of each posterior sample, shape (samples, batch, classes).

    Returns: shape (batch, classes, classes).

    Source: Federated Bayesian deep learning (2024) eq. (9).
    """
    probs = check_samples(probs)
    return _mean_outer_product(probs - probs.mean(0))


def _mean_outer_product(vectors: Tensor) -> Tensor:
    by_example = vectors.transpose(0, 1)
    return by_example.mT @ by_example / len(vectors)
