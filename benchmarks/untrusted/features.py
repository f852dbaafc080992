"""What logistic regression sees of an image: its pixels, or fixed features of which a linear model makes more."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from federation import Examples
from images import read
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, conv2d, pad

FEATURES = {"pixels": "pixels from 0 to 1", "oriented_gradients": "3,920 oriented gradients"}
"""Name → title."""
SIDE, PLACES = 28, 7
DIRECTIONS = 8


def examples(directory: Path, features: str) -> tuple[Examples, Examples]:
    """Training and test examples.

    Args:
        directory: holds the four files of a data set.
        features: one of FEATURES. Oriented gradients are centred by the training images and scaled to the pixels' mean
            squared length there, so that a learning rate means the same.
    """
    (train, train_labels), (test, test_labels) = (read(directory, part) for part in ("train", "t10k"))
    if features == "oriented_gradients":
        length = train.square().sum(1).mean()
        train, test = oriented_gradients(train), oriented_gradients(test)
        centre = train.mean(0)
        train, test = train.sub_(centre), test.sub_(centre)
        scale = (length / train.square().sum(1).mean()).sqrt()
        train, test = train.mul_(scale), test.mul_(scale)
    return (train, train_labels), (test, test_labels)


def oriented_gradients(images: Tensor) -> Tensor:
    """How much the brightness changes in each direction at each of 7 × 7 places, and how much that changes in turn.

    Nothing is learnt: the first derivatives are those of Dalal and Triggs (2005), at two scales; taking them again is
    the idea of scattering networks (Bruna and Mallat 2013). Tramèr and Boneh (2021) train linear models on such
    features for the same reason: they are better than what little data and noise allow to learn.

    Args:
        images: shape (n, 784).

    Returns: shape (n, 3920).
    """
    return torch.cat([_gradients_of_some(some) for some in images.split(1000)])


def _gradients_of_some(images: Tensor) -> Tensor:
    pixels = images.view(-1, 1, SIDE, SIDE)
    fine, coarse = derivatives(pixels), derivatives(avg_pool2d(pixels, 2))
    again = derivatives(avg_pool2d(fine, 2).sqrt())
    return torch.cat([adaptive_avg_pool2d(maps, PLACES).sqrt().flatten(1) for maps in (fine, coarse, again)], 1)


def derivatives(maps: Tensor) -> Tensor:
    """Central differences in eight directions around the circle, and 0 where they are negative.

    Shape (n, maps, height, width) → (n, 8 · maps, height, width).
    """
    angles = torch.arange(DIRECTIONS) * 2 * math.pi / DIRECTIONS
    across = torch.tensor([[0.0, 0.0, 0.0], [-0.5, 0.0, 0.5], [0.0, 0.0, 0.0]])
    kernels = angles.cos().view(-1, 1, 1) * across + angles.sin().view(-1, 1, 1) * across.T
    flat = pad(maps.flatten(0, 1).unsqueeze(1), (1, 1, 1, 1))
    return conv2d(flat, kernels.unsqueeze(1)).relu().unflatten(0, maps.shape[:2]).flatten(1, 2)
