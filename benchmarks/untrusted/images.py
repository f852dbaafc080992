"""MNIST and FashionMNIST from their four files."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from federation import Examples

DATASETS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
"""Folder → title."""


def read(directory: Path, part: str) -> Examples:
    """Images as vectors of 784 pixels from 0 to 1, and their labels.

    Args:
        directory: holds the gzipped IDX files, such as ``train-images-idx3-ubyte.gz``.
        part: "train" or "t10k".
    """
    images = bytearray(gzip.decompress((directory / f"{part}-images-idx3-ubyte.gz").read_bytes()))
    labels = bytearray(gzip.decompress((directory / f"{part}-labels-idx1-ubyte.gz").read_bytes()))
    pixels = torch.frombuffer(images, dtype=torch.uint8, offset=16).view(-1, 784)
    return pixels / 255, torch.frombuffer(labels, dtype=torch.uint8, offset=8).long()


def deal(examples: Examples, parties: int, size: int, seed: int) -> list[Examples]:
    """Disjoint random parts of ``size`` examples, one per party."""
    inputs, targets = examples
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    return [(inputs[part], targets[part]) for part in order[: parties * size].view(parties, size)]
