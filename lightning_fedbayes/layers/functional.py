r"""Pure functions of the layers: the standard deviation behind ρ, three estimators of a random output, and tallies.

Noise is an argument. An ``op`` is linear in its weight, ``op(x, weight, bias) -> output``: ``F.linear``, a (transposed)
convolution. A ``TorchFunctionMode`` can override :func:`softplus_std` and :func:`with_tallies`.

A tally is a zero with the gradient :math:`\sum_i g_i^2`, the sum of squared gradients of single examples: a layer that
is linear in its weight W has :math:`\partial L / \partial W = \sum_i g_i`, for ``F.linear``
:math:`g_i = \delta_i x_i^\top` with the gradient :math:`\delta_i` of the loss by the layer's i-th output.
Source: Dangel et al. 2020 (BackPACK).
"""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function, has_torch_function_unary

from lightning_fedbayes.core.posterior import at_least_float32

Estimator = Literal["reparameterization", "local_reparameterization", "flipout"]
"""Method by which a layer turns Gaussian weights into a random output whose gradient is unbiased."""

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)

Op = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# where importing torch leaves the upper halves of vector registers dirty, log1p, expm1 and softplus take ten times as
# long, until a function that cleans them has run in the thread, such as this one (seen with torch 2.14, AMD EPYC)
torch.zeros(()).lgamma()


class Normal(NamedTuple):
    """Independent Gaussians: ``mean`` and ``std`` of equal shape. ``std=None`` is a deterministic tensor."""

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

    :math:`\sigma_0` is :func:`smallest_std`, so that σ² is positive as well.

    >>> softplus_std(torch.tensor([-1e4, 0.0, 1e4])) > 0
    tensor([True, True, True])
    """
    if has_torch_function_unary(rho):
        return handle_torch_function(softplus_std, (rho,), rho)
    # added, not a maximum, whose gradient would take two more passes
    return F.softplus(rho, threshold=40.0).add_(smallest_std(rho.dtype))


def inverse_softplus_std(std: Tensor) -> Tensor:
    r"""The inverse of :func:`softplus_std`, :math:`\rho = s + \log(1 - e^{-s})` with :math:`s = \sigma - \sigma_0`.

    A σ below :func:`smallest_std`, or 0, becomes the smallest, to three digits.

    >>> softplus_std(inverse_softplus_std(torch.tensor([1e-9, 0.5, 50.0])))
    tensor([1.0000e-09, 5.0000e-01, 5.0000e+01])
    """
    floor = smallest_std(std.dtype)
    softplus = (std - floor).clamp_min(floor / 1024)
    return softplus + torch.log(-torch.expm1(-softplus))


def output_moments(op: Op, x: Tensor, weight: Normal, bias: Normal | None) -> tuple[Tensor, Tensor]:
    r"""Mean and standard deviation of every output entry under Gaussian weights. Local reparameterisation samples it.

    .. math:: E[y] = \mathrm{op}(x, \mu), \qquad \mathrm{Var}[y] = \mathrm{op}(x^2, \sigma^2)

    Kingma et al. 2015, equation (6). Under float16 autocast the variance is computed in float32.
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
    r"""Noise of one call of Flipout: :math:`\sigma \odot \epsilon` of weight and bias (None if it is deterministic or
    missing), and signs s and r, ±1 per example and channel, of size 1 along space and time."""

    weight: Tensor
    bias: Tensor | None
    input_signs: Tensor
    output_signs: Tensor


def flipout(op: Op, x: Tensor, weight: Tensor, bias: Tensor | None, noise: FlipoutNoise) -> Tensor:
    r"""Output at weight perturbations that are uncorrelated between examples, at the price of two calls of ``op``.

    .. math:: y = \mathrm{op}(x, \mu) + \mathrm{op}(x \odot s, \sigma \odot \epsilon) \odot r

    with the deterministic layer ``op``, its input x, (batch, \*), and the means of weight and bias. One perturbation is
    shared by the batch. An example sees it with random signs. A bias is the weight of a constant input. Source: Wen et
    al. 2018, equation (4).
    """
    delta = op(x * noise.input_signs, noise.weight, noise.bias)
    return torch.addcmul(op(x, weight, bias), delta, noise.output_signs.to(delta.dtype))


GroupedConvolution = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
"""``convolve(x, kernel, bias, groups)``."""

BLOCK = 8
"""Channels that a grouped convolution processes at a time. With fewer per group, part of the work is on padding."""
LARGEST = 1.5
"""Largest kernel, relative to its output map, at which a kernel per example is never slower in measurements."""
ONEDNN = torch.backends.mkldnn.is_available()
"""True if torch has oneDNN, which is fast for many groups; torch's convolution takes them one by one."""


