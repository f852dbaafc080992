"""Loaders over small data sets that are held in memory."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedbayes.errors import FederationError

EVALUATION_BATCH = 256
"""Examples per evaluation batch, at least: scores do not depend on it, and large batches cost less."""


class TensorDataModule(L.LightningDataModule):
    """A data module over two TensorDatasets, for training and for everything else.

    A subclass fills ``train`` and ``validation`` in ``setup``. There is no third split: test and predict use the
    validation examples, which are held out from training but not from decisions such as early stopping.

    Args:
        batch_size: examples per batch.
        validation_fraction: share of the examples that is held out, strictly between 0 and 1.
        seed: seed of the split.
    """

    train: TensorDataset
    validation: TensorDataset

    def __init__(self, batch_size: int, validation_fraction: float, seed: int) -> None:
        super().__init__()
        if not 0 < validation_fraction < 1:
            raise FederationError(
                f"validation_fraction is {validation_fraction}; it lies strictly between 0 and 1, so that there is "
                "something to train on and something to validate with"
            )
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.seed = seed

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled training batches."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Validation batches in fixed order."""
        return DataLoader(self.validation, batch_size=max(self.batch_size, EVALUATION_BATCH))

    def test_dataloader(self) -> DataLoader[Any]:
        """The validation batches."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        """The validation batches."""
        return self.val_dataloader()
