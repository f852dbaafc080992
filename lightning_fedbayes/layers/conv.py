"""Bayesian convolutions in one, two and three dimensions."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fedbayes.errors import ConversionError
from lightning_fedbayes.layers.base import BayesianAffine
from lightning_fedbayes.layers.example_kernels import flipout_by_example, one_convolution_is_cheaper
from lightning_fedbayes.layers.functional import Estimator, FlipoutNoise, Normal, Op
from lightning_fedbayes.layers.priors import Prior

Size = int | tuple[int, ...]

CONVOLVE: dict[type[nn.Module], Any] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}


class BayesianConv(BayesianAffine):
    """What convolutions and transposed convolutions share: the geometry of the deterministic layer they stand for.

    Args:
        template: the deterministic convolution.
        arguments: as in :class:`~lightning_fedbayes.layers.base.BayesianAffine`.
    """

    deterministic: ClassVar[type[nn.Module]]
    dims: ClassVar[int]

    def __init__(self, template: Any, **arguments: Any) -> None:
        super().__init__(template, "kernel", **arguments)
        self.in_channels: int = template.in_channels
        self.out_channels: int = template.out_channels
        self.kernel_size: tuple[int, ...] = template.kernel_size
        self.stride: tuple[int, ...] = template.stride
        self.padding: str | tuple[int, ...] = template.padding
        self.dilation: tuple[int, ...] = template.dilation
        if any(step < 1 for step in self.dilation):
            raise ConversionError(
                f"dilation={self.dilation} must be at least 1; pass everything behind kernel_size by keyword, the "
                "order of bayesian-torch's arguments differs from layer to layer"
            )
        self.groups: int = template.groups
        self.padding_mode: str = template.padding_mode

    def sign_shapes(self, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Signs per example and channel, the same at every position."""
        batch, ones = x.shape[: -self.dims - 1], (1,) * self.dims
        return (*batch, self.in_channels, *ones), (*batch, self.out_channels, *ones)

    def extra_repr(self) -> str:
        """The geometry, then the estimator and the prior."""
        shown = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        shown += [f"padding={self.padding!r}"] if self.padding not in ((0,) * self.dims, "valid") else []
        shown += [f"dilation={self.dilation}"] if self.dilation != (1,) * self.dims else []
        shown += [f"groups={self.groups}"] if self.groups != 1 else []
        shown += ["bias=False"] if self.bias is None and self.mu_bias is None else []
        shown += [f"padding_mode={self.padding_mode!r}"] if self.padding_mode != "zeros" else []
        return ", ".join([*shown, super().extra_repr()])


class Convolution(BayesianConv):
    r"""Base of ``Conv1d*``, ``Conv2d*`` and ``Conv3d*``; use those.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode: as in ``nn.Conv2d``.
        prior_mean, prior_variance, posterior_mu_init, posterior_rho_init, bias, prior_std, prior, bayesian_bias:
            as in :class:`~lightning_fedbayes.layers.LinearReparameterization`.
        device, dtype: as in ``nn.Conv2d``.

    Shapes: as for the deterministic convolution, with or without a batch dimension.

    Raises:
        ConversionError: more than one prior is described, or a prior without positive spread.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: str | Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        prior_mean: float = 0.0,
        prior_variance: float | None = None,
        posterior_mu_init: float = 0.0,
        posterior_rho_init: float | None = None,
        bias: bool = True,
        *,
        padding_mode: str = "zeros",
        prior_std: float | None = None,
        prior: Prior | None = None,
        bayesian_bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        template = self.deterministic(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode,
            device, dtype)
        super().__init__(
            template, prior_mean=prior_mean, prior_variance=prior_variance, prior_std=prior_std, prior=prior,
            posterior_mu_init=posterior_mu_init, posterior_rho_init=posterior_rho_init, bayesian_bias=bayesian_bias)
        self._margins = margins(self.padding, self.kernel_size, self.dilation)

    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``F.conv*d``, after padding by ``padding_mode``."""
        return self.grouped_op(x, weight, bias, self.groups)

    def grouped_op(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """:meth:`op` with any number of groups."""
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._margins, mode=self.padding_mode), 0
        convolve = CONVOLVE[self.deterministic]
        return convolve(x, weight, bias, self.stride, padding, self.dilation, groups)

    def flipout(self, op: Op, x: Tensor, weight: Normal, bias: Normal | None, noise: FlipoutNoise) -> Tensor:
        """Output at given noise, by the cheaper of two ways to compute it."""
        if one_convolution_is_cheaper(x, weight.mean, self.stride):
            return flipout_by_example(self.grouped_op, x, weight, bias, noise, self.groups)
        return super().flipout(op, x, weight, bias, noise)