def one_convolution_is_cheaper(x: Tensor, kernel: Tensor, stride: tuple[int, ...]) -> bool:
    """Return whether a kernel per example costs less than a second convolution: a rule fitted to measurements."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or not ONEDNN or x.dim() != kernel.dim() or not len(x):
        return False
    positions = math.prod(x.shape[2:]) // math.prod(stride)
    return kernel.shape[1] >= BLOCK and math.prod(kernel.shape[1:]) <= LARGEST * positions


def flipout_by_example(
    convolve: GroupedConvolution, x: Tensor, kernel: Tensor, bias: Tensor | None, noise: FlipoutNoise, groups: int
) -> Tensor:
    r"""Compute :func:`flipout` of a convolution, up to rounding, by one grouped convolution: a kernel per example.

    .. math:: x_n * \mu + r_n \odot ((x_n \odot s_n) * \Delta) = x_n * (\mu + r_n s_n^T \odot \Delta),
              \qquad \Delta = \sigma \odot \epsilon

    Signs, of shapes (batch, in_channels, 1, …) and (batch, out_channels, 1, …), are constant along space, so they can
    change the kernel as well as the maps. Source: Wen et al. 2018, equation (4), rearranged.
    """
    batch, ones = len(x), (1,) * (x.dim() - 2)
    r, s = noise.output_signs.view(batch, groups, -1, 1), noise.input_signs.view(batch, groups, 1, -1)
    signs = (r * s).view(batch, *kernel.shape[:2], *ones)
    kernels = torch.addcmul(kernel, noise.weight, signs).flatten(0, 1)
    output = convolve(x.reshape(1, -1, *x.shape[2:]), kernels, biases(bias, noise), batch * groups)
    return output.view(batch, -1, *output.shape[2:])


def biases(bias: Tensor | None, noise: FlipoutNoise) -> Tensor | None:
    """Concatenate the biases of all examples: (batch · out_channels,)."""
    if bias is None:
        return None
    signs = noise.output_signs.flatten(1)
    return (bias.expand_as(signs) if noise.bias is None else torch.addcmul(bias, noise.bias, signs)).flatten()


def with_tallies(output: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, op: Op, dims: int) -> Tensor:
    """Return ``output``. Its backward pass gives the tallies ``weight`` and ``bias``, zeros, their gradients.

    ``op`` is the deterministic layer, with ``dims`` dimensions of space, inputs x, (examples, \\*), and outputs
    (examples, \\*, channels, \\*space), or of one example without the first dimension. A tally of None is not taken.
    """
    tensors = tuple(each for each in (output, x, weight, bias) if each is not None)
    if has_torch_function(tensors):
        return handle_torch_function(with_tallies, tensors, output, x, weight, bias, op, dims)
    if dims == 0 and x.dim() == output.dim() == 2:
        with suppress(RuntimeError):  # of a transform of torch.func
            return RowTally.apply(output, x, weight, bias)  # pyright: ignore[reportReturnType]
    return _SquareTally.apply(output, x, weight, bias, op, dims)  # pyright: ignore[reportReturnType]


class RowTally(torch.autograd.Function):
    r""":func:`with_tallies` of a linear layer, :math:`\sum_i g_i^2 = (\delta^2)^\top x^2`; (\*, examples, features).

    Outside of ``torch.func``, whose form of functions takes 100 µs to bind arguments by name.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return ``output``. Arguments as for :func:`with_tallies`."""
        ctx.has_weight, ctx.has_bias = weight is not None, bias is not None
        ctx.save_for_backward(x)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """Return the gradient of the output as it is, and the sums of squares."""
        (gradient,), (x,) = gradients, ctx.saved_tensors
        squares = at_least_float32(gradient).square()
        of_weight = squares.mT @ at_least_float32(x).square() if ctx.has_weight else None
        return gradient, None, of_weight, squares.sum(-2) if ctx.has_bias else None


class _SquareTally(torch.autograd.Function):
    """:func:`with_tallies` of any layer that is linear in its weight. One gradient of the weight for every example."""

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, op: Op, dims: int) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, x, weight, bias, ctx.op, ctx.dims = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight), dims = gradients, ctx.saved_tensors, ctx.dims
        each = at_least_float32(gradient)
        if gradient.dim() == 1 + dims:
            x, each = x.unsqueeze(0), each.unsqueeze(0)
        of_weight = None if weight is None else weight_squares(ctx.op, x.to(weight), each.to(weight), weight)
        of_bias = None
        if ctx.has_bias:
            others = [dim for dim in range(1, each.dim()) if dim != each.dim() - 1 - dims]
            of_bias = (each.sum(others) if others else each).square().sum(0)
        return gradient, None, of_weight, of_bias, None, None


def weight_squares(op: Op, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over examples of squared gradients by the weight. x and the output's gradient: (examples, \\*).

    >>> x, gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [-1.0]])
    >>> weight_squares(torch.nn.functional.linear, x, gradient, torch.zeros(1, 2))
    tensor([[10., 20.]])
    """

    def of_one(row: Tensor, slope: Tensor) -> Tensor:
        backward = torch.func.vjp(lambda parameter: op(row.unsqueeze(0), parameter, None), weight)[1]
        return backward(slope.unsqueeze(0))[0]

    return torch.func.vmap(of_one)(x, gradient).square().sum(0)
