"""Data modules over training, validation and test splits, and the order that makes a split stratified."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_fedbayes.core.errors import check_at_least, check_number

EVALUATION_BATCH = 256
"""Least number of examples per evaluation batch: scores do not depend on it, and large batches cost less."""


class SplitDataModule(L.LightningDataModule):
    """A data module over three data sets; a subclass fills ``train``, ``validation`` and ``test`` in ``setup``.

    Args:
        batch_size: examples per training batch.
        seed: of the splits; one that NumPy takes, too.
    """

    train: Dataset[Any]
    validation: Dataset[Any]
    test: Dataset[Any]

    def __init__(self, batch_size: int, seed: int = 0) -> None:
        super().__init__()
        check_at_least("batch_size", batch_size, 1)
        check_at_least("seed", seed, 0, 2**32 - 1)
        self.batch_size, self.seed = batch_size, seed

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled training batches."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Validation batches in fixed order."""
        return self._in_order(self.validation)

    def test_dataloader(self) -> DataLoader[Any]:
        """Test batches in fixed order."""
        return self._in_order(self.test)

    def predict_dataloader(self) -> DataLoader[Any]:
        """The test batches."""
        return self.test_dataloader()

    def _in_order(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=max(self.batch_size, EVALUATION_BATCH))


class TensorDataModule(SplitDataModule):
    """A data module over two TensorDatasets, for training and for everything else.

    A subclass fills ``train`` and ``validation`` in ``setup``. There is no third split: test and predict use the
    validation examples, which training does not see, but decisions such as early stopping do.

    Args:
        batch_size: examples per batch.
        validation_fraction: share of the examples that is held out, strictly between 0 and 1.
        seed: seed of the split.
    """

    train: TensorDataset  # pyright: ignore[reportIncompatibleVariableOverride]
    validation: TensorDataset  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, batch_size: int, validation_fraction: float, seed: int) -> None:
        super().__init__(batch_size, seed)
        check_number("validation_fraction", validation_fraction, "(0, 1)", why="both parts need examples")
        self.validation_fraction = validation_fraction

    @property
    def test(self) -> TensorDataset:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The validation examples."""
        return self.validation


def stratified_order(labels: Tensor, draws: torch.Generator) -> Tensor:
    """A random order of all examples; for every n, the first n have the class shares, to about one example per class.

    The examples of a class, in random order, are spread evenly over the whole order from a random start. So a smaller
    sample is a subset of a larger one.

    Args:
        labels: int64, not negative, shape (examples,).
        draws: the source of randomness.

    Returns: int64, shape (examples,).
    """
    shuffled = torch.randperm(len(labels), generator=draws)
    grouped = shuffled[labels[shuffled].argsort(stable=True)]
    sizes = labels.bincount()
    number = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    start = torch.rand(len(sizes), dtype=torch.float64, generator=draws).repeat_interleave(sizes)
    return grouped[((number + start) / sizes.repeat_interleave(sizes)).argsort(stable=True)]
