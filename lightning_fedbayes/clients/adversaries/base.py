"""Attacks of adversarial clients: base classes, the knowledge of an adversary, and the assignment to clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import (
    LARGEST,
    FederationError,
    FusionError,
    check_at_least,
    check_kind,
    check_number,
    check_strings,
    nearest,
    shown,
)
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.seeding import generator


class HonestMoments:
    r"""Mean and standard deviation, per entry, of vectors that arrive one by one: Welford's recursion.

    .. math:: m_k = m_{k-1} + (x_k - m_{k-1})/k, \qquad M_k = M_{k-1} + (x_k - m_{k-1})(x_k - m_k)

    It holds two vectors, whatever the number of clients.

    Args:
        like: a vector of the same shape, dtype and device.

    Attributes:
        count: number of vectors so far.
        mean: their mean, shape (P,); zeros at first.

    >>> moments = HonestMoments(torch.zeros(1))
    >>> moments.add(torch.tensor([1.0]))
    >>> moments.add(torch.tensor([3.0]))
    >>> moments.mean, moments.std
    (tensor([2.]), tensor([1.]))
    """

    def __init__(self, like: Tensor) -> None:
        self.count = 0
        self.mean = torch.zeros_like(like)
        self._squares = torch.zeros_like(like)

    def add(self, vector: Tensor) -> None:
        """Add one vector, shape (P,)."""
        self.count += 1
        difference = vector - self.mean
        self.mean = self.mean + difference / self.count
        self._squares += difference * (vector - self.mean)

    @property
    def std(self) -> Tensor:
        """Return the standard deviation of the population, √(M/k), shape (P,); needs at least one vector."""
        return (self._squares / self.count).sqrt()


@dataclass(frozen=True)
class Knowledge:
    """Knowledge of an adversary about its round.

    Args:
        previous: means of the global posterior that the clients started from, μ_o, float64 of shape (P,).
        generator: the only source of randomness: a separate CPU generator for every round, client and attack.
        honest: moments of the means that the valid honest clients sent, for an attack with ``needs_honest``.
        cohort: number of clients in the round, n.
        adversaries: number of clients in the round that attack, m.
    """

    previous: Tensor
    generator: torch.Generator
    honest: HonestMoments
    cohort: int
    adversaries: int


Attackers = float | Sequence[int | str]
"""Clients that attack: a share of all clients in (0, 1], or numbers or names."""


class Attack(ABC):
    """Base class of attacks: some clients and what they do. Every attack is a frozen dataclass.

    Args:
        clients: share of all clients in (0, 1], of which ⌊share·K + ½⌋ are drawn (see
            :func:`~lightning_fedbayes.clients.adversaries.assign`); or a sequence of client numbers (from 0) or names.

    Raises:
        FederationError: a share outside (0, 1], or clients that are neither numbers nor names.
    """

    clients: Attackers
    ranges: ClassVar[Mapping[str, str]] = {}
    """Numbers among the arguments → the interval that they lie in."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        for argument, interval in self.ranges.items():
            if (value := getattr(self, argument)) is not None:
                check_number(f"{name}: {argument}", value, interval)
        if isinstance(self.clients, float):
            check_number(f"{name}: clients", self.clients, "(0, 1]", why="it is the share of clients that attack")
            return
        if not isinstance(self.clients, Sequence) or isinstance(self.clients, str | bytes) or not self.clients:
            raise FederationError(
                f"{name}: clients={shown(self.clients)}: give a share of the clients, such as 0.3, or a list of their "
                "numbers or names, such as [0, 2]"
            )
        wrong = [each for each in self.clients if isinstance(each, bool) or not isinstance(each, int | str)]
        if wrong:
            raise FederationError(f"{name}: {shown(wrong[0])} is neither the number nor the name of a client")
        object.__setattr__(self, "clients", tuple(self.clients))


