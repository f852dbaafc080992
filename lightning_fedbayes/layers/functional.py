r"""The pure core of the layers: standard deviations, the KL divergence and the three estimators.

:func:`softplus_std` and :func:`joined_kl_sum` can be overridden by a ``TorchFunctionMode``, as torch's functions can.
Nothing here draws random numbers: noise is an argument. An ``op`` is any map that is linear in its weight,
``op(x, weight, bias) -> output``: ``F.linear``, a convolution or a transposed convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function, has_torch_function_unary

from lightning_fedbayes.layers.autograd import GaussianKL, standardised

Estimator = Literal["reparameterization", "local_reparameterization", "flipout"]
"""How a layer turns Gaussian weights into a random output whose gradient is unbiased."""

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)

SMALL = 2**14
"""A tensor of fewer entries costs what the calls on it cost, a larger one what the passes over it cost. So small sites
are joined for their KL and leave its gradient to autograd; large ones have it in closed form."""

Op = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Normal(NamedTuple):
    """Independent Gaussians: ``mean`` and ``std`` of equal shape; ``std=None`` is a deterministic tensor."""

    mean: Tensor
    std: Tensor | None


def smallest_std(dtype: torch.dtype) -> float:
    """Lower bound of the standard deviations of layers: its square is the smallest normal number of ``dtype``.

    >>> smallest_std(torch.float32) == 2.0**-63
    True
    """
    return math.sqrt(torch.finfo(dtype).tiny)


def softplus_std(rho: Tensor) -> Tensor:
    r"""Standard deviation :math:`\sigma = \log(1 + e^\rho) + \sigma_0`, never infinite and never 0.

    :math:`\sigma_0` is :func:`smallest_std`, so that σ² is positive as well; above 1e-11 float32 does not see it. The
    linear branch above 40 is exact to rounding in float64 too.

    >>> softplus_std(torch.tensor([-1e4, 0.0, 1e4])) > 0
    tensor([True, True, True])
    """
    if has_torch_function_unary(rho):
        return handle_torch_function(softplus_std, (rho,), rho)
    # a bound by addition has the gradient of softplus itself; that of a maximum would take two more passes
    return F.softplus(rho, threshold=40.0).add_(smallest_std(rho.dtype))


def inverse_softplus_std(std: Tensor) -> Tensor:
    r"""The inverse of :func:`softplus_std`, :math:`\rho = s + \log(1 - e^{-s})` with :math:`s = \sigma - \sigma_0`.

    A σ below :func:`smallest_std` (0 too) becomes that smallest one, to three digits.

    >>> softplus_std(inverse_softplus_std(torch.tensor([1e-9, 0.5, 50.0])))
    tensor([1.0000e-09, 5.0000e-01, 5.0000e+01])
    """
    floor = smallest_std(std.dtype)
    softplus = (std - floor).clamp_min(floor / 1024)
    return softplus + torch.log(-torch.expm1(-softplus))


def gaussian_kl_sum(mean: Tensor, std: Tensor, prior_mean: Tensor | float, prior_std: Tensor | float) -> Tensor:
    r"""KL divergence of independent Gaussians from their prior, **summed** over the entries, in nats.

    .. math:: \mathrm{KL}(q\|p) = \sum_i \log\frac{s_i}{\sigma_i}
              + \frac{\sigma_i^2 + (\mu_i - m_i)^2}{2 s_i^2} - \frac12

    The gradient of a large site is that of :class:`~lightning_fedbayes.layers.autograd.GaussianKL`: half the passes
    over memory of autograd's own. That of a small site is autograd's: under ``vmap`` it takes half the time.

    Args:
        mean, std: :math:`\mu, \sigma` of q, of one shape. Half precision is computed in float32.
        prior_mean, prior_std: m and s of p, numbers or tensors that broadcast to that shape.

    Returns: scalar.
    """
    if mean.dtype in (torch.float16, torch.bfloat16):
        mean, std = mean.float(), std.float()
    if mean.numel() < SMALL:
        shift, ratio = standardised(mean, std, prior_mean, prior_std)
        # 1 is subtracted per entry: after the sum it would cancel away a small divergence of many entries
        spread = (ratio * ratio).sub_(1).sub_(ratio.log(), alpha=2)
        return (spread + shift * shift).sum() / 2
    prior = [value.expand(mean.shape).flatten() if isinstance(value, Tensor) else value
             for value in (prior_mean, prior_std)]
    return cast("Tensor", GaussianKL.apply(mean.flatten(), std.flatten(), *prior))


def joined_kl_sum(means: Sequence[Tensor], rhos: Sequence[Tensor], prior_mean: float, prior_std: float) -> Tensor:
    """:func:`gaussian_kl_sum` over several parameters (μ, ρ) with one prior. Returns a scalar."""
    if has_torch_function((*means, *rhos)):
        return handle_torch_function(joined_kl_sum, (*means, *rhos), means, rhos, prior_mean, prior_std)
    mean, rho = (torch.cat([each.flatten() for each in part]) for part in (means, rhos))
    return gaussian_kl_sum(mean, softplus_std(rho), prior_mean, prior_std)


def output_moments(op: Op, x: Tensor, weight: Normal, bias: Normal | None) -> tuple[Tensor, Tensor]:
    r"""Mean and standard deviation of every output entry under Gaussian weights; local reparameterisation samples it.

    .. math:: E[y] = \mathrm{op}(x, \mu), \qquad \mathrm{Var}[y] = \mathrm{op}(x^2, \sigma^2)

    Kingma et al. 2015, equation (6). The gradient stays finite where the variance is 0. Under float16 autocast the
    variance is computed in float32, because float16 rounds a variance below 6e-8 to 0.
    """
    mean = op(x, weight.mean, None if bias is None else bias.mean)
    bias_variance = None if bias is None or bias.std is None else bias.std.square()
    assert weight.std is not None
    device = x.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
        with torch.autocast(device, enabled=False):
            variance = op(x.float().square(), weight.std.float().square(), bias_variance)
    else:
        variance = op(x * x, weight.std * weight.std, bias_variance)
    return mean, (variance + torch.finfo(variance.dtype).tiny).sqrt().to(mean.dtype)


class FlipoutNoise(NamedTuple):
    """What Flipout draws.

    Args:
        weight, bias: standard normal, of the shapes of weight and bias; None for a deterministic or missing bias.
        input_signs, output_signs: s and r, each ±1 per example and channel, of size 1 along space and time.
    """

    weight: Tensor
    bias: Tensor | None
    input_signs: Tensor
    output_signs: Tensor


def perturbation(parameter: Normal, noise: Tensor) -> Tensor:
    r""":math:`\sigma \odot \epsilon`."""
    assert parameter.std is not None
    return parameter.std * noise


def flipout(op: Op, x: Tensor, weight: Normal, bias: Normal | None, noise: FlipoutNoise) -> Tensor:
    r"""Output at weight perturbations that are uncorrelated between examples, at the price of two calls of ``op``.

    .. math:: y = \mathrm{op}(x, \mu) + \mathrm{op}(x \odot s, \sigma \odot \epsilon) \odot r

    Wen et al. 2018, equation (4). One perturbation is shared by the batch; an example sees it with random signs.
    A bias is the weight of a constant input.

    Args:
        op: the deterministic layer.
        x: input (batch, \*), as ``op`` takes it.
        weight, bias: μ and σ, of the shapes of the deterministic layer's; None for no bias.
        noise: ε and the signs.

    Returns: what ``op`` returns, (batch, \*).
    """
    mean = op(x, weight.mean, None if bias is None else bias.mean)
    bias_delta = None if bias is None or noise.bias is None else perturbation(bias, noise.bias)
    delta = op(x * noise.input_signs, perturbation(weight, noise.weight), bias_delta)
    return torch.addcmul(mean, delta, noise.output_signs.to(delta.dtype))
