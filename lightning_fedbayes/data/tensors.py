"""Small data sets in memory, without a test split of their own."""

from __future__ import annotations

from torch.utils.data import TensorDataset

from lightning_fedbayes.data.splits import SplitDataModule
from lightning_fedbayes.errors import FederationError


class TensorDataModule(SplitDataModule):
    """A data module over two TensorDatasets, for training and for everything else.

    A subclass fills ``train`` and ``validation`` in ``setup``. There is no third split: test and predict use the
    validation examples, which are held out from training but not from decisions such as early stopping.

    Args:
        batch_size: examples per batch.
        validation_fraction: share of the examples that is held out, strictly between 0 and 1.
        seed: seed of the split.
    """

    train: TensorDataset  # pyright: ignore[reportIncompatibleVariableOverride]
    validation: TensorDataset  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, batch_size: int, validation_fraction: float, seed: int) -> None:
        super().__init__(batch_size)
        if not 0 < validation_fraction < 1:
            raise FederationError(
                f"validation_fraction is {validation_fraction}; it lies strictly between 0 and 1, so that there is "
                "something to train on and something to validate with"
            )
        self.validation_fraction = validation_fraction
        self.seed = seed

    @property
    def test(self) -> TensorDataset:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The validation examples."""
        return self.validation
