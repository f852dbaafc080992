"""Data sets of the studies by name."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from benchmarks.images.settings import Settings
from benchmarks.readers import ImageDataModule, ImageSet, stratified_order
from lightning_fedbayes.core.errors import FederationError, nearest
from lightning_fedbayes.data.splits import SplitDataModule

OFFLINE = "digits"
FILES: tuple[ImageSet, ...] = ("fashion_mnist", "mnist", "cifar10")
NAMES = (*FILES, OFFLINE)


class Digits(SplitDataModule):
    """scikit-learn's digits: 360 test examples, a training part cut to ``examples`` like the image files."""

    num_classes = 10
    shape = (1, 8, 8)

    def __init__(self, batch_size: int, validation_fraction: float | None, examples: int | None) -> None:
        super().__init__(batch_size)
        self.validation_fraction = validation_fraction
        self.examples = examples

    def setup(self, stage: str | None = None) -> None:
        """Split on the first call, the same way for every stage and seed."""
        if "train" in vars(self):
            return
        source = fb.DigitsDataModule()
        source.setup()
        inputs, labels = source.train.tensors
        count = min(len(labels), self.examples or len(labels))
        chosen = stratified_order(labels, torch.Generator().manual_seed(0))[:count]
        held_out = round((self.validation_fraction or 0) * count)
        self.validation, self.train = (
            TensorDataset(inputs[i], labels[i]) for i in chosen.split([held_out, count - held_out])
        )
        self.test = source.validation


def make_data(settings: Settings, folder: Path | None) -> ImageDataModule | Digits:
    """Return the data module of a cell; the split is the same for all seeds.

    Args:
        settings: of the cell.
        folder: contains a folder per data set, or the files of one data set; None: no files.

    Raises:
        FederationError: an unknown data set, or a missing folder or file.
    """
    name = settings.dataset
    if name == OFFLINE:
        return Digits(settings.batch_size, settings.validation_fraction, settings.examples)
    if name not in FILES:
        raise FederationError(f"unknown data set '{name}'; {nearest(name, NAMES)}")
    if folder is None:
        raise FederationError(f"{name} is read from files: give --data DIR")
    directory = folder / name if (folder / name).is_dir() else folder
    return ImageDataModule(
        next(each for each in FILES if each == name),
        directory,
        batch_size=settings.batch_size,
        validation_fraction=settings.validation_fraction,
        examples=settings.examples,
    )


def part_for_start(data: ImageDataModule | Digits, share: float, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return training and validation examples, 9 to 1, from a stratified ``share`` of the training part."""
    assert isinstance(data.train, TensorDataset)
    inputs, labels = data.train.tensors
    chosen = stratified_order(labels, torch.Generator().manual_seed(seed))[: max(20, round(share * len(labels)))]
    cut = max(1, len(chosen) // 10)
    train, validation = chosen[cut:], chosen[:cut]
    return TensorDataset(inputs[train], labels[train]), TensorDataset(inputs[validation], labels[validation])
