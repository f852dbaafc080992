"""Samples that hold the classes in their shares."""

from __future__ import annotations

import torch
from torch import Tensor


def stratified_order(labels: Tensor, draws: torch.Generator) -> Tensor:
    """A random order of all examples in which every beginning holds the classes in their shares, to about one example.

    The examples of a class, in random order, are spread evenly over the whole order from a random start. So the first
    n are a stratified sample of n, and samples of several sizes lie within each other.

    Args:
        labels: int64, not negative, shape (examples,).
        draws: the only source of randomness.

    Returns: int64, shape (examples,).
    """
    shuffled = torch.randperm(len(labels), generator=draws)
    grouped = shuffled[labels[shuffled].argsort(stable=True)]
    sizes = labels.bincount()
    number = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    start = torch.rand(len(sizes), dtype=torch.float64, generator=draws).repeat_interleave(sizes)
    return grouped[((number + start) / sizes.repeat_interleave(sizes)).argsort(stable=True)]
