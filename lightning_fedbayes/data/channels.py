"""Standardising the channels of images that are stored as bytes."""

from __future__ import annotations

import torch
from torch import Tensor

WHITE = 255
"""The largest value of a pixel."""


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population standard deviation of every channel over all pixels, in units of white.

    They come from counts of the 256 values in double precision, without a floating-point copy of the images.

    Args:
        images: uint8, shape (examples, channels, height, width).

    Returns: mean and standard deviation, float64, shape (channels,), in [0, 1].

    >>> channel_statistics(torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2))
    (tensor([0.5000], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
    """
    counts = torch.stack([channel.flatten().bincount(minlength=WHITE + 1) for channel in images.unbind(1)]).double()
    shares, values = counts / counts.sum(1, keepdim=True), torch.linspace(0, 1, WHITE + 1, dtype=torch.float64)
    mean = shares @ values
    return mean, (shares * (values - mean.unsqueeze(1)).square()).sum(1).sqrt()


def standardise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    r"""Images with :math:`z = (x / 255 - m) / s` for the mean m and standard deviation s of each channel, float32.

    Args:
        images: uint8, shape (examples, channels, height, width).
        mean: m, shape (channels,), in units of white.
        std: s > 0, the same.
    """
    shift, scale = ((each.float().view(-1, 1, 1)) for each in (mean / std, WHITE * std))
    return images.float().div_(scale).sub_(shift)
