"""Clients whose data are drawn from one distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightning_fedbayes.partition.base import Array, Partition, check_clients, check_enough


@dataclass(frozen=True)
class IIDPartition(Partition):
    """Shuffle all examples and cut them into equal parts; sizes differ by at most one.

    Use it as the reference that label skew is compared with. Every example is dealt exactly once.

    Args:
        clients: number of clients K, at least 1 and at most the number of examples.

    >>> IIDPartition(clients=3).split(None, seed=0, num_examples=10).sizes
    (4, 3, 3)
    """

    clients: int

    def __post_init__(self) -> None:
        check_clients(self.clients)

    def deal(self, labels: Tensor | None, num_examples: int | None, generator: np.random.Generator) -> list[Array]:
        """Equal parts of one permutation."""
        return np.array_split(generator.permutation(check_enough(self.clients, num_examples)), self.clients)
