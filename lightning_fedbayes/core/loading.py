"""Data sets and batches of clients, as a loader's worker processes have them.

A worker that is spawned imports what its data set needs. From here that is only torch. With Lightning, which other
rooms import, a worker takes three times as long to start.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fedbayes.core.errors import sendable
from lightning_fedbayes.core.seeding import derive_seed, seed_host


class FailedBatch:
    """Stand-in for a batch that could not be loaded, with the error that the client's data set raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Parts(Sequence[Dataset]):
    """Subsets of one data set, int64 ``indices`` of each client, made when asked for: a million take no memory."""

    def __init__(self, dataset: Dataset, indices: Sequence[Tensor]) -> None:
        self.dataset = dataset
        self.length = len(dataset)  # pyright: ignore[reportArgumentType]
        self.rows = torch.cat([torch.zeros(0, dtype=torch.int64), *indices])
        self.ends = torch.tensor([0, *map(len, indices)]).cumsum(0)
        self._last: tuple[int, Dataset | None] = (-1, None)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return tuple(self[each] for each in range(*client.indices(len(self))))
        client = range(len(self))[client]
        if self._last[0] != client:  # a loader asks for one client's examples again and again
            self._last = client, Subset(self.dataset, self.rows_of(client).tolist())
        return self._last[1]

    def rows_of(self, client: int) -> Tensor:
        """Return the examples of a client, int64."""
        start, stop = self.ends[client : client + 2].tolist()
        return self.rows[start:stop]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of examples of each client."""
        return tuple(self.ends.diff().tolist())


class TensorsOfClients(Sequence[Any]):
    """Tensors and rows of each client's data by :func:`tensors_of`, of :class:`Parts` when asked for.

    Empty if the data of any client are not tensors in memory. They are read anew when asked for, since hooks may have
    replaced tensors, or the rows of a subset; those of one that is partitioned when they are marked as ``is_stale``.
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._parts = datasets if isinstance(datasets, Parts) else None
        self._datasets = datasets if self._parts is None else [self._parts.dataset]
        found = [tensors_of(each) for each in self._datasets]
        self._found = found if all(each is not None for each in found) else []
        self._length = len(datasets) if self._found else 0
        self.is_stale = False

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, client: Any) -> Any:
        number = client if self._parts is None else 0
        dataset: Any = self._datasets[number]
        if type(dataset) is TensorDataset:
            tensors, rows = dataset.tensors, None
        else:
            if self.is_stale or self._parts is None:
                self._found[number], self.is_stale = tensors_of(dataset), False
            tensors, rows = self._found[number]  # pyright: ignore[reportGeneralTypeIssues]
        if self._parts is None:
            return tensors, rows
        own = self._parts.rows_of(range(self._length)[client])
        return tensors, own if rows is None else rows[own]

    @property
    def shapes(self) -> set[tuple[torch.Size, ...]]:
        """Shapes of single examples."""
        return {tuple(tensor.shape[1:] for tensor in each[0]) for each in self._found if each is not None}


def tensors_of(dataset: Dataset) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """Return tensors of a ``TensorDataset`` or a ``Subset`` of one, and its rows, None for all. None for other data."""
    if type(dataset) is TensorDataset:
        return dataset.tensors, None
    if type(dataset) is Subset:
        inner = tensors_of(dataset.dataset)
        if inner is not None:
            tensors, rows = inner
            picked = torch.as_tensor(dataset.indices, dtype=torch.int64)
            return tensors, picked if rows is None else rows[picked]
    return None


class PlannedBatch(list):
    """A batch's example numbers, with the round, client and step that its random transforms are seeded by."""

    def __init__(self, indices: Sequence[int], round: int, client: int, step: int, dataset: int) -> None:
        super().__init__(indices)
        self.round, self.client, self.step, self.dataset = round, client, step, dataset

    def __reduce__(self) -> tuple:
        return PlannedBatch, (list(self), self.round, self.client, self.step, self.dataset)


class ReproducibleDataset(Dataset):
    """All clients' data sets. Every batch is loaded and collated under its own random state."""

    def __init__(self, datasets: Sequence[Dataset], collate: Callable, seed: int) -> None:
        self.datasets = datasets
        self.collate = collate
        self.seed = seed

    def __len__(self) -> int:
        return sum(len(dataset) for dataset in self.datasets)  # pyright: ignore[reportArgumentType]

    def __getitems__(self, batch: PlannedBatch) -> Any:
        """Return one collated batch, or a :class:`FailedBatch`."""
        state = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
        seed_host(derive_seed(self.seed, "loading", batch.round, batch.client, batch.step))
        dataset = self.datasets[batch.dataset]
        try:
            read = getattr(dataset, "__getitems__", None)  # of a whole batch, which torch's loaders prefer, too
            return self.collate(read(list(batch)) if read else [dataset[index] for index in batch])
        except Exception as error:
            return FailedBatch(sendable(error))
        finally:
            random.setstate(state[0])
            np.random.set_state(state[1])
            torch.random.set_rng_state(state[2])


def loaded(batch: Any) -> Any:
    """Return a batch that the data set has collated already."""
    return batch
