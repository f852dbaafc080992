"""Bayesian convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fedbayes.core.errors import ConversionError, check_at_least, check_choice, shown
from lightning_fedbayes.layers.base import BayesianAffine, check_template
from lightning_fedbayes.layers.functional import (
    Estimator,
    FlipoutNoise,
    Normal,
    Op,
    flipout_by_example,
    one_convolution_is_cheaper,
)
from lightning_fedbayes.layers.priors import Prior

Size = int | tuple[int, ...]

CONVOLVE: dict[type[nn.Module], Any] = {
    nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d,
    nn.ConvTranspose1d: F.conv_transpose1d, nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}


ORDER = "pass all arguments after kernel_size by keyword: their order in bayesian-torch differs from layer to layer"


def check_sizes(name: str, size: Any, dims: int, least: int) -> None:
    """Raise ConversionError unless ``size`` is a whole number, at least ``least``, or a tuple of one per dimension."""
    if isinstance(size, tuple) and len(size) != dims:
        raise ConversionError(f"{name}={shown(size)}: give a whole number, or {dims} of them; {ORDER}")
    for each in size if isinstance(size, tuple) else (size,):
        check_at_least(name, each, least, 2**31 - 1, error=ConversionError, why=ORDER)


def check_groups(in_channels: int, out_channels: int, groups: int) -> None:
    """Raise ConversionError unless the groups divide the channels."""
    for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
        if channels % groups:
            raise ConversionError(f"{name}={channels} is no multiple of groups={groups}; {ORDER}")


def check_geometry(
    dims: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any, padding_mode: Any, *, transposed: bool
) -> None:
    """Raise ConversionError unless these are the arguments of a convolution in ``dims`` dimensions."""
    for name, size in (("kernel_size", kernel_size), ("stride", stride), ("dilation", dilation)):
        check_sizes(name, size, dims, 1)
    if isinstance(padding, str) and not transposed:
        check_choice("padding", padding, ("same", "valid"), error=ConversionError)
        if padding == "same" and stride not in (1, (1,) * dims):
            raise ConversionError(f"padding='same' needs stride=1, not {stride}")
    else:
        check_sizes("padding", padding, dims, 0)
    modes = ("zeros",) if transposed else ("zeros", "reflect", "replicate", "circular")
    check_choice("padding_mode", padding_mode, modes, error=ConversionError)


class BayesianConv(BayesianAffine):
    """Base of convolutions and transposed convolutions: the geometry of the deterministic layer that they replace.

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
        self.groups: int = template.groups
        self.padding_mode: str = template.padding_mode

    def template(self, bias: bool) -> nn.Module:
        """The deterministic convolution of this geometry."""
        names = ("stride", "padding", "dilation", "groups", "padding_mode", "output_padding")
        geometry = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return self.deterministic(
            self.in_channels, self.out_channels, self.kernel_size, bias=bias, device="meta", **geometry)

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
    """Base of ``Conv1d*``, ``Conv2d*`` and ``Conv3d*``; use those.

    ``*Reparameterization`` samples one kernel per call. ``*LocalReparameterization`` samples its outputs: every entry
    has the distribution that a sampled kernel gives, but independently of the other positions. Under one kernel sample
    the positions are correlated, so the spread of a pooled map is too small. ``*Flipout`` gives each example and
    channel a random sign: all positions of one example see one kernel, and examples are uncorrelated.

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
        check_template(bias, device, dtype, in_channels=in_channels, out_channels=out_channels, groups=groups)
        check_geometry(self.dims, kernel_size, stride, padding, dilation, padding_mode, transposed=False)
        check_groups(in_channels, out_channels, groups)
        template = self.deterministic(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device,
            dtype)
        super().__init__(
            template, prior_mean=prior_mean, prior_variance=prior_variance, prior_std=prior_std, prior=prior,
            posterior_mu_init=posterior_mu_init, posterior_rho_init=posterior_rho_init, bayesian_bias=bayesian_bias)
        self._margins = margins(self.padding, self.kernel_size, self.dilation)

    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``F.conv*d``, after padding by ``padding_mode``."""
        return self.grouped_op(x, weight, bias, self.groups)

    def grouped_op(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """:meth:`op` with any number of groups."""
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._margins, mode=self.padding_mode), 0
        convolve = CONVOLVE[self.deterministic]
        return convolve(x, weight, bias, self.stride, padding, self.dilation, groups)

    def flipout(self, op: Op, x: Tensor, weight: Normal, bias: Normal | None, noise: FlipoutNoise) -> Tensor:
        """Output of Flipout, by the cheaper of two ways to compute it."""
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


