"""Late messages: how a rule without sites takes messages that started from an older global model."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_fedbayes.core.errors import check_number
from lightning_fedbayes.core.posterior import GaussianPosterior


@dataclass(frozen=True)
class Late(ABC):
    r"""Way to take a message whose client began :math:`\tau` versions of the global model ago; τ is its staleness.

    Raises FederationError if an argument is out of range.

    Args:
        exponent: a ≥ 0 of the staleness weight :math:`s(\tau) = (1 + \tau)^{-a}`.
    """

    exponent: float = 0.5

    def __post_init__(self) -> None:
        check_number("exponent", self.exponent, "[0, inf)", why="a late message counts by (1 + staleness)^-exponent")

    def weight(self, staleness: int) -> float:
        r"""Return :math:`s(\tau)`."""
        return (1 + staleness) ** -self.exponent

    @abstractmethod
    def taken(
        self, sent: GaussianPosterior, start: GaussianPosterior, now: GaussianPosterior, staleness: int
    ) -> GaussianPosterior:
        """Return what a client would have sent from the present posterior, ``staleness`` versions after ``start``."""

    def buffers(self, sent: Mapping[str, Tensor], now: Mapping[str, Tensor], staleness: int) -> dict[str, Tensor]:
        r"""Return buffers between the present and a client's, :math:`(1 - s)\,b + s\,b_k`; counts are the client's."""
        weight = self.weight(staleness)
        return {
            name: now[name].lerp(value.to(now[name]), weight) if name in now and value.is_floating_point() else value
            for name, value in sent.items()
        }


@dataclass(frozen=True)
class FedBuff(Late):
    r"""A late change counts by its staleness weight, added to the present global posterior.

    .. math:: \mu + s(\tau) (\mu_k - \mu_\text{start}), \qquad \sigma^2 (\sigma_k^2 / \sigma_\text{start}^2)^{s(\tau)}

    The rule fuses a buffer of such messages. The weighted average makes it the published algorithm with a global rate
    of 1, which divides clients' changes by the size of the buffer and not by the sum of their staleness weights.

    When to use it: as the default of rules that average. ``exponent`` as of :class:`Late`.

    Source: Nguyen et al. 2022, Algorithm 1, with the staleness weight of its section 5.
    """

    def taken(
        self, sent: GaussianPosterior, start: GaussianPosterior, now: GaussianPosterior, staleness: int
    ) -> GaussianPosterior:
        if not staleness:
            return sent
        weight, mean, variance = self.weight(staleness), {}, {}
        for name, value in now.mean.items():
            mean[name] = value + weight * (sent.mean[name] - start.mean[name])
            before, spread = start.variance[name], sent.variance[name]
            ratio = (spread / before.where(before > 0, spread)).where(spread > 0, 0.0)  # point masses stay
            variance[name] = now.variance[name].where(before > 0, spread) * ratio**weight
        return GaussianPosterior(mean, variance, sent.linearised)


@dataclass(frozen=True)
class FedAsync(Late):
    r"""The global posterior moves towards each message, by a share that falls with its staleness.

    .. math:: (1 - \alpha s(\tau))\,\mu + \alpha s(\tau)\,\mu_k, \qquad \text{variances likewise}

    When to use it: with ``buffer=1``. Clients' models then enter one by one.

    Args:
        exponent: see :class:`Late`.
        mixing: :math:`\alpha` in (0, 1]: the share of a message that is not late.

    Source: Xie et al. 2019, Algorithm 1, with the polynomial staleness weight.
    """

    mixing: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("mixing", self.mixing, "(0, 1]", why="it is the share of a message that is not late")

    def weight(self, staleness: int) -> float:
        r"""Return :math:`\alpha s(\tau)`."""
        return self.mixing * super().weight(staleness)

    def taken(
        self, sent: GaussianPosterior, start: GaussianPosterior, now: GaussianPosterior, staleness: int
    ) -> GaussianPosterior:
        weight = self.weight(staleness)
        mean, variance = (
            {name: (1 - weight) * value + weight * theirs[name] for name, value in ours.items()}
            for ours, theirs in ((now.mean, sent.mean), (now.variance, sent.variance))
        )
        return GaussianPosterior(mean, variance, sent.linearised)


def moved(sent: GaussianPosterior, start: GaussianPosterior, now: GaussianPosterior) -> GaussianPosterior:
    """Return the present means, moved as far as a client has moved from its start."""
    means = {name: mean - start.mean[name] + now.mean[name] for name, mean in sent.mean.items()}
    return GaussianPosterior.point_mass(means)