class UpdateAttack(Attack):
    """Base class of clients that train honestly and then send false means; variances stay as they are.

    For your own attack, write a frozen dataclass with a field ``clients`` and the method :meth:`falsify`.

    Args:
        clients: see :class:`Attack`.

    Attributes:
        needs_honest: if true, the attack waits for the honest clients of the round. If none of them is valid, the
            adversary sends its own update unchanged.
    """

    needs_honest: ClassVar[bool] = False

    def send(self, posterior: GaussianPosterior, knowledge: Knowledge) -> GaussianPosterior:
        """Return the posterior to send in place of ``posterior``, with the same names, shapes and dtypes."""
        if self.needs_honest and knowledge.honest.count == 0:
            return posterior
        mean = self.falsify(posterior.flatten()[0], knowledge)
        if mean.shape != knowledge.previous.shape:
            raise FusionError(
                f"{shown(self)}: falsify returned a tensor of shape {tuple(mean.shape)}; return one mean per "
                f"parameter, shape {tuple(knowledge.previous.shape)}"
            )
        return GaussianPosterior(posterior.unflatten(mean, None).mean, posterior.variance)

    def send_beside(self, tensors: Mapping[str, Tensor], knowledge: Knowledge) -> dict[str, Tensor]:
        """Return what to send in place of a method's own ``tensors``: falsified as means are, about 0.

        Single numbers stay, and so does everything where the attack waits for honest means.
        """
        found = dict(tensors)
        for name, value in tensors.items() if not self.needs_honest else ():
            if value.numel() > 1 and value.is_floating_point():
                flat = value.flatten().double()
                false = self.falsify(flat, replace(knowledge, previous=torch.zeros_like(flat)))
                found[name] = false.view(value.shape).to(value.dtype)
        return found

    @abstractmethod
    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return the means to send.

        Args:
            mean: means that the client trained, μ, float64 of shape (P,); do not modify.
            knowledge: knowledge about the round.

        Returns: shape (P,).
        """


def assign(attacks: Sequence[Attack], names: Sequence[str], seed: int) -> dict[int, tuple[Attack, ...]]:
    """Return the attacks of every client that attacks, in the order of ``attacks``.

    Shares are drawn from (seed, "adversaries") and are disjoint. A client that another attack names may be drawn too;
    it then applies both attacks, one after the other.

    Args:
        attacks: the attacks of the federation.
        names: name of every client.
        seed: seed of the federation.

    Returns: client number → its attacks, without the honest clients.

    Raises:
        FederationError: an unknown name, a number that no client has, a share of less than half a client, or shares
            that need more clients than there are.
    """
    check_kind("attacks", attacks, Sequence, "give a list of attacks")
    check_at_least("seed", seed, -LARGEST)
    names = check_strings("names", names, "give the name of every client")
    if not attacks or not names:
        return {}
    numbers = {name: number for number, name in reversed(list(enumerate(names)))}
    order = torch.randperm(len(names), generator=generator(seed, "adversaries")).tolist()
    assigned: dict[int, tuple[Attack, ...]] = {}
    for attack in attacks:
        check_kind("an attack", attack, Attack, "give one, such as SignFlip(clients=0.3)")
        if isinstance(attack.clients, Sequence):
            chosen = list(dict.fromkeys(_number(attack, client, numbers) for client in attack.clients))
        else:
            count = int(attack.clients * len(names) + 0.5)
            if count == 0:
                raise FederationError(
                    f"{attack}: this share of {len(names)} clients is none of them; give at least "
                    f"{0.5 / len(names):.3g}, or numbers"
                )
            if count > len(order):
                raise FederationError(
                    f"{attack}: this share is {count} of {len(names)} clients, and the attacks before it leave "
                    f"{len(order)}, since shares are disjoint; give smaller shares, or name the clients, which may "
                    "then have several attacks"
                )
            chosen, order = order[:count], order[count:]
        for client in chosen:
            assigned[client] = (*assigned.get(client, ()), attack)
    return assigned


def _number(attack: Attack, client: int | str, numbers: Mapping[str, int]) -> int:
    """Return the number of a client that is given by number or name; raise FederationError if there is none."""
    if isinstance(client, int):
        if not 0 <= client < len(numbers):
            raise FederationError(
                f"{shown(attack)}: there is no client {client}; clients are numbered 0 to {len(numbers) - 1}"
            )
        return client
    if client not in numbers:
        raise FederationError(f"{shown(attack)}: no client is named '{client}': {nearest(client, numbers)}")
    return numbers[client]
