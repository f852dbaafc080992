"""All published splits of a data set side by side, and the shards of the clients."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from benchmarks.uci.sets import UCIDataModule

CLIENTS = 10


class Splits(NamedTuple):
    """Splits of one data set, each standardised on its own training examples.

    Attributes:
        train: inputs (examples, splits, features) and targets (examples, splits).
        test: likewise, of the examples that are scored.
        target_std: standard deviation of the target in training, in original units, shape (splits,).
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    target_std: Tensor

    @property
    def number(self) -> int:
        """Number of splits."""
        return len(self.target_std)

    @property
    def features(self) -> int:
        """Number of features of the inputs."""
        return self.train[0].shape[-1]

    def repeated(self, times: int) -> Splits:
        """Return all splits ``times`` times in a row, for networks that differ in something else."""
        train = self.train[0].repeat(1, times, 1), self.train[1].repeat(1, times)
        test = self.test[0].repeat(1, times, 1), self.test[1].repeat(1, times)
        return Splits(train, test, self.target_std.repeat(times))


def read_splits(
    directory: Path, dataset: str, limit: int | None = None, validation_fraction: float | None = None
) -> Splits:
    """Return the first ``limit`` published splits of a data set, or all.

    With ``validation_fraction``, that share of the training examples replaces the test examples, which are not used.
    """
    first = UCIDataModule(directory, dataset)
    modules = []
    for split in range(min(limit or first.num_splits, first.num_splits)):
        module = UCIDataModule(directory, dataset, split, validation_fraction=validation_fraction, seed=split)
        module.setup()
        modules.append(module)
    stds = torch.tensor([module.target_std for module in modules])
    scored = "test" if validation_fraction is None else "validation"
    return Splits(beside([m.train for m in modules]), beside([getattr(m, scored) for m in modules]), stds)


def beside(datasets: list[TensorDataset]) -> tuple[Tensor, Tensor]:
    """Return inputs (examples, splits, features) and targets (examples, splits), cut to the shortest split."""
    shortest = min(len(dataset) for dataset in datasets)
    inputs, targets = zip(*((x[:shortest], y[:shortest, 0]) for x, y in (dataset.tensors for dataset in datasets)))
    return torch.stack(inputs, 1), torch.stack(targets, 1)


def deal(train: tuple[Tensor, Tensor], seed: int, clients: int = CLIENTS) -> fb.ClientDatasets:
    """Deal out equal random shards: client k has the k-th shard of every split; an example is a row of all splits."""
    inputs, targets = train
    order = torch.rand(targets.shape, generator=torch.Generator().manual_seed(seed)).argsort(0)
    inputs, targets = inputs.gather(0, order.unsqueeze(-1).expand_as(inputs)), targets.gather(0, order)
    shards = zip(inputs.tensor_split(clients), targets.tensor_split(clients))
    return fb.ClientDatasets({f"client {k}": TensorDataset(x, y) for k, (x, y) in enumerate(shards)})
