"""What every partition shares: the checks, the seed, and the step from arrays to a split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lightning_fedbayes.errors import PartitionError
from lightning_fedbayes.partition.split import Split, is_class_label
from lightning_fedbayes.seeding import derive_seed

Array = NDArray[Any]


class Partition(ABC):
    """A way to deal the examples of one data set out to clients.

    To write your own, subclass it and implement :meth:`deal`, or :meth:`LabelPartition.deal_classes` if it deals
    by class.
    """

    def split(self, labels: Tensor | ArrayLike | None, seed: int, num_examples: int | None = None) -> Split:
        """Deal the examples out: the same arguments give the same split (for one version of NumPy).

        Args:
            labels: class label of every example, shape (num_examples,); or None where the partition needs none.
            seed: the federation's seed; its stream ``"partition"`` is used.
            num_examples: number of examples; needed only without labels.

        Raises:
            PartitionError: labels missing or not integers, or examples that cannot be dealt out as asked.
        """
        labels = None if labels is None else as_labels(labels)
        if labels is not None and num_examples not in (None, len(labels)):
            raise PartitionError(
                f"num_examples is {num_examples}, but there are {len(labels)} labels; pass one label per example"
            )
        total = num_examples if labels is None else len(labels)
        dealt = self.deal(labels, total, np.random.default_rng(derive_seed(seed, "partition")))
        for client, indices in enumerate(dealt):
            if len(indices) == 0:
                raise PartitionError(
                    f"client {client} of {len(dealt)} would get none of the {total} examples, but each needs at least "
                    "one; use fewer clients or more data"
                )
        return Split.from_indices(dealt, labels)

    @abstractmethod
    def deal(self, labels: Tensor | None, num_examples: int | None, generator: np.random.Generator) -> Sequence[Array]:
        """Index arrays of all clients, pairwise disjoint, in any order.

        Args:
            labels: shape (num_examples,), or None if unknown.
            num_examples: number of examples to deal, None if unknown.
            generator: the only source of randomness.
        """


class LabelPartition(Partition):
    """A partition that deals by class and so cannot do without integer labels."""

    def deal(self, labels: Tensor | None, num_examples: int | None, generator: np.random.Generator) -> Sequence[Array]:
        """Index arrays of all clients, from :meth:`deal_classes`."""
        if labels is None:
            raise PartitionError(
                f"{type(self).__name__} deals by label, but the labels are unknown (None); give the data set an "
                "integer attribute `targets` or `labels` with one entry per example, or use IIDPartition"
            )
        if not is_class_label(labels):
            raise PartitionError(
                f"labels have dtype {labels.dtype} and shape {tuple(labels.shape)}, but {type(self).__name__} needs "
                "one integer class per example; bin a continuous target into classes first, or use IIDPartition"
            )
        return self.deal_classes(labels.detach().cpu().numpy(), generator)

    @abstractmethod
    def deal_classes(self, labels: Array, generator: np.random.Generator) -> Sequence[Array]:
        """Index arrays of all clients, given the integer label of every example, shape (num_examples,)."""


def as_labels(labels: Tensor | ArrayLike) -> Tensor:
    """Labels, also a list or an array, as a tensor; PartitionError if they are no numbers."""
    try:
        return torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PartitionError(
            f"labels of type {type(labels).__name__} cannot be read as numbers ({error}); give one integer per example"
        ) from None


def check_clients(clients: int) -> None:
    """Raise PartitionError unless ``clients`` is a whole number of at least 1."""
    if clients < 1 or clients != int(clients):
        raise PartitionError(f"clients is {clients}; a federation has a whole number of clients, at least 1")


def check_enough(clients: int, num_examples: int | None) -> int:
    """The number of examples; PartitionError if it is unknown or there are more clients than examples."""
    if num_examples is None:
        raise PartitionError("neither labels nor num_examples were given; pass one of them")
    if clients > num_examples:
        raise PartitionError(
            f"{clients} clients cannot share {num_examples} examples, since each needs at least one; "
            "use fewer clients or more data"
        )
    return num_examples