def margins(padding: str | tuple[int, ...], kernel_size: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    """Padding in the order of ``F.pad``: last dimension first, before and after.

    >>> margins((1, 2), (3, 3), (1, 1)), margins("same", (4,), (1,))
    ([2, 2, 1, 1], [1, 2])
    """
    if padding == "valid":
        sides = [(0, 0) for _ in kernel_size]
    elif isinstance(padding, str):  # "same"
        totals = [spread * (kernel - 1) for kernel, spread in zip(kernel_size, dilation)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(size, size) for size in padding]
    return [size for side in reversed(sides) for size in side]


class Conv1dReparameterization(Convolution):
    """1-d convolution at one kernel sample per call; arguments as in :class:`Convolution`."""

    deterministic = nn.Conv1d
    dims = 1


class Conv1dLocalReparameterization(Conv1dReparameterization):
    """1-d convolution that samples its outputs; arguments as in :class:`Convolution`.

    Every output entry has the distribution that a sampled kernel gives, but independently of the other positions:
    under one kernel sample the positions are correlated. So the spread of a pooled map is too small.
    """

    default_estimator: ClassVar[Estimator] = "local_reparameterization"


class Conv1dFlipout(Conv1dReparameterization):
    """1-d convolution with Flipout, one sign per example and channel; see :class:`Convolution`.

    All positions of one example see one kernel; examples are uncorrelated.
    """

    default_estimator: ClassVar[Estimator] = "flipout"


class Conv2dReparameterization(Convolution):
    """2-d convolution at one kernel sample per call; arguments as in :class:`Convolution`."""

    deterministic = nn.Conv2d
    dims = 2


class Conv2dLocalReparameterization(Conv2dReparameterization):
    """2-d convolution that samples its outputs; arguments as in :class:`Convolution`.

    Every output entry has the distribution that a sampled kernel gives, but independently of the other positions:
    under one kernel sample the positions are correlated. So the spread of a pooled map is too small.
    """

    default_estimator: ClassVar[Estimator] = "local_reparameterization"


class Conv2dFlipout(Conv2dReparameterization):
    """2-d convolution with Flipout, one sign per example and channel; see :class:`Convolution`.

    All positions of one example see one kernel; examples are uncorrelated.
    """

    default_estimator: ClassVar[Estimator] = "flipout"


class Conv3dReparameterization(Convolution):
    """3-d convolution at one kernel sample per call; arguments as in :class:`Convolution`."""

    deterministic = nn.Conv3d
    dims = 3


class Conv3dLocalReparameterization(Conv3dReparameterization):
    """3-d convolution that samples its outputs; arguments as in :class:`Convolution`.

    Every output entry has the distribution that a sampled kernel gives, but independently of the other positions:
    under one kernel sample the positions are correlated. So the spread of a pooled map is too small.
    """

    default_estimator: ClassVar[Estimator] = "local_reparameterization"


class Conv3dFlipout(Conv3dReparameterization):
    """3-d convolution with Flipout, one sign per example and channel; see :class:`Convolution`.

    All positions of one example see one kernel; examples are uncorrelated.
    """

    default_estimator: ClassVar[Estimator] = "flipout"
