"""What an adversary is: clients that attack, and what they make of what they would have sent."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.adversaries.honest import HonestMoments
from lightning_fedbayes.errors import FederationError, FusionError
from lightning_fedbayes.posterior import GaussianPosterior


@dataclass(frozen=True)
class Knowledge:
    """What an adversary knows of its round.

    Args:
        previous: means of the global posterior that the clients started from, μ_o, float64 of shape (P,).
        generator: the only source of randomness, a CPU generator of its own for every round, client and attack.
        honest: moments of the means that the valid honest clients have sent; for an attack with ``needs_honest``.
        cohort: number of clients in the round, n.
        adversaries: how many of them attack, in whatever way, m.
    """

    previous: Tensor
    generator: torch.Generator
    honest: HonestMoments
    cohort: int
    adversaries: int


Attackers = float | Sequence[int | str]
"""A share of the clients in (0, 1], or the numbers or names of some."""


class Attack(ABC):
    """Clients that attack; every attack is a frozen dataclass.

    Args:
        clients: share of all clients in (0, 1], of which ⌊share·K + ½⌋ are drawn (see
            :func:`~lightning_fedbayes.adversaries.assign`); or a sequence of client numbers (from 0) or names.

    Raises:
        FederationError: a share outside (0, 1], or clients that are neither numbers nor names.
    """

    clients: Attackers

    def __post_init__(self) -> None:
        if isinstance(self.clients, float):
            if not 0 < self.clients <= 1:
                raise FederationError(f"{self}: the share of clients that attack lies in (0, 1]")
            return
        if not isinstance(self.clients, Sequence) or isinstance(self.clients, str) or not self.clients:
            raise FederationError(
                f"{self}: give a share of the clients, such as 0.3, or a list of their numbers or names, such as [0, 2]"
            )
        wrong = [each for each in self.clients if isinstance(each, bool) or not isinstance(each, int | str)]
        if wrong:
            raise FederationError(f"{self}: {wrong[0]!r} is neither the number nor the name of a client")
        object.__setattr__(self, "clients", tuple(self.clients))


class UpdateAttack(Attack):
    """Clients that train honestly and then send other means; variances stay what they are.

    To write your own, subclass it as a frozen dataclass with a field ``clients`` and implement :meth:`falsify`.

    Args:
        clients: see :class:`Attack`.

    Attributes:
        needs_honest: whether it waits for the honest clients of the round. It then sends its own update as it is if no
            honest one is valid.
    """

    needs_honest: ClassVar[bool] = False

    def send(self, posterior: GaussianPosterior, knowledge: Knowledge) -> GaussianPosterior:
        """What the client sends in place of ``posterior``: the same names, shapes and dtypes."""
        if self.needs_honest and knowledge.honest.count == 0:
            return posterior
        mean = self.falsify(posterior.flatten()[0], knowledge)
        if mean.shape != knowledge.previous.shape:
            raise FusionError(
                f"{self}: falsify gave a tensor of shape {tuple(mean.shape)}; give one mean per parameter, shape "
                f"{tuple(knowledge.previous.shape)}"
            )
        return GaussianPosterior(posterior.unflatten(mean, None).mean, posterior.variance)

    @abstractmethod
    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """The means to send.

        Args:
            mean: what the client would have sent, μ, float64 of shape (P,); not to be written into.
            knowledge: of its round.

        Returns: shape (P,).
        """


def check_number(attack: Attack, name: str, value: float, *, positive: bool = False) -> None:
    """Raise FederationError unless ``value`` is finite and, if asked, above 0."""
    if not math.isfinite(value) or (positive and value <= 0):
        raise FederationError(f"{attack}: {name} is a finite number{' above 0' if positive else ''}, not {value}")
