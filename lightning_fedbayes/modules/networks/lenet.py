"""The small convolutional network of [BA-BFL]."""

from __future__ import annotations

from torch import nn

from lightning_fedbayes.errors import FedBayesError


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
