"""The fully connected network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(features: int, outputs: int, hidden: Sequence[int] = (50,)) -> nn.Sequential:
    """Fully connected network with ReLUs.

    Args:
        features: number of inputs.
        outputs: number of outputs (classes or targets).
        hidden: width of each hidden layer.

    >>> [layer.out_features for layer in mlp(64, 10) if isinstance(layer, nn.Linear)]
    [50, 10]
    """
    widths = [features, *hidden]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))
