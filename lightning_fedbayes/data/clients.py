"""Clients of a federation: a data set divided by a partition, or a data set that comes in parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from numbers import Integral
from statistics import median
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, random_split

from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import LARGEST, FederationError, PartitionError, listed, nearest, raised_as, shown
from lightning_fedbayes.core.loading import Parts
from lightning_fedbayes.core.seeding import generator
from lightning_fedbayes.core.tables import MOST_ROWS
from lightning_fedbayes.data.partition import Partition
from lightning_fedbayes.data.partition.base import LabelSource, as_labels, counts_table, is_class_label, read_labels

LABEL_ATTRIBUTES = ("targets", "labels", "y")


def labels_of(dataset: Dataset[Any], source: LabelSource = None) -> Tensor | None:
    """Return the integer class label of every example, or None if they cannot be known without loading examples.

    It looks for an attribute ``targets``, ``labels`` or ``y``, takes the second of two tensors of a TensorDataset, and
    looks into Subset and ConcatDataset. Anything but an integer or a name per example (real targets, masks) is None.

    Args:
        dataset: map-style.
        source: where to find them instead. See :class:`~lightning_fedbayes.data.partition.base.LabelPartition`.

    Raises PartitionError: ``source`` is not a column, or does not give one number per example.
    Returns: integers, shape (examples,), in the order of the data set, or None.

    >>> data = TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 2, 1]))
    >>> labels_of(Subset(data, [3, 2]))
    tensor([1, 2])
    """
    check_dataset("dataset", dataset)
    if source is not None:
        return _labels_from(dataset, source)
    if isinstance(dataset, Subset):
        labels = labels_of(dataset.dataset)
        with raised_as(FederationError, "a Subset has no such labels", "give indices of the data set inside"):
            return None if labels is None else labels[torch.as_tensor(dataset.indices, dtype=torch.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [labels_of(part) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return torch.cat(known) if len(known) == len(parts) else None
    if isinstance(dataset, TensorDataset):
        return _as_labels(dataset.tensors[1], len(dataset)) if len(dataset.tensors) == 2 else None
    for name in LABEL_ATTRIBUTES:
        labels = _as_labels(getattr(dataset, name, None), len(dataset))  # type: ignore[arg-type]
        if labels is not None:
            return labels
    return None


def _labels_from(dataset: Any, source: LabelSource) -> Tensor:
    if isinstance(source, str):
        values = _column(dataset, source)
    else:
        values = source(dataset) if callable(source) else source
    labels = as_labels(values)  # pyright: ignore[reportArgumentType]
    if labels.shape != (len(dataset),):
        what = f"labels={shown(source)} are of shape {tuple(labels.shape)}, and there are {len(dataset)} examples"
        raise PartitionError(f"{what}; give one integer for each")
    return labels


def _column(dataset: Any, name: str) -> Any:
    """Return the values of a column: an attribute of the data set, or of its examples, each of which is read once."""
    if isinstance(dataset, Subset):
        return as_labels(_column(dataset.dataset, name))[torch.as_tensor(dataset.indices, dtype=torch.int64)]
    if isinstance(dataset, ConcatDataset):
        return torch.cat([as_labels(_column(part, name)) for part in dataset.datasets])
    if name in (getattr(dataset, "column_names", None) or ()):  # a data set of Hugging Face
        return dataset[name]
    if hasattr(dataset, name):
        return getattr(dataset, name)
    return [_entry(dataset[number], name) for number in range(len(dataset))]


def _entry(example: Any, name: str) -> int:
    """Return the label in one example, a dict or an object such as a graph. Raise PartitionError without one."""
    if isinstance(example, Mapping):
        known, value = example.keys(), example.get(name)
    else:
        known, value = dir(example), getattr(example, name, None)
    if value is None:
        known = [each for each in map(str, known) if not each.startswith("_")]
        what = f"neither the data set nor its examples, each a {type(example).__name__}, have that column"
        raise PartitionError(f"labels='{name}': {what}: {nearest(name, known)}")
    return int(as_labels([value]).reshape(-1)[0])


def _as_labels(values: Any, length: int) -> Tensor | None:
    """Return ``values`` as a vector of ``length`` integers, or None if they are something else."""
    try:
        labels = read_labels(values)
    except (TypeError, ValueError, RuntimeError):  # names, ragged lists, methods, None
        return None
    return labels if labels.shape == (length,) and is_class_label(labels) else None


class ClientDatasets(ConcatDataset):
    """Real clients: one data set each, by name.

    Return a loader over it from ``train_dataloader`` and give :class:`~lightning_fedbayes.FederatedBayes` no
    partition. A plain :class:`torch.utils.data.ConcatDataset` works too. Its clients are then numbered.

    Args:
        datasets: client name → its map-style data set. A whole number, such as pandas' ``groupby`` has, becomes text.
        skip_empty: leave out clients without an example, and name them in the log. False: such a client stops a fit.

    Raises FederationError: not a dict of names and map-style data sets, an empty one, or one with two clients of one
    name; or with ``skip_empty``, no client has an example.

    >>> from torch.utils.data import TensorDataset
    >>> a, b = TensorDataset(torch.zeros(3, 2)), TensorDataset(torch.zeros(5, 2))
    >>> clients = ClientDatasets({"north": a, "south": b})
    >>> clients.names, len(clients["south"])
    (('north', 'south'), 5)
    """

    def __init__(self, datasets: Mapping[str, Dataset] | Mapping[int, Dataset], *, skip_empty: bool = False) -> None:
        if not isinstance(datasets, Mapping) or not datasets:
            raise FederationError(f"datasets={shown(datasets)}: give a dict, client name → map-style data set")
        errors.check_flag("skip_empty", skip_empty)
        named: dict[str, Any] = {}
        for key, dataset in datasets.items():
            check_dataset(f"the data set of client {key}", dataset)
            if not isinstance(key, str | Integral) or isinstance(key, bool):
                raise FederationError(f"{shown(key)} is no name of a client: give a string, or a whole number")
            name = str(key)
            if name in named:
                raise FederationError(f"two clients have the name '{name}', as a string and as a number: rename one")
            named[name] = dataset
        if skip_empty:
            empty = [name for name, dataset in named.items() if not len(dataset)]
            if len(empty) == len(named):
                raise FederationError(f"none of the {len(named)} clients has an example: {listed(empty)}")
            if empty:
                rank_zero_info(f"Clients without an example, left out: {listed(empty)}.")
            named = {name: dataset for name, dataset in named.items() if len(dataset)}
        super().__init__(list(named.values()))
        self.names = tuple(named)

    def __getitem__(self, index: int | str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return an example by its number among all, or the data set of the client of a name."""
        if not isinstance(index, str):
            return super().__getitem__(index)
        if index not in self.names:
            raise FederationError(f"there is no client '{index}': {nearest(index, self.names)}")
        return self.datasets[self.names.index(index)]


