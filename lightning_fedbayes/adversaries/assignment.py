"""Which client attacks how."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_fedbayes.adversaries.base import Attack
from lightning_fedbayes.errors import FederationError, nearest
from lightning_fedbayes.seeding import generator


def assign(attacks: Sequence[Attack], names: Sequence[str], seed: int) -> dict[int, tuple[Attack, ...]]:
    """The attacks of every client that attacks, in the order of ``attacks``.

    Shares are drawn from (seed, "adversaries") and are disjoint from each other; a client that is named beside may be
    drawn as well, and then applies both attacks, one after the other.

    Args:
        attacks: the attacks of the federation.
        names: name of every client.
        seed: seed of the federation.

    Returns: client number → its attacks; honest clients are missing.

    Raises:
        FederationError: an unknown name, a number that no client has, a share of less than half a client, or shares
            that take more clients than there are.
    """
    if not attacks:
        return {}
    order = torch.randperm(len(names), generator=generator(seed, "adversaries")).tolist()
    assigned: dict[int, tuple[Attack, ...]] = {}
    for attack in attacks:
        if isinstance(attack.clients, Sequence):
            chosen = list(dict.fromkeys(_number(attack, client, names) for client in attack.clients))
        else:
            count = int(attack.clients * len(names) + 0.5)
            _check_share(attack, count, len(order), len(names))
            chosen, order = order[:count], order[count:]
        for client in chosen:
            assigned[client] = (*assigned.get(client, ()), attack)
    return assigned


def _check_share(attack: Attack, count: int, left: int, clients: int) -> None:
    """Raise FederationError unless ``count`` clients can be drawn."""
    if count == 0:
        raise FederationError(
            f"{attack}: this share of {clients} clients is none of them; give at least {0.5 / clients:.3g}, or numbers"
        )
    if count > left:
        raise FederationError(
            f"{attack}: this share is {count} of {clients} clients, and the attacks before it leave {left}: shares are "
            "disjoint. Give smaller shares; or name the clients, which may then have several attacks"
        )


def _number(attack: Attack, client: int | str, names: Sequence[str]) -> int:
    """The number of a client that is given by number or name."""
    if isinstance(client, int):
        if not 0 <= client < len(names):
            raise FederationError(f"{attack}: there is no client {client}; clients are numbered 0 to {len(names) - 1}")
        return client
    if client not in names:
        raise FederationError(f"{attack}: no client is named '{client}': {nearest(client, names)}")
    return names.index(client)
