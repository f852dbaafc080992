"""Clients that see only a few classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_fedbayes.errors import PartitionError
from lightning_fedbayes.partition.base import Array, LabelPartition, check_clients


@dataclass(frozen=True)
class ClassPartition(LabelPartition):
    """Each client holds exactly m classes (quantity-based label imbalance).

    The data are sorted by class and cut into K·m shards, each of a single class; each client gets m shards of
    different classes, at random. Classes of equal size get equally many shards, as in the source (10 classes of
    5,000 and K·m = 20: 20 shards of 2,500). Larger classes get more, so that the largest shard is as small as
    possible. Every example is dealt exactly once.

    Use it for the hardest label skew. K·m must be at least the number of classes, or some class would have no client.

    Args:
        clients: number of clients K.
        classes_per_client: m, from 1 to the number of classes.

    Source: Federated Bayesian deep learning (2024) §3.1, after Li et al. (2022).

    >>> import torch
    >>> print(ClassPartition(clients=3, classes_per_client=2).split(torch.tensor([0, 1, 2] * 4), seed=0))
    client |  0  1  2 | total
         0 |  0  2  2 |     4
         1 |  2  0  2 |     4
         2 |  2  2  0 |     4
     total |  4  4  4 |    12
    """

    clients: int
    classes_per_client: int = 2

    def __post_init__(self) -> None:
        check_clients(self.clients)
        if self.classes_per_client < 1:
            raise PartitionError(f"classes_per_client is {self.classes_per_client}; a client holds at least 1 class")

    def deal_classes(self, labels: Array, generator: np.random.Generator) -> list[Array]:
        """Shards of one class each, dealt so that no client gets two of the same class."""
        classes, sizes = np.unique(labels, return_counts=True)
        shards = self._shards_of_classes(sizes, generator)
        stacks = [np.array_split(generator.permutation(np.flatnonzero(labels == label)), number)
                  for label, number in zip(classes, shards)]
        hands: list[Array] = [np.empty(0, np.int64)] * self.clients
        for client, held in deal_distinct(shards, self.clients, self.classes_per_client, generator).items():
            hands[client] = np.concatenate([stacks[c].pop() for c in held])
        return hands

    def _shards_of_classes(self, sizes: Array, generator: np.random.Generator) -> Array:
        """How many shards each class is cut into: K·m in all, from 1 to K per class, never an empty one."""
        wanted, most = self.clients * self.classes_per_client, np.minimum(sizes, self.clients)
        if self.classes_per_client > len(sizes):
            raise PartitionError(
                f"classes_per_client is {self.classes_per_client}, but the data have {len(sizes)} classes; lower it"
            )
        if wanted < len(sizes):
            raise PartitionError(
                f"{self.clients} clients × {self.classes_per_client} classes cover only {wanted} of the {len(sizes)} "
                "classes; raise clients or classes_per_client"
            )
        if wanted > most.sum():
            raise PartitionError(
                f"{self.clients} clients × {self.classes_per_client} classes need {wanted} shards, but classes of "
                f"{sizes.tolist()} examples give only {most.sum()}; lower clients or classes_per_client"
            )
        shards, tie = np.ones_like(sizes), generator.permutation(len(sizes))
        for _ in range(wanted - len(sizes)):
            largest = np.where(shards < most, sizes / shards, -1.0)
            shards[max(range(len(sizes)), key=lambda c: (largest[c], tie[c]))] += 1
        return shards


def deal_distinct(
    shards: Array, clients: int, per_client: int, generator: np.random.Generator
) -> dict[int, Array]:
    """Client → ``per_client`` different classes, using up ``shards`` (how often each class is to be dealt).

    Clients are served in random order. A class with as many shards left as there are clients left must be taken
    now, or it could not be used up; the others are drawn in proportion to their shards. This never gets stuck.
    """
    left, held = shards.copy(), {}
    for served, client in enumerate(generator.permutation(clients)):
        forced = np.flatnonzero(left == clients - served)
        chance = np.where(left < clients - served, left, 0).astype(float)
        free = per_client - len(forced)
        drawn = generator.choice(len(left), free, replace=False, p=chance / chance.sum()) if free else []
        held[int(client)] = np.concatenate([forced, drawn]).astype(np.int64)
        left[held[int(client)]] -= 1
    return held
