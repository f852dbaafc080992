"""Networks of the published figures: LeNet and ResNet-20."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedbayes.core.errors import FedBayesError, check_at_least
from lightning_fedbayes.modules import mlp


def lenet(channels: int = 1, classes: int = 10, size: int = 28) -> nn.Sequential:
    """The five-layer LeNet of [BA-BFL] §4: two 5×5 convolutions (6 and 16), then 120, 84 and ``classes`` units.

    Each convolution is followed by a ReLU and 2×2 max pooling. ``size`` is height and width of the images.

    Raises FedBayesError: the images are smaller than 16×16.
    """
    for name, value in (("channels", channels), ("classes", classes), ("size", size)):
        check_at_least(name, value, 1, error=FedBayesError)
    side = ((size - 4) // 2 - 4) // 2
    if side < 1:
        raise FedBayesError(f"size={size}: images must be at least 16×16 for two convolutions")
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *mlp(16 * side * side, classes, hidden=(120, 84)),
    )


class ResidualBlock(nn.Module):
    r"""Two 3×3 convolutions and a shortcut without parameters, :math:`y = \mathrm{ReLU}(f(x) + s(x))`.

    The shortcut s is option A of He et al. 2016 §4.2: every ``stride``-th pixel, and zeros for the missing channels,
    half of them before and half after the channels of ``x``.

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
        """Return the block's output."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        """``x`` in the shape of the output."""
        half = self.missing // 2
        return F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.missing - half))


def resnet20(channels: int = 3, classes: int = 10) -> nn.Sequential:
    r"""ResNet-20 for small images: three stages of three residual blocks with 16, 32 and 64 channels.

    A 3×3 convolution comes first, mean pooling and one linear layer last. The second and third stage halve height and
    width. With three channels and ten classes it has 269,722 parameters: shortcuts have none (option A), and
    convolutions have no bias, since BatchNorm follows. He initialisation, :math:`w \sim N(0, 2/\mathrm{fan\_in})`.

    When to use it: images of about 32×32 pixels, [FBDL]'s network for CIFAR-10, there deterministic, with dropout by
    ``with_mc_dropout``, or fully variational by ``bayesianize(resnet20(), types=[nn.Conv2d, nn.Linear], ...)``.

    Shapes: (batch, channels, height, width), any size → (batch, classes).
    Source: He et al. 2016, *Deep Residual Learning for Image Recognition*, §4.2 with n = 3; He et al. 2015, eq. (10).

    >>> sum(parameter.numel() for parameter in resnet20().parameters())
    269722
    """
    check_at_least("channels", channels, 1, error=FedBayesError)
    check_at_least("classes", classes, 1, error=FedBayesError)
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