def hold_out(clients: ClientDatasets, fraction: float = 0.2, seed: int = 0) -> tuple[ClientDatasets, ClientDatasets]:
    """Divide every client's data at random: what it trains on, and what it is scored on.

    Args:
        clients: name → map-style data set.
        fraction: of each client's examples that are held out, in (0, 1), rounded to a whole number from 1 to all but 1.
        seed: of the draws. A client's do not depend on the other clients.

    Returns: the rest, and the held-out examples, for all clients.
    Raises FederationError: ``fraction`` is out of range, or a client has fewer than two examples.
    """
    errors.check_kind("clients", clients, ClientDatasets, "give a ClientDatasets of the clients' own data")
    errors.check_number("fraction", fraction, "(0, 1)", why="the share that is held out")
    errors.check_at_least("seed", seed, -LARGEST)
    rest, held = {}, {}
    for number, (name, dataset) in enumerate(zip(clients.names, clients.datasets, strict=True)):
        size = len(dataset)  # pyright: ignore[reportArgumentType]
        if size < 2:
            raise FederationError(f"client {name} has {size} examples, too few to hold one out: leave the client out")
        count = min(max(round(fraction * size), 1), size - 1)
        draws = generator(seed, "held out", client=number)
        rest[name], held[name] = random_split(dataset, [size - count, count], draws)
    return ClientDatasets(rest), ClientDatasets(held)


def check_dataset(name: str, dataset: Any) -> None:
    """Raise FederationError unless a data set is map-style: it has a length and examples by number."""
    by_number = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and getattr(dataset, "ndim", 1)
    if isinstance(dataset, IterableDataset | type | str | Mapping) or not by_number:
        remedy = f"{shown(dataset)} is no map-style data set, with a length and examples by number; give one"
        raise FederationError(f"{name}: {remedy}")


