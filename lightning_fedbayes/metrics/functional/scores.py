"""Scores of a predictive distribution over classes or real targets; of a Gaussian or of samples."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError, check_number
from lightning_fedbayes.metrics.functional.utilities import (
    at_least_float32,
    check_gaussian,
    check_numbers,
    check_predictive,
    check_same_shape,
    class_indices,
)


def negative_log_likelihood(probs: Tensor, target: Tensor) -> Tensor:
    r"""Negative log-likelihood of each example, :math:`-\log \bar p_y`, in nats.

    A probability below the smallest normal number of its dtype (1.2e-38 in float32) counts as that number: an
    observed class of probability 0 costs 87 nats (708 in float64), not infinity.

    Args:
        probs: mean predictive, shape (batch, classes).
        target: class of each example, integers, shape (batch,).

    Returns: shape (batch,); its mean is the score.

    >>> negative_log_likelihood(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor([ 0.6931, 87.3365])
    """
    probs = check_predictive(probs, target)
    chosen = probs.gather(1, class_indices(probs, target)).squeeze(1)
    return -chosen.clamp_min(torch.finfo(probs.dtype).tiny).log()


def brier_score(probs: Tensor, target: Tensor) -> Tensor:
    r"""Brier score of each example, :math:`\sum_c (\bar p_c - [c = y])^2`, from 0 (best) to 2.

    Unlike the log-likelihood it is bounded, so a few confident errors do not dominate it. (For two classes it is twice
    the score that some define on the probability of one class.)

    Args:
        probs: mean predictive, shape (batch, classes).
        target: class of each example, integers, shape (batch,).

    Returns: shape (batch,); its mean is the score.

    Source: Brier (1950).

    >>> brier_score(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor([0.5000, 2.0000])
    """
    probs = check_predictive(probs, target)
    truth = class_indices(probs, target)
    return probs.scatter_add(1, truth, -torch.ones_like(truth, dtype=probs.dtype)).square().sum(1)


def gaussian_nll(mean: Tensor, variance: Tensor, target: Tensor) -> Tensor:
    r"""Negative log-likelihood, :math:`\tfrac12 \log 2\pi\sigma^2 + (y - \mu)^2 / 2\sigma^2`, in nats.

    A target that was divided by s scores log s less than in its original units. A variance below the smallest normal
    number of its dtype counts as that number.

    Args:
        mean, variance: predictive mean μ and variance σ² (noise included), any shape.
        target: y, of the same shape.

    Returns: the same shape; its mean is the score.

    Raises:
        FedBayesError: shapes that differ, or a negative variance.

    >>> gaussian_nll(torch.zeros(1), torch.ones(1), torch.zeros(1))
    tensor([0.9189])
    """
    check_gaussian(mean, variance, target)
    variance = at_least_float32(variance)
    variance = variance.clamp_min(torch.finfo(variance.dtype).tiny)
    return 0.5 * ((2 * math.pi * variance).log() + (target - mean) ** 2 / variance)


def gaussian_crps(mean: Tensor, variance: Tensor, target: Tensor) -> Tensor:
    r"""Continuous ranked probability score, :math:`\int (\Phi(\tfrac{x-\mu}{\sigma}) - [x \ge y])^2 dx`, closed form.

    .. math:: \sigma \left( z (2\Phi(z) - 1) + 2\varphi(z) - 1/\sqrt\pi \right), \quad z = (y - \mu) / \sigma

    In the units of the target; |y − μ| for a point forecast (σ = 0). It punishes outliers less than the likelihood.

    Args:
        mean, variance: predictive mean μ and variance σ² (noise included), any shape.
        target: y, of the same shape.

    Returns: the same shape; its mean is the score.

    Source: Gneiting and Raftery (2007) eq. (21), of opposite sign.

    >>> gaussian_crps(torch.zeros(2), torch.tensor([1.0, 0.0]), torch.tensor([0.0, -3.0]))
    tensor([0.2337, 3.0000])
    """
    check_gaussian(mean, variance, target)
    error, deviation = at_least_float32(target - mean), at_least_float32(variance).sqrt()
    z = error / deviation.clamp_min(torch.finfo(deviation.dtype).tiny)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return error * torch.erf(z / math.sqrt(2)) + deviation * (2 * density - 1 / math.sqrt(math.pi))


def interval_coverage(mean: Tensor, variance: Tensor, target: Tensor, level: float = 0.95) -> Tensor:
    r"""Return 1 where the target is in the central interval of probability ``level``, :math:`|y - \mu| \le z\,\sigma`.

    Compare the share of ones with ``level``: a smaller share means overconfident.

    Args:
        mean, variance: predictive mean μ and variance σ² (noise included), any shape.
        target: y, of the same shape.
        level: probability of the interval, strictly between 0 and 1.

    Returns: 1. inside and 0. outside, the same shape.

    >>> interval_coverage(torch.zeros(2), torch.ones(2), torch.tensor([1.9, 2.0]))
    tensor([1., 0.])
    """
    check_number("level", level, "(0, 1)", error=FedBayesError, why="it is the probability of an interval")
    check_gaussian(mean, variance, target)
    variance = at_least_float32(variance)
    half_width = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).item() * variance.sqrt()
    return ((target - mean).abs() <= half_width).to(variance.dtype)


def ensemble_crps(samples: Tensor, target: Tensor) -> Tensor:
    r"""Fair CRPS of M samples, :math:`\frac1M\sum_i|x_i-y| - \frac1{2M(M-1)}\sum_{ij}|x_i-x_j|`.

    Its expectation is the CRPS of the distribution that the samples come from, for any M; with 1/2M² instead, a
    forecast scores worse the fewer samples it has. It can be negative for single examples. The double sum is computed
    from the sorted samples, in O(M log M).

    Args:
        samples: draws from the predictive distribution of y (noise included), shape (samples, *), at least 2 samples.
        target: y, shape (*).

    Returns: shape (*); its mean is the score, in the units of the target.

    Source: Ferro (2014); Zamo and Naveau (2018) eq. (PWM).

    >>> ensemble_crps(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))
    tensor([0.])
    """
    check_numbers(samples=samples, target=target)
    if torch.bool in (samples.dtype, target.dtype):
        raise FedBayesError("samples or target are of torch.bool: give numbers")
    if samples.ndim == 0 or len(samples) < 2:
        raise FedBayesError(
            f"samples has shape {tuple(samples.shape)}, but the fair CRPS needs at least 2 samples along the first "
            "dimension; draw more samples, or use the absolute error"
        )
    check_same_shape(samples_but_first=samples[0], target=target)
    number = len(samples)
    error = at_least_float32(samples - target).sort(0).values
    rank = torch.arange(1, number + 1, dtype=error.dtype, device=error.device)
    spread = torch.tensordot(2 * rank - number - 1, error, dims=1) / (number * (number - 1))
    return error.abs().mean(0) - spread


def determinant_sharpness(covariance: Tensor) -> Tensor:
    r"""Determinant sharpness :math:`\det(\Sigma)^{1/2d}`: the geometric mean of the predictive standard deviations.

    It measures how concentrated predictions are, right or wrong: compare it only among calibrated ones. For one target
    (d = 1) it is the standard deviation; pass ``variance[..., None, None]``.

    Args:
        covariance: predictive covariance Σ of d targets, shape (*, d, d), positive semidefinite.

    Returns: shape (*), in the units of the targets; its mean is the score.

    Raises:
        FedBayesError: not square matrices, or a negative determinant.

    Source: [FedAG] eq. (8).

    >>> determinant_sharpness(torch.tensor([[4.0, 0.0], [0.0, 9.0]]))  # √(2 · 3)
    tensor(2.4495)
    """
    check_numbers(covariance=covariance)
    if covariance.ndim < 2 or covariance.shape[-1] != covariance.shape[-2]:
        raise FedBayesError(
            f"covariance has shape {tuple(covariance.shape)}, but (*, d, d) is needed; "
            "for variances of independent targets pass variance.diag_embed()"
        )
    sign, logarithm = torch.linalg.slogdet(at_least_float32(covariance))
    if (sign < 0).any():
        raise FedBayesError(
            f"{int((sign < 0).sum())} of {sign.numel()} covariances have a negative determinant; a covariance is "
            "positive semidefinite"
        )
    return (logarithm / (2 * covariance.shape[-1])).exp()
