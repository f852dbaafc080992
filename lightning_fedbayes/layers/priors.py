r"""Priors of a Gaussian parameter: frozen dataclasses with one method, the KL divergence of the parameter from them.

Any frozen dataclass with such a ``kl`` can be a prior. Its tensor fields follow the layer to its device and dtype.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import ConversionError, check_number, is_number, shown
from lightning_fedbayes.core.posterior import GaussianPosterior, check_tensor
from lightning_fedbayes.layers.kl import gaussian_kl_sum

FLOAT32 = "(-1e38, 1e38)"
"""Interval of the numbers that a parameter of single precision can hold."""


class Prior(Protocol):
    """Interface of a prior."""

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        """KL(q‖p), summed over the entries of q = N(``mean``, ``std``²), in nats, a scalar."""
        ...


@dataclass(frozen=True, eq=False)
class NormalPrior:
    r"""The Gaussian prior :math:`N(m, s^2)`. Numbers for a fixed prior, tensors for a previous posterior.

    Args:
        mean, std: m and s > 0, numbers or tensors of the parameter's shape. ConversionError for numbers out of range.

    >>> NormalPrior(0.0, 1.0).kl(torch.zeros(3), torch.ones(3))
    tensor(0.)
    """

    mean: float | Tensor = 0.0
    std: float | Tensor = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.std, Tensor):
            check_tensor("std of a prior", self.std, error=ConversionError)
        else:
            check_std("std", self.std)
        if isinstance(self.mean, Tensor):
            check_tensor("mean of a prior", self.mean, error=ConversionError)
        else:
            check_number("mean of a prior", self.mean, FLOAT32, error=ConversionError)

    @property
    def is_scalar(self) -> bool:
        """True if all entries of a parameter have the same prior."""
        return not isinstance(self.mean, Tensor) and not isinstance(self.std, Tensor)

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        """The closed form of :func:`~lightning_fedbayes.layers.kl.gaussian_kl_sum`."""
        return gaussian_kl_sum(mean, std, self.mean, self.std)


@dataclass(frozen=True, eq=False)
class ScaleMixturePrior:
    r"""The spike and slab of two Gaussians, :math:`\pi N(0, s_1^2) + (1 - \pi) N(0, s_2^2)` per entry.

    Its KL has no closed form: the entropy is exact, the cross-entropy is estimated at one reparameterised draw,
    so that value and gradient are unbiased. Blundell et al. 2015, equation (7).

    Args:
        weight: :math:`\pi` in [0, 1].
        std1, std2: :math:`s_1, s_2` > 0. Out of range, an argument raises ConversionError.
    """

    weight: float
    std1: float
    std2: float

    def __post_init__(self) -> None:
        check_std("std1", self.std1)
        check_std("std2", self.std2)
        check_number("weight of a scale mixture prior", self.weight, "[0, 1]", error=ConversionError)

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        r"""Return :math:`\sum_i \log q(w_i) - \log p(w_i)` with exact entropy, at a draw w from torch's generator."""
        draw = torch.addcmul(mean, std, torch.randn_like(std))
        components = [  # without the constant log sqrt(2 pi), which the entropy cancels
            (math.log(weight) if weight > 0 else -math.inf) - math.log(s) - (draw / s).square() / 2
            for weight, s in ((self.weight, self.std1), (1 - self.weight, self.std2))
        ]
        return -(std.log() + 0.5 + torch.logaddexp(*components)).sum()


@dataclass(frozen=True, eq=False)
class LocalPrior:
    r"""A client's quadratic in the means, :math:`\sum_i \tfrac12 A_i d_i^2 + c_i d_i`, :math:`d = \mu - m`.

    It takes the place of the divergence from the prior, and does not change widths. ``curvature`` A and ``slope`` c may
    have any sign, and have the parameter's shape, or for stacked clients and joint priors one that broadcasts.
    ``tally``, of shape (\*, 2), and ``squares`` are zeros. Their gradients are the factor of this sum in the loss,
    times its entries and times its value, and the squared gradients of single examples, summed, see
    :func:`~lightning_fedbayes.layers.functional.with_tallies`. Source: see :class:`~lightning_fedbayes.Sites`.
    """

    mean: Tensor
    curvature: Tensor
    slope: Tensor
    tally: Tensor | None = field(default=None, kw_only=True)
    squares: Tensor | None = field(default=None, kw_only=True)

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        """The sum above, a scalar, with the gradient of autograd."""
        mean = mean.float() if mean.dtype in (torch.float16, torch.bfloat16) else mean
        return self.tallied(self.terms(mean).sum(), mean.numel())

    def tallied(self, divergence: Tensor, entries: int) -> Tensor:
        """Return the divergence of so many entries with its tally."""
        if self.tally is None:
            return divergence
        count, value = self.tally.unbind(-1)
        return torch.addcmul(divergence, value, divergence.detach()).add(count, alpha=entries)

    def values(self, mean: Tensor) -> Tensor:
        """The sum above over the last dimension, without a tally: shape (networks, entries) → (networks,)."""
        return self.terms(mean).sum(-1)

    def terms(self, mean: Tensor) -> Tensor:
        """Return the term of each entry."""
        move = mean - self.mean
        return move * torch.addcmul(self.slope, move, self.curvature, value=0.5)

    def gradient(self, mean: Tensor) -> Tensor:
        """Return the derivative of each entry's term by the mean. Those by the standard deviation are 0."""
        return torch.addcmul(self.slope, mean - self.mean, self.curvature)


P = TypeVar("P", bound=Prior)


def map_tensors(prior: P, fn: Callable[[Tensor], Tensor]) -> P:
    """Return ``prior`` with ``fn`` applied to its tensor fields, such as a move to another device or dtype."""
    if not dataclasses.is_dataclass(prior):
        return prior
    values = {each.name: getattr(prior, each.name) for each in dataclasses.fields(prior)}
    changes = {name: fn(value) for name, value in values.items() if isinstance(value, Tensor)}
    return dataclasses.replace(prior, **changes) if changes else prior


def choose_prior(
    prior_mean: float, prior_variance: float | None, prior_std: float | None, prior: Prior | None
) -> Prior:
    """Return the prior that a layer's arguments describe, by default N(0, 1). ConversionError if they contradict."""
    if prior is not None:
        if isinstance(prior, GaussianPosterior):
            raise ConversionError("prior is a GaussianPosterior, of a whole network: set_prior(network, posterior)")
        if not callable(getattr(prior, "kl", None)):
            raise ConversionError(f"prior={shown(prior)} is not a prior: give one, such as NormalPrior(0.0, 1.0)")
        if prior_variance is not None or prior_std is not None or not (is_number(prior_mean) and prior_mean == 0):
            raise ConversionError("prior= is a whole prior: give no prior_mean, prior_variance or prior_std")
        return prior
    check_number("prior_mean", prior_mean, FLOAT32, error=ConversionError)
    if prior_std is None:
        if prior_variance is not None:
            check_number("prior_variance", prior_variance, "(0, 1e38)", error=ConversionError)
        return NormalPrior(prior_mean, math.sqrt(1.0 if prior_variance is None else prior_variance))
    if prior_variance is not None:
        raise ConversionError(f"give prior_variance={shown(prior_variance)} or prior_std={shown(prior_std)}, not both")
    check_std("prior_std", prior_std)
    return NormalPrior(prior_mean, prior_std)


def check_std(name: str, std: Any) -> None:
    """Raise ConversionError unless an argument is a number that can be a standard deviation."""
    check_number(name, std, "(0, 1e38)", error=ConversionError, why="it is a standard deviation")
