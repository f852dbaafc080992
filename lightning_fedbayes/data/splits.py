"""Data modules over training, validation and test splits. Two small data sets that come with scikit-learn."""

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedbayes.core.errors import check_at_least, check_flag, check_number

EVALUATION_BATCH = 256
"""Least number of examples per evaluation batch: it does not change scores, and large batches cost less."""


class SplitDataModule(L.LightningDataModule):
    """A data module over data sets that a subclass fills in ``setup``: ``train``, ``validation`` and perhaps ``test``.

    Without ``test``, test and predict use the validation examples, which training does not see, but decisions such as
    early stopping do.

    Args:
        batch_size: examples per training batch.
        seed: of the splits. One that NumPy takes, too.
        validation_fraction: share of the examples that ``setup`` holds out, strictly between 0 and 1.
    """

    train: Any
    validation: Any
    test: Any = None

    def __init__(self, batch_size: int, seed: int = 0, validation_fraction: float = 0.2) -> None:
        super().__init__()
        check_at_least("batch_size", batch_size, 1)
        check_at_least("seed", seed, 0, 2**32 - 1)
        check_number("validation_fraction", validation_fraction, "(0, 1)", why="both parts need examples")
        self.batch_size, self.seed, self.validation_fraction = batch_size, seed, validation_fraction

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled training batches."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Validation batches in fixed order."""
        return DataLoader(self.validation, batch_size=max(self.batch_size, EVALUATION_BATCH))

    def test_dataloader(self) -> DataLoader[Any]:
        """Test batches in fixed order."""
        data = self.validation if self.test is None else self.test
        return DataLoader(data, batch_size=max(self.batch_size, EVALUATION_BATCH))

    def predict_dataloader(self) -> DataLoader[Any]:
        """The test batches."""
        return self.test_dataloader()


class DigitsDataModule(SplitDataModule):
    """1,797 handwritten digits from scikit-learn, 10 classes, 64 grey values in [0, 1]. Needs no network.

    Inputs are float32 of shape (batch, 64) or, as images, (batch, 1, 8, 8). Labels int64. The split is stratified:
    every digit has the same share in training and validation. Test and predict use the validation examples.

    Args:
        batch_size, validation_fraction, seed: see :class:`SplitDataModule`.
        images: inputs as images with one channel instead of vectors.

    >>> digits = DigitsDataModule(batch_size=8)
    >>> digits.setup()
    >>> [tuple(tensor.shape) for tensor in next(iter(digits.train_dataloader()))]
    [(8, 64), (8,)]
    """

    num_classes = 10
    num_features = 64

    def __init__(
        self, batch_size: int = 16, validation_fraction: float = 0.2, seed: int = 0, images: bool = False
    ) -> None:
        super().__init__(batch_size, seed, validation_fraction)
        check_flag("images", images)
        self.save_hyperparameters(logger=False)
        self.images = images

    def setup(self, stage: str | None = None) -> None:
        """Load and split the data, the same way for every stage."""
        from sklearn import datasets, model_selection  # not above: its import takes 0.13 s

        inputs, labels = datasets.load_digits(return_X_y=True)
        options = {"test_size": self.validation_fraction, "random_state": self.seed}
        indices = model_selection.train_test_split(range(len(labels)), stratify=labels, **options)
        x = torch.as_tensor(inputs / 16, dtype=torch.float32)
        if self.images:
            x = x.view(-1, 1, 8, 8)
        y = torch.as_tensor(labels, dtype=torch.int64)
        self.train, self.validation = (TensorDataset(x[part], y[part]) for part in indices)


class DiabetesDataModule(SplitDataModule):
    """442 patients from scikit-learn, 10 measurements, one target: progression after a year. Needs no network.

    Inputs are float32 of shape (batch, 10), targets float32 of shape (batch, 1). Both are standardised with the mean
    and standard deviation of the training split (``target_mean``, ``target_std``). Test and predict use the validation
    examples.

    Arguments as of :class:`SplitDataModule`.

    >>> diabetes = DiabetesDataModule(batch_size=8)
    >>> diabetes.setup()
    >>> [tuple(tensor.shape) for tensor in next(iter(diabetes.train_dataloader()))]
    [(8, 10), (8, 1)]
    """

    num_features = 10
    num_targets = 1

    target_mean: float
    """Mean target of the training split, in original units. Known after ``setup``."""
    target_std: float
    """Standard deviation of the target in the training split, in original units. Known after ``setup``."""

    def __init__(self, batch_size: int = 16, validation_fraction: float = 0.2, seed: int = 0) -> None:
        super().__init__(batch_size, seed, validation_fraction)
        self.save_hyperparameters(logger=False)

    def setup(self, stage: str | None = None) -> None:
        """Load, split and standardise the data, the same way for every stage."""
        from sklearn import datasets, model_selection

        found = datasets.load_diabetes(return_X_y=True, scaled=False)
        inputs, targets = (torch.as_tensor(array) for array in found)
        options = {"test_size": self.validation_fraction, "random_state": self.seed}
        train, validation = model_selection.train_test_split(range(len(targets)), **options)
        targets = targets.unsqueeze(1)
        self.target_mean = targets[train].mean().item()
        self.target_std = targets[train].std(correction=0).item()
        x, y = (
            (each - each[train].mean(0)).div(each[train].std(0, correction=0)).float() for each in (inputs, targets)
        )
        self.train, self.validation = (TensorDataset(x[part], y[part]) for part in (train, validation))
