"""Base classes of partitions, the split that a partition returns, and partitions that ignore labels."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lightning_fedbayes.core import errors, plots
from lightning_fedbayes.core.errors import LARGEST, PartitionError, is_whole, shown
from lightning_fedbayes.core.posterior import check_tensor
from lightning_fedbayes.core.seeding import derive_seed

Array = NDArray[Any]
LabelSource = str | Sequence[int] | Callable[[Any], Any] | Tensor | None
"""Source of a partition's labels: a column's name, a label per example, a function of the data set."""
MAX_ROWS, MAX_COLUMNS = 20, 12
"""Limits of a printed split, which is abbreviated beyond."""


@dataclass(frozen=True, eq=False)
class Split:
    """The examples of each client. Printing it shows a table clients × classes.

    Args:
        indices: one int64 vector per client, sorted. No example is in two of them.
        counts: examples per client and class, int64, shape (clients, classes). None without class labels.
        classes: the labels that head the columns of ``counts``.

    >>> split = Split.from_indices([[0, 3], [2, 1]], torch.tensor([7, 7, 4, 4]))
    >>> split.indices
    (tensor([0, 3]), tensor([1, 2]))
    >>> print(split)
    client      4      7  total
         0      1      1      2
         1      1      1      2
     total      2      2      4
    """

    indices: tuple[Tensor, ...]
    counts: Tensor | None = None
    classes: tuple[int, ...] = ()

    @classmethod
    def from_indices(cls, indices: Sequence[Any], labels: Tensor | None = None) -> "Split":
        """Make a split from any sequence of index lists. Count the classes if the labels are integers."""
        remedy = "give a list of indices for each client"
        errors.check_kind("indices", indices, list | tuple, remedy, error=PartitionError)
        if not indices:
            raise PartitionError(f"indices={shown(indices)}: {remedy}")
        ordered = tuple(as_labels(client).to(torch.int64).flatten().sort().values for client in indices)
        labels = None if labels is None else as_labels(labels)
        if labels is None or not is_class_label(labels):
            return cls(ordered)
        return cls(ordered, *counts_table(ordered, labels))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of examples of each client."""
        return tuple(len(client) for client in self.indices)

    def __repr__(self) -> str:
        classes = f" of {len(self.classes)} classes" if self.classes else ""
        sizes = f"{min(self.sizes):,} to {max(self.sizes):,} per client"
        return f"Split({len(self.sizes)} clients, {sum(self.sizes):,} examples{classes}, {sizes})"

    def __str__(self) -> str:
        table = self._table()
        width = max(len(cell) for row in table for cell in row)
        return "\n".join(" ".join(cell.rjust(width) for cell in row) for row in table)

    def _table(self) -> list[list[str]]:
        """Return the rows of the printed table: a head, the clients, and the sums."""
        totals = torch.tensor(self.sizes).unsqueeze(1)
        parts = totals if self.counts is None else torch.cat([self.counts, totals], dim=1)
        body = torch.cat([parts, parts.sum(0, keepdim=True)]).tolist()
        head = ["client", *_abbreviate(list(map(str, self.classes)), MAX_COLUMNS), "total"]
        rows = []
        for name, row in zip([*range(len(self.sizes)), "total"], body):
            rows.append([str(name), *_abbreviate(list(map(str, row[:-1])), MAX_COLUMNS), str(row[-1])])
        return [head, *_abbreviate(rows[:-1], MAX_ROWS), rows[-1]]

    def plot(self) -> Figure:
        """Draw a heat map of clients × classes, or of the sizes if there are no class labels."""
        if self.counts is None:
            return plots.client_heatmap(torch.tensor(self.sizes).unsqueeze(1), ("all",))
        return plots.client_heatmap(self.counts, self.classes)


