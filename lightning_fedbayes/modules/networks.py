"""Ready networks, deterministic: make them Bayesian with :func:`~lightning_fedbayes.bayesianize`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from lightning_fedbayes.errors import FedBayesError


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


def lenet(channels: int = 1, classes: int = 10, size: int = 28) -> nn.Sequential:
    """The five-layer LeNet of [BA-BFL] §4: two 5×5 convolutions (6 and 16), then 120, 84 and ``classes`` units.

    Each convolution is followed by a ReLU and 2×2 max pooling.

    Args:
        channels: of the images.
        classes: number of classes.
        size: height and width of the images, at least 16.

    Raises:
        FedBayesError: the images are too small.
    """
    side = ((size - 4) // 2 - 4) // 2
    if side < 1:
        raise FedBayesError(f"size={size}: nothing is left of images smaller than 16×16 after two convolutions")
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side * side, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )
