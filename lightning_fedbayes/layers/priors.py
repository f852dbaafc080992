r"""Priors of a Gaussian parameter: frozen values with one method, the KL divergence of the parameter from them.

Any frozen dataclass with such a ``kl`` can be a prior; its tensor fields follow the layer to its device and dtype.
"""

from __future__ import annotations

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
        """KL(q‖p), summed over the entries of q = N(``mean``, ``std``²), in nats. Returns a scalar."""
        ...


@dataclass(frozen=True, eq=False)
class NormalPrior:
    r"""The Gaussian prior :math:`N(m, s^2)`; numbers for a fixed prior, tensors for a previous posterior.

    Args:
        mean: m, a number or a tensor of the parameter's shape.
        std: s > 0, a number or a tensor of the parameter's shape.

    Raises:
        ConversionError: ``std`` is a number and not positive.

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
class TiedMeanPrior:
    r"""A Gaussian prior whose mean is the posterior's own, :math:`N(\mu, s^2)`: only the spread is penalised.

    Use it where a prior centred at 0 pulls the means of a deep network too hard
    (the ``NormalKLDivergenceWithTiedMean`` of edward2). It does not regularise the mean; weight decay can.

    Args:
        std: s > 0.
    """

    std: float

    def __post_init__(self) -> None:
        check_std("std", self.std)

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        r""":math:`\sum_i \log(s/\sigma_i) + \sigma_i^2 / 2 s^2 - 1/2`."""
        return gaussian_kl_sum(torch.zeros_like(std), std, 0.0, self.std)


@dataclass(frozen=True, eq=False)
class ScaleMixturePrior:
    r"""The spike and slab of two Gaussians, :math:`\pi N(0, s_1^2) + (1 - \pi) N(0, s_2^2)` per entry.

    Its KL has no closed form: the entropy is exact, the cross-entropy is estimated at one reparameterised draw,
    so that value and gradient are unbiased. Blundell et al. 2015, equation (7).

    Args:
        weight: :math:`\pi` in [0, 1].
        std1, std2: :math:`s_1, s_2` > 0.

    Raises:
        ConversionError: an argument is out of range.
    """

    weight: float
    std1: float
    std2: float

    def __post_init__(self) -> None:
        check_std("std1", self.std1)
        check_std("std2", self.std2)
        check_number("weight of a scale mixture prior", self.weight, "[0, 1]", error=ConversionError)

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        """A one-draw Monte Carlo estimate; the noise is drawn from torch's global generator."""
        return self.kl_at(mean, std, torch.randn_like(std))

    def kl_at(self, mean: Tensor, std: Tensor, noise: Tensor) -> Tensor:
        r""":math:`\sum_i \log q(w_i) - \log p(w_i)` with exact entropy, at :math:`w = \mu + \sigma \odot` ``noise``."""
        draw = torch.addcmul(mean, std, noise)
        log_prior = torch.logaddexp(self._log_component(draw, self.weight, self.std1),
                                    self._log_component(draw, 1 - self.weight, self.std2))
        return -(std.log() + 0.5 + log_prior).sum()

    @staticmethod
    def _log_component(draw: Tensor, weight: float, std: float) -> Tensor:
        # without the constant log sqrt(2 pi), which the entropy cancels
        return (math.log(weight) if weight > 0 else -math.inf) - math.log(std) - (draw / std).square() / 2


