"""Files of the benchmarks: images of MNIST, FashionMNIST and CIFAR-10, and tables of numbers."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.core.seeding import generator
from lightning_fedbayes.data.splits import SplitDataModule

ImageSet = Literal["mnist", "fashion_mnist", "cifar10"]
CIFAR_SHAPE = (3, 32, 32)


def stratified_order(labels: Tensor, draws: torch.Generator) -> Tensor:
    """Draw an order of all examples in which the first n, for any n, have the class shares, to about one per class.

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


class LabelledImages(NamedTuple):
    """Images, uint8 of shape (examples, channels, height, width), and their labels, int64."""

    images: Tensor
    labels: Tensor


def find(folder: Path, name: str) -> Path:
    """Return the file of this name, plain or packed with gzip, nearest to the top of ``folder``."""
    found = sorted(folder.rglob(f"{name}*"), key=lambda path: (len(path.parts), path))
    found = [path for path in found if path.name in (name, f"{name}.gz")]
    if not found:
        raise FederationError(f"{folder} holds no file {name}; give the folder of the data set")
    return found[0]


def read_idx(path: Path) -> Tensor:
    """Return the bytes of an IDX file, in its shape."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    shape = np.frombuffer(raw, ">u4", raw[3], 4)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * len(shape)).reshape(*map(int, shape)).copy())


def files_of(name: ImageSet, folder: Path) -> list[list[Path]]:
    """Return the files of the training and of the test part.

    Args:
        name: of the data set; MNIST and FashionMNIST are IDX files, CIFAR-10 its binary version.
        folder: holds the files, or the folder of the data set.
    """
    if name == "cifar10":
        names = [[f"data_batch_{number}.bin" for number in range(1, 6)], ["test_batch.bin"]]
    else:
        inside = folder / {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}[name]
        folder = inside if inside.is_dir() else folder
        names = [[f"{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")] for part in ("train", "t10k")]
    return [[find(folder, each) for each in part] for part in names]


def read_images(name: ImageSet, folder: Path) -> tuple[LabelledImages, LabelledImages]:
    """Return the training and the test part of a data set, as they are stored; see :func:`files_of`."""
    if name == "cifar10":
        raw = [b"".join(file.read_bytes() for file in part) for part in files_of(name, folder)]
        rows = [torch.frombuffer(bytearray(part), dtype=torch.uint8).view(-1, 3073) for part in raw]
        train, test = (LabelledImages(part[:, 1:].reshape(-1, *CIFAR_SHAPE), part[:, 0].long()) for part in rows)
    else:
        parts = [[read_idx(file) for file in part] for part in files_of(name, folder)]
        train, test = (LabelledImages(images[:, None], labels.long()) for images, labels in parts)
    return train, test


class ImageDataModule(SplitDataModule):
    """Images in memory; every channel is standardised over all pixels of the training examples.

    Args:
        name: of the data set.
        directory: see :func:`read_images`.
        batch_size: images per training batch.
        validation_fraction: share of the training images that is held out, stratified; None validates with the test
            part, as the papers do.
        examples: training images to use, those for validation among them; None: all.
        seed: of both choices.
    """

    num_classes = 10

    def __init__(
        self,
        name: ImageSet,
        directory: Path,
        batch_size: int = 64,
        validation_fraction: float | None = 0.1,
        examples: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, seed)
        files_of(name, directory)
        self.source: ImageSet = name
        self.directory = directory
        self.validation_fraction, self.examples = validation_fraction, examples
        self.shape = CIFAR_SHAPE if name == "cifar10" else (1, 28, 28)

    def setup(self, stage: str | None = None) -> None:
        """Read, split and standardise the images, once and the same way for every stage."""
        if "train" in vars(self):
            return
        stored, test = read_images(self.source, self.directory)
        chosen = stratified_order(stored.labels, generator(self.seed, "partition"))[: self.examples]
        held_out = 0 if self.validation_fraction is None else max(1, round(self.validation_fraction * len(chosen)))
        validation, train = (
            LabelledImages(*(part[rows.sort().values] for part in stored))
            for rows in (chosen[:held_out], chosen[held_out:])
        )
        pixels = train.images.transpose(0, 1).flatten(1).double() / 255
        mean, std = (each.view(-1, 1, 1) for each in (pixels.mean(1), pixels.std(1, correction=0)))

        def standardised(part: LabelledImages) -> TensorDataset:
            scale, shift = (255 * std).float(), (mean / std).float()
            return TensorDataset(part.images.float().div_(scale).sub_(shift), part.labels)

        self.train, self.test = standardised(train), standardised(test)
        self.validation = self.test if self.validation_fraction is None else standardised(validation)


def read_table(path: Path) -> Tensor:
    """Return the numbers of a text file, float64 of shape (rows, columns)."""
    if not path.is_file():
        raise FederationError(f"there is no file {path}; complete the folder {path.parent}")
    try:
        values = np.loadtxt(path, ndmin=2) if path.read_text().strip() else np.empty((0, 0))
    except ValueError as error:
        raise FederationError(f"{path}: {error}; download the file again") from error
    if not values.size or not np.isfinite(values).all():
        raise FederationError(f"{path} holds no number, or one that is not finite; download the file again")
    return torch.from_numpy(values)


class Standardisation(NamedTuple):
    r"""Mean and standard deviation of every column: :math:`z = (x - m) / s`, and 0 where x is missing or s = 0."""

    mean: Tensor
    std: Tensor

    def apply(self, values: Tensor) -> Tensor:
        """Return ``values``, shape (examples, columns), NaN where one is missing, standardised in float32."""
        scaled = (values - self.mean) / self.std
        return scaled.masked_fill(values.isnan() | (self.std == 0), 0).float()


def standardisation_of(values: Tensor) -> Standardisation:
    """Return mean and deviation of the values that are present, NaN where one is missing."""
    mean = values.nanmean(0).nan_to_num()
    std = (values - mean).square().nanmean(0).sqrt()
    # rounding gives equal values a deviation of 1e-16 times their size
    constant = values.nan_to_num(float("inf")).amin(0) >= values.nan_to_num(-float("inf")).amax(0)
    return Standardisation(mean, std.masked_fill(constant, 0))