@dataclass(frozen=True)
class Clients:
    """The clients of a federation and their data.

    Args:
        names: one per client.
        datasets: one map-style data set per client.
        counts: examples of each class that each client holds, shape (clients, classes). None without labels.
        classes: the classes of the columns of ``counts``.
    """

    names: tuple[str, ...]
    datasets: Sequence[Dataset]
    counts: Tensor | None = None
    classes: tuple = ()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of examples of each client."""
        if isinstance(self.datasets, Parts):
            return self.datasets.sizes
        return tuple(len(dataset) for dataset in self.datasets)  # pyright: ignore[reportArgumentType]

    @property
    def described_sizes(self) -> list[int] | dict[str, Any]:
        """Sizes for loggers: of more than 100 clients a summary, with a digest of all sizes.

        >>> Clients((), (range(3), range(1))).described_sizes
        [3, 1]
        """
        sizes = self.sizes
        if len(sizes) <= MOST_ROWS:
            return list(sizes)
        digest = sha256(",".join(map(str, sizes)).encode()).hexdigest()[:16]
        ends = {"smallest": min(sizes), "median": median(sizes), "largest": max(sizes)}
        return {**ends, "total": sum(sizes), "digest": digest}

    def __len__(self) -> int:
        return len(self.datasets)


def clients_of(dataset: Dataset, partition: Partition | None, seed: int) -> Clients:
    """Return the clients into which ``partition`` divides ``dataset``. Without a partition, one client per part.

    Args:
        dataset: map-style, with a length.
        partition: divides the examples. None if ``dataset`` is a ``ConcatDataset`` with one part per client.
        seed: seed of the partition.

    Raises:
        FederationError: neither partition nor parts, a partition of parts, or a client or a class without an example.
        PartitionError: the partition cannot be made.
    """
    check_dataset("the training data", dataset)
    remedy = "give one, such as IIDPartition(10)"
    errors.check_kind("partition", partition, Partition | None, remedy, error=PartitionError)
    if partition is None:
        if not isinstance(dataset, ConcatDataset):
            remedy = "Pass FederatedBayes(partition=DirichletPartition(clients=10, alpha=0.5)), or train on a"
            parts = "ClientDatasets (or ConcatDataset) with one data set per client"
            who = f"the training data are one {type(dataset).__name__}: who are the clients?"
            raise FederationError(f"{who} {remedy} {parts}")
        datasets = tuple(dataset.datasets)
        names = getattr(dataset, "names", None) or tuple(str(k) for k in range(len(datasets)))
        labels, (counts, classes) = labels_of(dataset), (None, ())
        if labels is not None:
            sizes = [len(part) for part in datasets]  # pyright: ignore[reportArgumentType]
            counts, classes = counts_table(torch.arange(len(labels)).split(sizes), labels)
    else:
        if isinstance(dataset, ClientDatasets):
            what = f"the training data are a ClientDatasets of {len(dataset.names)} clients, and there is a partition"
            remedy = "drop the partition, or give a plain ConcatDataset to deal all examples out"
            raise FederationError(f"{what} ({shown(partition)}): {remedy}")
        split = partition.split(labels_of(dataset, partition.labels), seed, num_examples=len(dataset))  # pyright: ignore[reportArgumentType]
        datasets = Parts(dataset, split.indices)
        names = tuple(str(k) for k in range(len(datasets)))
        counts, classes = split.counts, split.classes
    clients = Clients(tuple(names), datasets, counts, classes)
    check_classes(clients)
    empty = [name for name, size in zip(clients.names, clients.sizes, strict=True) if size == 0]
    if empty:
        remedy = "leave them out (skip_empty=True of ClientDatasets) or give them data"
        raise FederationError(f"clients without an example: {listed(empty)}; {remedy}")
    return clients


def check_classes(clients: Clients) -> None:
    """Raise FederationError if no client has an example of some class. Warn if the class numbers have gaps."""
    if clients.counts is None:
        return
    absent = [clients.classes[column] for column in (clients.counts.sum(0) == 0).nonzero().flatten().tolist()]
    if absent:
        what = f"no client has an example of class {listed(absent)}, and a network that never sees it cannot tell it"
        raise FederationError(f"{what}: leave it out of the data, or let the partition deal out more examples")
    known = {int(each) for each in clients.classes}
    gaps = sorted(set(range(max(known))) - known) if min(known) == 0 and max(known) < 2 * len(known) else []
    if gaps:  # labels that do not count from 0 are names
        why = "if the network has outputs for it, they will not learn it"
        rank_zero_warn(f"no client has an example of class {listed(gaps)}: {why}")