@dataclass(frozen=True, eq=False)
class CavityPrior:
    r"""The global posterior without a client's own site, times :math:`\rho`, as the client's prior.

    .. math:: \rho\,KL(q \| \text{cavity}) = \sum_i \tfrac12 A_i (\sigma_i^2 - s_i^2 + d_i^2) + c_i d_i
              - \rho \log\frac{\sigma_i}{s_i}, \qquad d = \mu - m, \quad A = \rho / s^2 - \Lambda, \quad
              c = \eta - \Lambda m

    less a constant: it is 0 at the global posterior :math:`N(m, s^2)`. The cavity may be improper (A negative), since
    nothing is inverted.

    Args:
        mean, std: m and s.
        curvature, slope: A and c, with the precision Λ and shift η of the client's site.
        step: :math:`\rho` > 0.
        tally: a zero that is added for every entry: its gradient is their number times the factor of the divergence in
            the loss. None: nothing is.
        squares: a zero of the parameter's shape: its gradient is the sum of the squared gradients of single examples,
            see :func:`~lightning_fedbayes.layers.squares.with_tallies`. None: none is taken.

    All tensors are of the parameter's shape; of a stack of clients, or in a joint prior, of any that broadcasts.

    Source: Ashman et al. 2022; see :class:`~lightning_fedbayes.fusion.Sites`.
    """

    mean: Tensor
    std: Tensor
    curvature: Tensor
    slope: Tensor
    step: Tensor
    tally: Tensor | None = field(default=None, kw_only=True)
    squares: Tensor | None = field(default=None, kw_only=True)

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        """The sum above, a scalar, with the gradient of autograd."""
        if mean.dtype in (torch.float16, torch.bfloat16):
            mean, std = mean.float(), std.float()
        return self.tallied(self._terms(mean, std).sum(), mean.numel())

    def tallied(self, divergence: Tensor, entries: int) -> Tensor:
        """Return the divergence of so many entries with its tally."""
        return divergence if self.tally is None else divergence + self.tally * entries

    def values(self, mean: Tensor, std: Tensor) -> Tensor:
        """The sum above over the last dimension, without a tally: shape (networks, entries) → (networks,)."""
        return self._terms(mean, std).sum(-1)

    def _terms(self, mean: Tensor, std: Tensor) -> Tensor:
        move = mean - self.mean
        spread = torch.addcmul(move * move, std, std) - self.std * self.std
        return torch.addcmul(move * self.slope, spread, self.curvature, value=0.5) - self.step * (std / self.std).log()

    def gradients(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives of each entry's term by mean and standard deviation."""
        of_mean = torch.addcmul(self.slope, mean - self.mean, self.curvature)
        return of_mean, torch.addcmul(-(self.step / std), std, self.curvature)


@dataclass(frozen=True, eq=False)
class RenyiCavityPrior(CavityPrior):
    r"""A cavity whose divergence is Rényi's, :math:`D_\alpha`, for every entry whose cavity is proper (A > 0).

    .. math:: \rho D_\alpha(q \| \text{cavity})
              = \frac{\rho}{\alpha (\alpha - 1)} \log \int q^\alpha \text{cavity}^{1 - \alpha}
              = \sum_i \frac{(A_i d_i + c_i)^2}{2 A_i w_i} + \frac{\rho}{2\alpha} \left(\frac{\log w_i}{1 - \alpha}
              - \log r_i\right), \qquad r = A \sigma^2 / \rho, \quad w = \alpha + (1 - \alpha) r

    less a constant: it is 0 at the global posterior. Of :math:`\alpha \to 1` it is :class:`CavityPrior`. The integral
    is finite for every q where A > 0; an entry whose cavity is improper keeps the KL.

    Args:
        mean, std, curvature, slope, step: see :class:`CavityPrior`.
        order: :math:`\alpha` in (0, 1).
        tally, squares: see :class:`CavityPrior`.

    Source: Mildner et al. 2025; see :class:`~lightning_fedbayes.fusion.Sites`.
    """

    order: float

    def _terms(self, mean: Tensor, std: Tensor) -> Tensor:
        # differences from the value at the global posterior are taken by hand: each alone has A as a divisor
        rest, move = self._rest(), mean - self.mean
        slack = (std * std - self.std * self.std) / self.step
        widening = slack * self.curvature
        start = 1 + rest * (self.std * self.std * (self.curvature / self.step) - 1)
        weight = start + rest * widening
        place = move * (2 * self.slope + move * self.curvature) - rest * slack * self.slope.square() / start
        spread = torch.where(rest > 0, (rest * widening / start).log1p() / (1 - self.order), widening)
        return (place / weight + self.step / (1 - rest) * (spread - 2 * (std / self.std).log())) / 2

    def gradients(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`CavityPrior.gradients`."""
        rest = self._rest()
        weight = 1 + rest * (std * std * (self.curvature / self.step) - 1)
        of_mean = torch.addcmul(self.slope, mean - self.mean, self.curvature) / weight
        of_std = (std * (self.curvature / weight) - self.step / std) / (1 - rest)
        return of_mean, of_std - rest * std * of_mean.square() / self.step

    def _rest(self) -> Tensor:
        """Return 1 − α of every entry: 0, the KL, where the cavity is improper."""
        return (self.curvature > 0).to(self.curvature) * (1 - self.order)


P = TypeVar("P", bound=Prior)


def map_tensors(prior: P, fn: Callable[[Tensor], Tensor]) -> P:
    """Return ``prior`` with ``fn`` applied to its tensor fields, such as a move to another device or dtype."""
    if not dataclasses.is_dataclass(prior):
        return prior
    changes = {each.name: fn(value) for each in dataclasses.fields(prior)
               if isinstance(value := getattr(prior, each.name), Tensor)}
    return dataclasses.replace(prior, **changes) if changes else prior


def choose_prior(
    prior_mean: float, prior_variance: float | None, prior_std: float | None, prior: Prior | None
) -> Prior:
    """Return the one prior that a layer's arguments describe: N(0, 1) if they describe none.

    Raises:
        ConversionError: the arguments describe more than one prior, or one that is no distribution.
    """
    if prior is not None:
        if isinstance(prior, GaussianPosterior):
            raise ConversionError("prior is a GaussianPosterior, of a whole network: set_prior(network, posterior)")
        if not callable(getattr(prior, "kl", None)):
            raise ConversionError(f"prior={shown(prior)} is no prior: give one, such as NormalPrior(0.0, 1.0)")
        if prior_variance is not None or prior_std is not None or not (is_number(prior_mean) and prior_mean == 0):
            raise ConversionError("prior= is a whole prior: give no prior_mean, prior_variance or prior_std beside it")
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
