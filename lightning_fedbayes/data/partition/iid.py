"""Partitions that ignore labels: clients of equal or of given sizes, with data of one distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightning_fedbayes.core.errors import PartitionError, check_number, is_whole, shown
from lightning_fedbayes.data.partition.base import Array, Partition, check_clients, check_enough


@dataclass(frozen=True)
class IIDPartition(Partition):
    """Shuffle all examples and cut them into equal parts; sizes differ by at most one.

    Use it as the reference for label skew. Every example is dealt exactly once.

    Args:
        clients: number of clients K, at least 1 and at most the number of examples.

    >>> IIDPartition(clients=3).split(None, seed=0, num_examples=10).sizes
    (4, 3, 3)
    """

    clients: int

    def __post_init__(self) -> None:
        check_clients(self.clients)

    def deal(self, labels: Tensor | None, num_examples: int | None, generator: np.random.Generator) -> list[Array]:
        """Cut one permutation into equal parts."""
        return np.array_split(generator.permutation(check_enough(self.clients, num_examples)), self.clients)


@dataclass(frozen=True)
class SizesPartition(Partition):
    """Shuffle all examples and give each client the stated number or fraction of them.

    Use it for quantity skew: clients that differ in the number of examples, not in their distribution. Examples beyond
    the stated sizes are left out.

    Args:
        sizes: all integers (numbers of examples, each at least 1), or all floats (fractions of the data, each
            above 0, sum at most 1; cumulative fractions are rounded to whole examples).

    >>> SizesPartition((0.5, 0.25, 0.25)).split(None, seed=0, num_examples=10).sizes
    (5, 3, 2)
    >>> SizesPartition((6, 1)).split(None, seed=0, num_examples=10).sizes
    (6, 1)
    """

    sizes: tuple[int | float, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.sizes, Sequence) or isinstance(self.sizes, str | bytes) or not self.sizes:
            raise PartitionError(f"sizes={shown(self.sizes)}: give a number or a fraction of examples for each client")
        object.__setattr__(self, "sizes", tuple(self.sizes))
        for size in self.sizes:
            check_number("a size", size, error=PartitionError)
        if len({isinstance(size, float) for size in self.sizes}) > 1:
            raise PartitionError(
                f"sizes {shown(self.sizes)} mix integers and floats; give all numbers of examples (integers) or all "
                "fractions (floats)"
            )
        if not all(size > 0 for size in self.sizes):
            raise PartitionError(f"sizes {shown(self.sizes)} must all be above 0; leave out clients that hold no data")
        if not self.fractional and not all(map(is_whole, self.sizes)):
            raise PartitionError(f"sizes={shown(self.sizes)}: give integers (numbers of examples) or floats, fractions")
        if self.fractional and sum(self.sizes) > 1 + 1e-9:
            raise PartitionError(
                f"fractions {shown(self.sizes)} sum to {sum(self.sizes):.6g}, but there is only 1 to share; "
                "lower them, or pass integers for numbers of examples"
            )

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.sizes)

    @property
    def fractional(self) -> bool:
        """True if the sizes are fractions of the data."""
        return any(isinstance(size, float) for size in self.sizes)

    def deal(self, labels: Tensor | None, num_examples: int | None, generator: np.random.Generator) -> list[Array]:
        """Cut one permutation into consecutive parts."""
        total = check_enough(self.clients, num_examples)
        ends = np.cumsum(self.sizes)
        if self.fractional:
            ends = np.floor(ends * total + 0.5).astype(np.int64)
        if ends[-1] > total:
            raise PartitionError(
                f"sizes {shown(self.sizes)} sum to {ends[-1]}, but there are {total} examples; lower the sizes, or "
                "pass fractions as floats"
            )
        return np.split(generator.permutation(total)[: ends[-1]], ends[:-1])
