"""Adversaries of one round: their honest updates in, the updates that they send out."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from lightning_fedbayes.adversaries import Attack, HonestMoments, Knowledge, UpdateAttack
from lightning_fedbayes.fusion.accumulator import check_structure
from lightning_fedbayes.messages import ClientUpdate
from lightning_fedbayes.plan import RoundPlan
from lightning_fedbayes.posterior import GaussianPosterior
from lightning_fedbayes.seeding import derive_seed


class RoundAdversaries:
    """Replaces the updates of the clients that attack.

    Of the honest clients only moments are kept, and those only if an adversary waits for them.

    Args:
        attacks: client number → its attacks, one after the other.
        plan: the plan of the round.
        previous: the global posterior that the clients started from.
        seed: seed of the federation.
    """

    def __init__(
        self, attacks: Mapping[int, Sequence[Attack]], plan: RoundPlan, previous: GaussianPosterior, seed: int
    ) -> None:
        self.previous = previous
        self.plan = plan
        self.seed = seed
        self._attackers = attacks.keys() & set(plan.cohort)
        self._attacks = {
            client: [attack for attack in attacks[client] if isinstance(attack, UpdateAttack)]
            for client in self._attackers
        }
        self._mean = previous.flatten()[0] if any(self._attacks.values()) else torch.zeros(0)
        self._observes = any(self.waits(client) for client in self._attackers)
        self._honest = HonestMoments(self._mean)

    def waits(self, client: int) -> bool:
        """Return True if a client sends its update only after those of the honest clients."""
        return any(attack.needs_honest for attack in self._attacks.get(client, ()))

    def send(self, update: ClientUpdate) -> ClientUpdate:
        """Return the update that a client sends; an honest client sends ``update`` itself.

        Raises:
            FusionError: names or shapes are not those of the global model.
        """
        attacks = self._attacks.get(update.client)
        if not attacks:
            return update
        check_structure(update.posterior, self.previous, f"client {update.client}")
        posterior = update.posterior.ordered(self.previous.names)
        for attack in attacks:
            posterior = attack.send(posterior, self._knowledge(update.client, attack))
        return replace(update, posterior=posterior)

    def observe(self, update: ClientUpdate) -> None:
        """Show the adversaries a valid update."""
        if self._observes and update.client not in self._attackers:
            self._honest.add(update.posterior.ordered(self.previous.names).flatten()[0])

    def _knowledge(self, client: int, attack: Attack) -> Knowledge:
        """Return the knowledge of ``client``, with a generator for this round, client and attack."""
        name = zlib.crc32(type(attack).__name__.encode())
        draws = torch.Generator().manual_seed(derive_seed(self.seed, "attack", self.plan.round, client, name))
        return Knowledge(self._mean, draws, self._honest, len(self.plan.cohort), len(self._attackers))


def held_back(update: ClientUpdate) -> ClientUpdate:
    """Return a copy that later batches do not overwrite."""
    buffers = {name: value.clone() for name, value in update.buffers.items()}
    return replace(update, posterior=update.posterior.clone(), buffers=buffers)
