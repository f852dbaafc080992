"""Bayesian linear layers, convolutions and transposed convolutions in one, two and three dimensions."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fedbayes.core.errors import ConversionError, check_at_least, check_choice, shown
from lightning_fedbayes.layers import functional
from lightning_fedbayes.layers.base import BayesianAffine, check_template
from lightning_fedbayes.layers.functional import FlipoutNoise, Op
from lightning_fedbayes.layers.priors import Prior, choose_prior

Size = int | tuple[int, ...]

GEOMETRY = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")

CONVOLVE: dict[type[nn.Module], Any] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}

ORDER = "pass all arguments after kernel_size by keyword: their order in bayesian-torch differs from layer to layer"


class LinearReparameterization(BayesianAffine):
    r"""Linear layer with Gaussian weights, :math:`y = x W^T + b`, :math:`W = \mu + \sigma \odot \epsilon`.

    One weight sample per call, shared by the batch: a sample of the *function*. Cheapest (one product), but the
    gradient noise does not fall with the batch size. Names, arguments and checkpoints are bayesian-torch's.

    Args:
        in_features, out_features: sizes of the last dimension of input and output.
        prior_mean, prior_variance: the prior N(mean, variance), not N(mean, std). Variance 1 by default.
        posterior_mu_init: added to torch's default initialisation of the mean.
        posterior_rho_init: constant initial ρ, σ = log(1 + e^ρ). None: σ = 0.1 × the standard deviation of the
            deterministic layer's initialisation, so that outputs start at the deterministic layer's scale.
        bias: False leaves the bias out.
        prior_std: standard deviation of the prior, in place of ``prior_variance``.
        prior: any :class:`~lightning_fedbayes.layers.priors.Prior`, in place of all three.
        bayesian_bias: False makes the bias an ordinary deterministic parameter named ``bias``.
        device, dtype: as in ``nn.Linear``.

    Raises: ConversionError if more than one prior is described, or a prior without positive spread.
    Shapes: input (batch, *, in_features), output (batch, *, out_features).

    >>> layer = LinearReparameterization(3, 2)
    >>> layer(torch.ones(5, 3)).shape, layer.kl_loss().shape
    (torch.Size([5, 2]), torch.Size([]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        prior_mean: float = 0.0,
        prior_variance: float | None = None,
        posterior_mu_init: float = 0.0,
        posterior_rho_init: float | None = None,
        bias: bool = True,
        *,
        prior_std: float | None = None,
        prior: Prior | None = None,
        bayesian_bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_template(bias, device, dtype, in_features=in_features, out_features=out_features)
        template = nn.Linear(in_features, out_features, bias, device, dtype)
        prior = choose_prior(prior_mean, prior_variance, prior_std, prior)
        super().__init__(template, "weight", prior, posterior_mu_init, posterior_rho_init, bayesian_bias)
        self.in_features, self.out_features = in_features, out_features

    def template(self, bias: bool) -> nn.Module:
        """``nn.Linear`` of these sizes."""
        return nn.Linear(self.in_features, self.out_features, bias, device="meta")

    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``F.linear``."""
        return F.linear(x, weight, bias)

    def sign_shapes(self, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Signs per example (dimension 0) and feature. Dimensions between, such as time, share them."""
        lead = (x.shape[0], *(1,) * (x.dim() - 2)) if x.dim() > 1 else ()
        return (*lead, self.in_features), (*lead, self.out_features)


class LinearLocalReparameterization(LinearReparameterization, estimator="local_reparameterization"):
    r"""Linear layer that samples its outputs, :math:`y \sim N(x\mu^T, x^2 (\sigma^2)^T)` (Kingma et al. 2015).

    Independent noise for every example and output, and every time step of inputs (batch, time, features): the least
    gradient noise, at the cost of two products. Arguments as in :class:`LinearReparameterization`.
    """


class LinearFlipout(LinearReparameterization, estimator="flipout"):
    """Linear layer with Flipout (Wen et al. 2018): one perturbation, decorrelated between examples by random signs.

    All time steps of one example see one weight, so it suits sequences. Two products. Dimension 0 of the input counts
    the examples. Arguments as in :class:`LinearReparameterization`.
    """


def check_sizes(name: str, size: Any, dims: int, least: int) -> None:
    """Raise ConversionError unless ``size`` is a whole number, at least ``least``, or a tuple of one per dimension."""
    if isinstance(size, tuple) and len(size) != dims:
        raise ConversionError(f"{name}={shown(size)}: give a whole number, or {dims} of them; {ORDER}")
    for each in size if isinstance(size, tuple) else (size,):
        check_at_least(name, each, least, 2**31 - 1, error=ConversionError, why=ORDER)


class BayesianConv(BayesianAffine):
    """Base of convolutions and transposed convolutions.

    ``*Reparameterization`` samples one kernel per call. ``*LocalReparameterization`` samples its outputs, independent
    at every position, so the spread of a pooled map is too small. ``*Flipout`` gives each example and channel a random
    sign: all positions of one example see one kernel, and examples are uncorrelated.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode: as in ``nn.Conv2d``;
            padding_mode of a transposed convolution is "zeros".
        output_padding: of a transposed convolution, as in ``nn.ConvTranspose2d``.
        prior_mean, prior_variance, posterior_mu_init, posterior_rho_init, bias, prior_std, prior, bayesian_bias,
            device, dtype: as in :class:`~lightning_fedbayes.layers.LinearReparameterization`.

    Shapes: as for the deterministic layer, with or without a batch dimension. ConversionError: no such convolution.
    """

    deterministic: ClassVar[type[nn.Module]]

    def __init_subclass__(cls, replaces: type[nn.Module] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if replaces is not None:
            cls.deterministic, cls.dims = replaces, int(replaces.__name__[-2])  # "Conv2d"

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
        output_padding: Size | None = None,
        prior_std: float | None = None,
        prior: Prior | None = None,
        bayesian_bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_template(bias, device, dtype, in_channels=in_channels, out_channels=out_channels, groups=groups)
        transposed = isinstance(self, TransposedConvolution)
        for name, size in (("kernel_size", kernel_size), ("stride", stride), ("dilation", dilation)):
            check_sizes(name, size, self.dims, 1)
        if isinstance(padding, str) and not transposed:
            check_choice("padding", padding, ("same", "valid"), error=ConversionError)
            if padding == "same" and stride not in (1, (1,) * self.dims):
                raise ConversionError(f"padding='same' needs stride=1, not {stride}")
        else:
            check_sizes("padding", padding, self.dims, 0)
        modes = ("zeros",) if transposed else ("zeros", "reflect", "replicate", "circular")
        check_choice("padding_mode", padding_mode, modes, error=ConversionError)
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if channels % groups:
                raise ConversionError(f"{name}={channels} is not a multiple of groups={groups}; {ORDER}")
        extra: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        if output_padding is not None:
            if not transposed:
                raise ConversionError(f"output_padding={shown(output_padding)} is of transposed convolutions only")
            check_sizes("output_padding", output_padding, self.dims, 0)
            extra["output_padding"] = output_padding
        values = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode)
        template: Any = self.deterministic(**dict(zip(GEOMETRY, values)), **extra)
        prior = choose_prior(prior_mean, prior_variance, prior_std, prior)
        super().__init__(template, "kernel", prior, posterior_mu_init, posterior_rho_init, bayesian_bias)
        self.in_channels: int = template.in_channels
        self.out_channels: int = template.out_channels
        self.kernel_size: tuple[int, ...] = template.kernel_size
        self.stride: tuple[int, ...] = template.stride
        self.padding: str | tuple[int, ...] = template.padding
        self.dilation: tuple[int, ...] = template.dilation
        self.groups: int = template.groups
        self.padding_mode: str = template.padding_mode
        self.output_padding: tuple[int, ...] = template.output_padding

    def template(self, bias: bool) -> nn.Module:
        """The deterministic convolution of this geometry."""
        names = (*GEOMETRY, "output_padding") if isinstance(self, TransposedConvolution) else GEOMETRY
        return self.deterministic(**{name: getattr(self, name) for name in names}, bias=bias, device="meta")

    def sign_shapes(self, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Signs per example and channel, the same at every position."""
        batch, ones = x.shape[: -self.dims - 1], (1,) * self.dims
        return (*batch, self.in_channels, *ones), (*batch, self.out_channels, *ones)


class Convolution(BayesianConv):
    """Base of ``Conv1d*``, ``Conv2d*`` and ``Conv3d*``. Use those. Arguments as of :class:`BayesianConv`."""

    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``F.conv*d``, after padding by ``padding_mode``."""
        return self.grouped_op(x, weight, bias, self.groups)

    def grouped_op(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """:meth:`op` with any number of groups."""
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, margins(self.padding, self.kernel_size, self.dilation), mode=self.padding_mode), 0
        return CONVOLVE[self.deterministic](x, weight, bias, self.stride, padding, self.dilation, groups)

    def flipout(self, op: Op, x: Tensor, weight: Tensor, bias: Tensor | None, noise: FlipoutNoise) -> Tensor:
        """Output of Flipout, by the cheaper of two ways to compute it."""
        if functional.one_convolution_is_cheaper(x, weight, self.stride):
            return functional.flipout_by_example(self.grouped_op, x, weight, bias, noise, self.groups)
        return super().flipout(op, x, weight, bias, noise)


def margins(padding: str | tuple[int, ...], kernel_size: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    """Padding for ``F.pad``: last dimension first, before and after.

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
    """Base of ``ConvTranspose1d*``, ``ConvTranspose2d*`` and ``ConvTranspose3d*``. Use those.

    Arguments as of :class:`BayesianConv`. Pass all but the first three by keyword: bayesian-torch's order differs.
    """

    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: Sequence[int] | None = None) -> Tensor:
        """Compute ``F.conv_transpose*d``."""
        output_padding = self.output_padding
        if output_size is not None:
            sizes = zip(x.shape[-self.dims :], self.stride, self.padding, self.dilation, self.kernel_size)
            smallest = [(n - 1) * step - 2 * int(pad) + gap * (kernel - 1) + 1 for n, step, pad, gap, kernel in sizes]
            output_padding = tuple(size - least for size, least in zip(output_size[-self.dims :], smallest))
        convolve = CONVOLVE[self.deterministic]
        return convolve(x, weight, bias, self.stride, self.padding, output_padding, self.groups, self.dilation)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # nn.ConvTranspose2d has output_size second
        self, x: Tensor, output_size: Sequence[int] | None = None, return_kl: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See :meth:`BayesianAffine.forward`. ``output_size`` as in ``nn.ConvTranspose2d``."""
        output = self._output(partial(self.op, output_size=output_size), x)
        return (output, self.kl_loss()) if return_kl else output


class Conv1dReparameterization(Convolution, replaces=nn.Conv1d):
    """1-d convolution at one kernel sample per call. See :class:`Convolution`."""


class Conv1dLocalReparameterization(Conv1dReparameterization, estimator="local_reparameterization"):
    """1-d convolution that samples its outputs. See :class:`Convolution`."""


class Conv1dFlipout(Conv1dReparameterization, estimator="flipout"):
    """1-d convolution with Flipout, one sign per example and channel. See :class:`Convolution`."""


class Conv2dReparameterization(Convolution, replaces=nn.Conv2d):
    """2-d convolution at one kernel sample per call. See :class:`Convolution`."""


class Conv2dLocalReparameterization(Conv2dReparameterization, estimator="local_reparameterization"):
    """2-d convolution that samples its outputs. See :class:`Convolution`."""


class Conv2dFlipout(Conv2dReparameterization, estimator="flipout"):
    """2-d convolution with Flipout, one sign per example and channel. See :class:`Convolution`."""


class Conv3dReparameterization(Convolution, replaces=nn.Conv3d):
    """3-d convolution at one kernel sample per call. See :class:`Convolution`."""


class Conv3dLocalReparameterization(Conv3dReparameterization, estimator="local_reparameterization"):
    """3-d convolution that samples its outputs. See :class:`Convolution`."""


class Conv3dFlipout(Conv3dReparameterization, estimator="flipout"):
    """3-d convolution with Flipout, one sign per example and channel. See :class:`Convolution`."""


class ConvTranspose1dReparameterization(TransposedConvolution, replaces=nn.ConvTranspose1d):
    """1-d transposed convolution at one kernel sample per call. See :class:`TransposedConvolution`."""


class ConvTranspose1dLocalReparameterization(ConvTranspose1dReparameterization, estimator="local_reparameterization"):
    """1-d transposed convolution that samples its outputs. See :class:`TransposedConvolution`."""


class ConvTranspose1dFlipout(ConvTranspose1dReparameterization, estimator="flipout"):
    """1-d transposed convolution with Flipout, one sign per example and channel. See :class:`TransposedConvolution`."""


class ConvTranspose2dReparameterization(TransposedConvolution, replaces=nn.ConvTranspose2d):
    """2-d transposed convolution at one kernel sample per call. See :class:`TransposedConvolution`."""


class ConvTranspose2dLocalReparameterization(ConvTranspose2dReparameterization, estimator="local_reparameterization"):
    """2-d transposed convolution that samples its outputs. See :class:`TransposedConvolution`."""


class ConvTranspose2dFlipout(ConvTranspose2dReparameterization, estimator="flipout"):
    """2-d transposed convolution with Flipout, one sign per example and channel. See :class:`TransposedConvolution`."""


class ConvTranspose3dReparameterization(TransposedConvolution, replaces=nn.ConvTranspose3d):
    """3-d transposed convolution at one kernel sample per call. See :class:`TransposedConvolution`."""


class ConvTranspose3dLocalReparameterization(ConvTranspose3dReparameterization, estimator="local_reparameterization"):
    """3-d transposed convolution that samples its outputs. See :class:`TransposedConvolution`."""


class ConvTranspose3dFlipout(ConvTranspose3dReparameterization, estimator="flipout"):
    """3-d transposed convolution with Flipout, one sign per example and channel. See :class:`TransposedConvolution`."""
