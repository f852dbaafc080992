"""Bayesian transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_fedbayes.layers.conv import CONVOLVE, BayesianConv, Size
from lightning_fedbayes.layers.functional import Estimator
from lightning_fedbayes.layers.priors import Prior


class TransposedConvolution(BayesianConv):
    r"""Base of ``ConvTranspose1d*``, ``ConvTranspose2d*`` and ``ConvTranspose3d*``; use those.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, dilation, groups: as in
            ``nn.ConvTranspose2d``; pass them by keyword, for bayesian-torch's classes differ in their order.
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
        """``F.conv_transpose*d``."""
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


class ConvTranspose1dReparameterization(TransposedConvolution):
    """1-d transposed convolution at one kernel sample per call; arguments as in :class:`TransposedConvolution`."""

    deterministic = nn.ConvTranspose1d
    dims = 1


class ConvTranspose1dLocalReparameterization(ConvTranspose1dReparameterization):
    """1-d transposed convolution that samples its outputs; arguments as in :class:`TransposedConvolution`.

    Every output entry has the distribution that a sampled kernel gives, but independently of the other positions:
    under one kernel sample the positions are correlated. So the spread of a pooled map is too small.
    """

    default_estimator: ClassVar[Estimator] = "local_reparameterization"


class ConvTranspose1dFlipout(ConvTranspose1dReparameterization):
    """1-d transposed convolution with Flipout, one sign per example and channel; see :class:`TransposedConvolution`.

    All positions of one example see one kernel; examples are uncorrelated.
    """

    default_estimator: ClassVar[Estimator] = "flipout"


class ConvTranspose2dReparameterization(TransposedConvolution):
    """2-d transposed convolution at one kernel sample per call; arguments as in :class:`TransposedConvolution`."""

    deterministic = nn.ConvTranspose2d
    dims = 2


class ConvTranspose2dLocalReparameterization(ConvTranspose2dReparameterization):
    """2-d transposed convolution that samples its outputs; arguments as in :class:`TransposedConvolution`.

    Every output entry has the distribution that a sampled kernel gives, but independently of the other positions:
    under one kernel sample the positions are correlated. So the spread of a pooled map is too small.
    """

    default_estimator: ClassVar[Estimator] = "local_reparameterization"


class ConvTranspose2dFlipout(ConvTranspose2dReparameterization):
    """2-d transposed convolution with Flipout, one sign per example and channel; see :class:`TransposedConvolution`.

    All positions of one example see one kernel; examples are uncorrelated.
    """

    default_estimator: ClassVar[Estimator] = "flipout"


class ConvTranspose3dReparameterization(TransposedConvolution):
    """3-d transposed convolution at one kernel sample per call; arguments as in :class:`TransposedConvolution`."""

    deterministic = nn.ConvTranspose3d
    dims = 3


class ConvTranspose3dLocalReparameterization(ConvTranspose3dReparameterization):
    """3-d transposed convolution that samples its outputs; arguments as in :class:`TransposedConvolution`.

    Every output entry has the distribution that a sampled kernel gives, but independently of the other positions:
    under one kernel sample the positions are correlated. So the spread of a pooled map is too small.
    """

    default_estimator: ClassVar[Estimator] = "local_reparameterization"


class ConvTranspose3dFlipout(ConvTranspose3dReparameterization):
    """3-d transposed convolution with Flipout, one sign per example and channel; see :class:`TransposedConvolution`.

    All positions of one example see one kernel; examples are uncorrelated.
    """

    default_estimator: ClassVar[Estimator] = "flipout"
