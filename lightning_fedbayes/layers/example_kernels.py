r"""Flipout's convolution in one pass: a kernel for every example in place of two convolutions.

Signs are constant along space, so they can change the kernel as well as the maps:

.. math:: x_n * \mu + r_n \odot ((x_n \odot s_n) * \Delta) = x_n * (\mu + r_n s_n^T \odot \Delta)

with :math:`\Delta = \sigma \odot \epsilon`. The kernels of all examples are one grouped convolution, which costs the
arithmetic of the deterministic layer; what Flipout adds is the making of the kernels.
Source: Wen et al. 2018, equation (4), rearranged.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_fedbayes.layers.functional import FlipoutNoise, Normal, perturbation

GroupedConvolution = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
"""``convolve(x, kernel, bias, groups)``."""

BLOCK = 8
"""Channels that a grouped convolution works on at a time: of fewer per group, part of the work would be on padding."""

LARGEST = 1.5
"""Memory of the kernels of all examples, in outputs, up to which they were never dearer than a second convolution."""

ONEDNN = torch.backends.mkldnn.is_available()
"""Whether torch has a fast convolution of many groups; its own takes the groups one by one."""


def one_convolution_is_cheaper(x: Tensor, kernel: Tensor, stride: tuple[int, ...]) -> bool:
    """Whether a kernel per example costs less than a second convolution, by the rule that measurements gave.

    True on a CPU, in float32, for kernels that are not much larger than the maps. GPUs and other number types have no
    fast convolution of many groups.

    Args:
        x: input (batch, in_channels, \\*space); one without a batch dimension has nothing to gain.
        kernel: (out_channels, in_channels / groups, \\*size).
        stride: of the convolution.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32 or not ONEDNN or x.dim() != kernel.dim() or not len(x):
        return False
    positions = math.prod(x.shape[2:]) // math.prod(stride)
    return kernel.shape[1] >= BLOCK and math.prod(kernel.shape[1:]) <= LARGEST * positions


def flipout_by_example(
    convolve: GroupedConvolution, x: Tensor, kernel: Normal, bias: Normal | None, noise: FlipoutNoise, groups: int
) -> Tensor:
    """What :func:`~lightning_fedbayes.layers.functional.flipout` returns for a convolution, up to rounding.

    Args:
        convolve: the convolution, which must treat every channel's map alike.
        x: input (batch, in_channels, \\*space).
        kernel, bias: μ and σ, shapes (out_channels, in_channels / groups, \\*size) and (out_channels,).
        noise: what is drawn; its signs have shapes (batch, in_channels, 1, …) and (batch, out_channels, 1, …).
        groups: of the layer.

    Returns: (batch, out_channels, \\*space).
    """
    batch, ones = len(x), (1,) * (x.dim() - 2)
    r, s = noise.output_signs.view(batch, groups, -1, 1), noise.input_signs.view(batch, groups, 1, -1)
    signs = (r * s).view(batch, *kernel.mean.shape[:2], *ones)
    kernels = torch.addcmul(kernel.mean, perturbation(kernel, noise.weight), signs).flatten(0, 1)
    output = convolve(x.reshape(1, -1, *x.shape[2:]), kernels, biases(bias, noise), batch * groups)
    return output.view(batch, -1, *output.shape[2:])


def biases(bias: Normal | None, noise: FlipoutNoise) -> Tensor | None:
    """The bias of every example in turn: (batch · out_channels,)."""
    if bias is None:
        return None
    signs = noise.output_signs.flatten(1)
    if noise.bias is None:
        return bias.mean.expand_as(signs).flatten()
    return torch.addcmul(bias.mean, perturbation(bias, noise.bias), signs).flatten()