class TransposedConvolution(BayesianConv):
    """Base of ``ConvTranspose1d*``, ``ConvTranspose2d*`` and ``ConvTranspose3d*``; use those.

    The estimators differ as those of :class:`Convolution` do.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, dilation, groups: as in
            ``nn.ConvTranspose2d``; pass them by keyword, because their order differs between bayesian-torch's classes.
        prior_mean, prior_variance, posterior_mu_init, posterior_rho_init, bias, prior_std, prior, bayesian_bias:
            as in :class:`~lightning_fedbayes.layers.LinearReparameterization`.
        padding_mode: only "zeros", as in ``nn.ConvTranspose2d``.
        device, dtype: as in ``nn.ConvTranspose2d``.

    Shapes: as for the deterministic layer, with or without a batch dimension.

    Raises:
        ConversionError: more than one prior is described, or a prior without positive spread.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        output_padding: Size = 0,
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
        check_template(bias, device, dtype, in_channels=in_channels, out_channels=out_channels, groups=groups)
        check_geometry(self.dims, kernel_size, stride, padding, dilation, padding_mode, transposed=True)
        check_groups(in_channels, out_channels, groups)
        check_sizes("output_padding", output_padding, self.dims, 0)
        template: Any = self.deterministic(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation,
            padding_mode, device, dtype)
        super().__init__(
            template, prior_mean=prior_mean, prior_variance=prior_variance, prior_std=prior_std, prior=prior,
            posterior_mu_init=posterior_mu_init, posterior_rho_init=posterior_rho_init, bayesian_bias=bayesian_bias)
        self.output_padding: tuple[int, ...] = template.output_padding

    def op(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: Sequence[int] | None = None
    ) -> Tensor:
        """Compute ``F.conv_transpose*d``."""
        output_padding = self.output_padding
        if output_size is not None:
            smallest = [(size - 1) * stride - 2 * int(padding) + dilation * (kernel - 1) + 1
                        for size, stride, padding, dilation, kernel in zip(
                            x.shape[-self.dims:], self.stride, self.padding, self.dilation, self.kernel_size)]
            output_padding = tuple(size - least for size, least in zip(output_size[-self.dims:], smallest))
        convolve = CONVOLVE[self.deterministic]
        return convolve(x, weight, bias, self.stride, self.padding, output_padding, self.groups, self.dilation)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # nn.ConvTranspose2d has output_size second
        self, x: Tensor, output_size: Sequence[int] | None = None, return_kl: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The output at sampled weights, or at the posterior mean where the layer is mean-only.

        Args:
            x: input, shaped as for the deterministic layer.
            output_size: spatial size of the output, as in ``nn.ConvTranspose2d``; None uses ``output_padding``.
            return_kl: also return :meth:`kl_loss`.
        """
        output = self._output(partial(self.op, output_size=output_size), x)
        return (output, self.kl_loss()) if return_kl else output


class Conv1dReparameterization(Convolution):
    """1-d convolution at one kernel sample per call; see :class:`Convolution`."""

    deterministic = nn.Conv1d
    dims = 1


class Conv1dLocalReparameterization(Conv1dReparameterization):
    """1-d convolution that samples its outputs; see :class:`Convolution`."""

    default_estimator: ClassVar[Estimator] = "local_reparameterization"


class Conv1dFlipout(Conv1dReparameterization):
    """1-d convolution with Flipout, one sign per example and channel; see :class:`Convolution`."""

    default_estimator: ClassVar[Estimator] = "flipout"


class Conv2dReparameterization(Convolution):
    """2-d convolution at one kernel sample per call; see :class:`Convolution`."""

    deterministic = nn.Conv2d
    dims = 2


class Conv2dLocalReparameterization(Conv2dReparameterization):
    """2-d convolution that samples its outputs; see :class:`Convolution`."""

    default_estimator: ClassVar[Estimator] = "local_reparameterization"


class Conv2dFlipout(Conv2dReparameterization):
    """2-d convolution with Flipout, one sign per example and channel; see :class:`Convolution`."""

    default_estimator: ClassVar[Estimator] = "flipout"


class Conv3dReparameterization(Convolution):
    """3-d convolution at one kernel sample per call; see :class:`Convolution`."""

    deterministic = nn.Conv3d
    dims = 3


class Conv3dLocalReparameterization(Conv3dReparameterization):
    """3-d convolution that samples its outputs; see :class:`Convolution`."""

    default_estimator: ClassVar[Estimator] = "local_reparameterization"


class Conv3dFlipout(Conv3dReparameterization):
    """3-d convolution with Flipout, one sign per example and channel; see :class:`Convolution`."""

    default_estimator: ClassVar[Estimator] = "flipout"


class ConvTranspose1dReparameterization(TransposedConvolution):
    """1-d transposed convolution at one kernel sample per call; see :class:`TransposedConvolution`."""

    deterministic = nn.ConvTranspose1d
    dims = 1


class ConvTranspose1dLocalReparameterization(ConvTranspose1dReparameterization):
    """1-d transposed convolution that samples its outputs; see :class:`TransposedConvolution`."""

    default_estimator: ClassVar[Estimator] = "local_reparameterization"


class ConvTranspose1dFlipout(ConvTranspose1dReparameterization):
    """1-d transposed convolution with Flipout, one sign per example and channel; see :class:`TransposedConvolution`."""

    default_estimator: ClassVar[Estimator] = "flipout"


class ConvTranspose2dReparameterization(TransposedConvolution):
    """2-d transposed convolution at one kernel sample per call; see :class:`TransposedConvolution`."""

    deterministic = nn.ConvTranspose2d
    dims = 2


class ConvTranspose2dLocalReparameterization(ConvTranspose2dReparameterization):
    """2-d transposed convolution that samples its outputs; see :class:`TransposedConvolution`."""

    default_estimator: ClassVar[Estimator] = "local_reparameterization"


class ConvTranspose2dFlipout(ConvTranspose2dReparameterization):
    """2-d transposed convolution with Flipout, one sign per example and channel; see :class:`TransposedConvolution`."""

    default_estimator: ClassVar[Estimator] = "flipout"


class ConvTranspose3dReparameterization(TransposedConvolution):
    """3-d transposed convolution at one kernel sample per call; see :class:`TransposedConvolution`."""

    deterministic = nn.ConvTranspose3d
    dims = 3


class ConvTranspose3dLocalReparameterization(ConvTranspose3dReparameterization):
    """3-d transposed convolution that samples its outputs; see :class:`TransposedConvolution`."""

    default_estimator: ClassVar[Estimator] = "local_reparameterization"


class ConvTranspose3dFlipout(ConvTranspose3dReparameterization):
    """3-d transposed convolution with Flipout, one sign per example and channel; see :class:`TransposedConvolution`."""

    default_estimator: ClassVar[Estimator] = "flipout"
