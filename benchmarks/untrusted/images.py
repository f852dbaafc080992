"""MNIST and FashionMNIST from their four files: pixels, or fixed features that suit a linear model better."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, conv2d, pad

from benchmarks.untrusted.federation import Examples

DATASETS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
"""Folder → title."""


def read(directory: Path, part: str) -> Examples:
    """Read images as vectors of 784 pixels from 0 to 1, and their labels.

    Args:
        directory: holds the gzipped IDX files, such as ``train-images-idx3-ubyte.gz``.
        part: "train" or "t10k".
    """
    images = bytearray(gzip.decompress((directory / f"{part}-images-idx3-ubyte.gz").read_bytes()))
    labels = bytearray(gzip.decompress((directory / f"{part}-labels-idx1-ubyte.gz").read_bytes()))
    pixels = torch.frombuffer(images, dtype=torch.uint8, offset=16).view(-1, 784)
    return pixels / 255, torch.frombuffer(labels, dtype=torch.uint8, offset=8).long()


def deal(examples: Examples, parties: int, size: int, seed: int) -> list[Examples]:
    """Return disjoint random parts of ``size`` examples, one per party."""
    inputs, targets = examples
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    return [(inputs[part], targets[part]) for part in order[: parties * size].view(parties, size)]


FEATURES = {"pixels": "pixels from 0 to 1", "oriented_gradients": "3,920 oriented gradients"}
"""Name → title."""
SIDE, PLACES = 28, 7
DIRECTIONS = 8


def examples(directory: Path, features: str) -> tuple[Examples, Examples]:
    """Return training and test examples.

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
    """Return the change of brightness in eight directions at 7 × 7 places, and the change of that change.

    Nothing is learnt: the first derivatives are those of Dalal and Triggs (2005), at two scales; the second ones follow
    the idea of scattering networks (Bruna and Mallat 2013). Tramèr and Boneh (2021) train linear models on such
    features because with little data and noise they are better than learnt ones.

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
    """Return central differences in eight directions around the circle, and 0 where they are negative.

    Shape (n, maps, height, width) → (n, 8 · maps, height, width).
    """
    angles = torch.arange(DIRECTIONS) * 2 * math.pi / DIRECTIONS
    across = torch.tensor([[0.0, 0.0, 0.0], [-0.5, 0.0, 0.5], [0.0, 0.0, 0.0]])
    kernels = angles.cos().view(-1, 1, 1) * across + angles.sin().view(-1, 1, 1) * across.T
    flat = pad(maps.flatten(0, 1).unsqueeze(1), (1, 1, 1, 1))
    return conv2d(flat, kernels.unsqueeze(1)).relu().unflatten(0, maps.shape[:2]).flatten(1, 2)
