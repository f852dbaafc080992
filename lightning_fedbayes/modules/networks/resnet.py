"""The residual network that He et al. made for CIFAR-10."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    r"""Two 3×3 convolutions and a way around them without parameters, :math:`y = \mathrm{ReLU}(f(x) + s(x))`.

    The shortcut s is option A of He et al. 2016 §4.2: every ``stride``-th pixel, and zeros for the channels that ``x``
    does not have, half of them before and half after its own.

    Args:
        before: channels of the input.
        after: channels of the output.
        stride: of the first convolution.

    Shapes: (batch, before, height, width) → (batch, after, ⌈height / stride⌉, ⌈width / stride⌉).
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.stride = stride
        self.missing = after - before

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        """``x`` in the shape of the output."""
        half = self.missing // 2
        return F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.missing - half))


def resnet20(channels: int = 3, classes: int = 10) -> nn.Sequential:
    r"""ResNet-20 for small images: three stages of three residual blocks with 16, 32 and 64 channels.

    A 3×3 convolution comes first, mean pooling and one linear layer last; the second and third stage halve height and
    width. 20 layers with weights, and with three channels and ten classes 269,722 parameters: shortcuts have none
    (option A). Convolutions have no bias, since BatchNorm follows each. He initialisation,
    :math:`w \sim N(0, 2/\mathrm{fan\_in})`.

    When to use it: images of about 32×32 pixels, [FBDL]'s network for CIFAR-10. Its three variants there are

    * deterministic: ``resnet20()``;
    * Monte Carlo dropout: ``with_mc_dropout(resnet20(), 0.2)``;
    * fully variational: ``bayesianize(resnet20(), types=[nn.Conv2d, nn.Linear], estimator="flipout", prior_std=10.0)``.

    The last starts from torch's default initialisation unless ``init="pretrained"``; BatchNorm makes up for the scale.

    Args:
        channels: of the images.
        classes: number of classes.

    Shapes: (batch, channels, height, width), any size → (batch, classes). In training mode a batch of one image of up
    to 4×4 pixels is refused by BatchNorm, which would have a single value per channel.

    Source: He et al. 2016, *Deep Residual Learning for Image Recognition*, §4.2 with n = 3; He et al. 2015, eq. (10).

    >>> sum(parameter.numel() for parameter in resnet20().parameters())
    269722
    """
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [ResidualBlock(a, b, stride=1 if a == b else 2) for a, b in pairwise(widths)]
    network = nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return network
