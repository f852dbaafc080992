"""Loaders over data that come with a training, a validation and a test split."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Dataset

EVALUATION_BATCH = 256
"""Examples per evaluation batch, at least: scores do not depend on it, and large batches cost less."""


class SplitDataModule(L.LightningDataModule):
    """A data module over three data sets; a subclass fills ``train``, ``validation`` and ``test`` in ``setup``.

    Args:
        batch_size: examples per training batch.
    """

    train: Dataset[Any]
    validation: Dataset[Any]
    test: Dataset[Any]

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

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