def counts_table(indices: Sequence[Tensor], labels: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Count the examples per client and class.

    Args:
        indices: one int64 vector per client.
        labels: integers, shape (examples,). Gaps between the labels are allowed.

    Returns: counts of shape (clients, classes), and the classes that occur in ``labels``, ascending.

    >>> counts_table([torch.tensor([0, 1]), torch.tensor([2])], torch.tensor([5, 9, 9]))
    (tensor([[1, 1],
            [0, 1]]), (5, 9))
    """
    for client in indices:
        if client.numel() and not 0 <= int(client.min()) <= int(client.max()) < len(labels):
            given = f"indices from {int(client.min())} to {int(client.max())}"
            raise PartitionError(f"{given} of {len(labels)} examples; they count from 0")
    classes, inverse = torch.unique(labels.detach().cpu(), return_inverse=True)
    counts = [torch.bincount(inverse[client], minlength=len(classes)) for client in indices]
    return torch.stack(counts), tuple(classes.tolist())


def is_class_label(labels: Tensor) -> bool:
    """Return True if ``labels`` holds one integer (or bool) per example."""
    return labels.ndim == 1 and not labels.is_floating_point() and not labels.is_complex()


def _abbreviate(items: list[Any], limit: int) -> list[Any]:
    if len(items) <= limit:
        return items
    gap = ["…"] * len(items[0]) if isinstance(items[0], list) else "…"
    return [*items[: limit - 4], gap, *items[-3:]]


class Partition(ABC):
    """Base class of partitions: rules that deal the examples of one data set out to clients.

    Subclass it and implement :meth:`deal`, or :meth:`LabelPartition.deal_classes` if it needs labels.

    Attributes:
        labels: where the labels come from if the data set does not say (see :class:`LabelPartition`). None here.
    """

    labels: LabelSource = None

    def split(self, labels: Tensor | ArrayLike | None, seed: int, num_examples: int | None = None) -> Split:
        """Deal the examples out. The same arguments give the same split (with one version of NumPy).

        Args:
            labels: class label of every example, shape (num_examples,). None if the partition does not need them.
            seed: seed of the federation. The draws are from its stream ``"partition"``.
            num_examples: number of examples, needed only without labels.

        Raises PartitionError: labels are missing or not integers, or the partition is impossible with these examples.
        """
        errors.check_at_least("seed", seed, -LARGEST, error=PartitionError)
        if num_examples is not None:
            errors.check_at_least("num_examples", num_examples, 0, error=PartitionError)
        labels = None if labels is None else as_labels(labels)
        if labels is not None and num_examples not in (None, len(labels)):
            remedy = "pass one label per example"
            raise PartitionError(f"num_examples is {num_examples}, but there are {len(labels)} labels; {remedy}")
        total = num_examples if labels is None else len(labels)
        dealt = self.deal(labels, total, np.random.default_rng(derive_seed(seed, "partition")))
        for client, indices in enumerate(dealt):
            if len(indices) == 0:
                need = "but each needs at least one; use fewer clients or more data"
                raise PartitionError(f"client {client} of {len(dealt)} would get none of the {total} examples, {need}")
        return Split.from_indices(dealt, labels)

    @abstractmethod
    def deal(self, labels: Tensor | None, num_examples: int | None, generator: np.random.Generator) -> Sequence[Array]:
        """Return the index arrays of all clients, pairwise disjoint, in any order.

        Args:
            labels: shape (num_examples,), or None if unknown.
            num_examples: number of examples to deal, None if unknown.
            generator: the only source of randomness.
        """


class LabelPartition(Partition):
    """Base class of partitions that need integer labels, because they deal by class.

    Attributes:
        labels: where the class of every example is found: the name of a column (an attribute of the data set, or a key
            or an attribute of its examples), one integer per example, or a function of the data set that returns these.
            None: its attribute ``targets``, ``labels`` or ``y``, or the second of two tensors of a ``TensorDataset``.
    """

    def __post_init__(self) -> None:
        """Bring ``labels`` into a form that compares and hashes."""
        if self.labels is not None and not isinstance(self.labels, str) and not callable(self.labels):
            object.__setattr__(self, "labels", tuple(as_labels(self.labels).tolist()))

    def split(self, labels: Tensor | ArrayLike | None, seed: int, num_examples: int | None = None) -> Split:
        """See :meth:`Partition.split`. Without ``labels`` it takes the partition's."""
        if labels is None and isinstance(self.labels, tuple):
            labels = self.labels
        return super().split(labels, seed, num_examples)

    def deal(self, labels: Tensor | None, num_examples: int | None, generator: np.random.Generator) -> Sequence[Array]:
        """Check the labels and call :meth:`deal_classes`."""
        if labels is None:
            remedy = "give labels= a column's name, one integer per example or a function, such as lambda data: "
            remedy += "data.tensors[1]; or use IIDPartition"
            raise PartitionError(f"{type(self).__name__} deals by label, but the labels are unknown (None); {remedy}")
        if not is_class_label(labels):
            need = f"{type(self).__name__} needs one integer class per example; bin a continuous target into classes"
            given = f"labels have dtype {labels.dtype} and shape {tuple(labels.shape)}"
            raise PartitionError(f"{given}, but {need} first, or use IIDPartition")
        return self.deal_classes(labels.detach().cpu().numpy(), generator)

    @abstractmethod
    def deal_classes(self, labels: Array, generator: np.random.Generator) -> Sequence[Array]:
        """Return the index arrays of all clients, given the integer label of every example, shape (num_examples,)."""


def as_labels(labels: Tensor | ArrayLike) -> Tensor:
    """Return labels as a tensor: of a list, a tensor, or anything that NumPy reads, such as a column of a table.

    Names become the numbers of their sorted set. Raise PartitionError for anything else.
    """
    try:
        values = read_labels(labels)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        what = f"labels of type {type(labels).__name__} cannot be read as numbers"
        raise PartitionError(f"{what} ({error}); give one integer per example") from None
    check_tensor("labels", values, error=PartitionError)
    if values.ndim == 0:
        raise PartitionError(f"labels={shown(labels)}: give one integer per example")
    return values


def read_labels(labels: Any) -> Tensor:
    """Return labels as a tensor, integers as int64, in the order of the examples, whatever index a table has."""
    if not isinstance(labels, Tensor) and hasattr(labels, "__array__"):
        labels = np.asarray(labels)
        labels = np.asarray(labels.tolist()) if labels.dtype == object else labels  # of numbers, or of names
        if labels.dtype.kind == "U":
            labels = np.unique(labels, return_inverse=True)[1]
    values = torch.as_tensor(labels)
    return values if values.is_floating_point() or values.is_complex() else values.long()


def check_enough(clients: int, num_examples: int | None) -> int:
    """Return the number of examples. Raise PartitionError if it is unknown or less than the number of clients."""
    if num_examples is None:
        raise PartitionError("neither labels nor num_examples were given; pass one of them")
    errors.check_at_least("num_examples", num_examples, 0, error=PartitionError)
    if clients > num_examples:
        what = f"{clients} clients cannot share {num_examples} examples, since each needs at least one"
        raise PartitionError(f"{what}; use fewer clients or more data")
    return num_examples


@dataclass(frozen=True)
class IIDPartition(Partition):
    """Shuffle all examples and cut them into equal parts. Sizes differ by at most one.

    Use it as the reference for label skew. It deals every example exactly once.

    Args:
        clients: number of clients K, at least 1 and at most the number of examples.

    >>> IIDPartition(clients=3).split(None, seed=0, num_examples=10).sizes
    (4, 3, 3)
    """

    clients: int

    def __post_init__(self) -> None:
        errors.check_at_least("clients", self.clients, 1, error=PartitionError)

    def deal(self, labels: Tensor | None, num_examples: int | None, generator: np.random.Generator) -> list[Array]:
        return np.array_split(generator.permutation(check_enough(self.clients, num_examples)), self.clients)


@dataclass(frozen=True)
class SizesPartition(Partition):
    """Shuffle all examples and give each client the stated number or fraction of them.

    Use it for quantity skew: clients that differ in the number of examples, not in their distribution. Examples beyond
    the stated sizes are left out.

    Args:
        sizes: all integers (numbers of examples, each at least 1), or all floats (fractions of the data, each
            above 0, sum at most 1. Cumulative fractions are rounded to whole examples).

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
            errors.check_number("a size", size, error=PartitionError)
        if len({isinstance(size, float) for size in self.sizes}) > 1:
            remedy = "give all numbers of examples (integers) or all fractions (floats)"
            raise PartitionError(f"sizes {shown(self.sizes)} mix integers and floats; {remedy}")
        if not all(size > 0 for size in self.sizes):
            raise PartitionError(f"sizes {shown(self.sizes)} must all be above 0; leave out clients that hold no data")
        if not self.fractional and not all(map(is_whole, self.sizes)):
            raise PartitionError(f"sizes={shown(self.sizes)}: give integers (numbers of examples) or floats, fractions")
        if self.fractional and sum(self.sizes) > 1 + 1e-9:
            what = f"fractions {shown(self.sizes)} sum to {sum(self.sizes):.6g}, but there is only 1 to share"
            raise PartitionError(f"{what}; lower them, or pass integers for numbers of examples")

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.sizes)

    @property
    def fractional(self) -> bool:
        """True if the sizes are fractions of the data."""
        return any(isinstance(size, float) for size in self.sizes)

    def deal(self, labels: Tensor | None, num_examples: int | None, generator: np.random.Generator) -> list[Array]:
        total = check_enough(self.clients, num_examples)
        ends = np.cumsum(self.sizes)
        if self.fractional:
            ends = np.floor(ends * total + 0.5).astype(np.int64)
        if ends[-1] > total:
            what = f"sizes {shown(self.sizes)} sum to {ends[-1]}, but there are {total} examples"
            raise PartitionError(f"{what}; lower the sizes, or pass fractions as floats")
        return np.split(generator.permutation(total)[: ends[-1]], ends[:-1])
