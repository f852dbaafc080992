"""Scores of a Gaussian prediction of a real target."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_fedbayes.errors import FedBayesError
from lightning_fedbayes.metrics.functional.checks import at_least_float32, check_gaussian


def gaussian_nll(mean: Tensor, variance: Tensor, target: Tensor) -> Tensor:
    r"""Negative log-likelihood, :math:`\tfrac12 \log 2\pi\sigma^2 + (y - \mu)^2 / 2\sigma^2`, in nats.

    In the units of the target: a target standardised by s scores log s less than in original units. A variance
    below the smallest normal number of its dtype counts as that number.

    Args:
        mean, variance: predictive mean μ and variance σ² (noise included), any shape.
        target: y, of the same shape.

    Returns: the same shape; its mean is the score.

    Raises:
        FedBayesError: shapes that differ, or a negative variance; so for the functions below.

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

    In the units of the target, and |y − μ| for a point forecast (σ = 0): less harsh on outliers than the likelihood.

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
    r"""Whether the target lies in the central interval of probability ``level``, :math:`|y - \mu| \le z\,\sigma`.

    The share of ones is to be compared with ``level``: less means overconfident.

    Args:
        mean, variance: predictive mean μ and variance σ² (noise included), any shape.
        target: y, of the same shape.
        level: probability of the interval, strictly between 0 and 1.

    Returns: 0. or 1., the same shape.

    >>> interval_coverage(torch.zeros(2), torch.ones(2), torch.tensor([1.9, 2.0]))
    tensor([1., 0.])
    """
    if not 0 < level < 1:
        raise FedBayesError(f"level is {level}; the probability of an interval lies strictly between 0 and 1")
    check_gaussian(mean, variance, target)
    variance = at_least_float32(variance)
    half_width = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).item() * variance.sqrt()
    return ((target - mean).abs() <= half_width).to(variance.dtype)
