"""Image classification from files on disk: MNIST, FashionMNIST, CIFAR-10 and SVHN."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fedbayes.core.errors import FederationError, check_at_least, check_flag, check_number, check_path, listed
from lightning_fedbayes.core.seeding import generator
from lightning_fedbayes.data.image_files import LabelledImages, find_files, join, read_cifar, read_idx_images, read_svhn
from lightning_fedbayes.data.splits import SplitDataModule, stratified_order

WHITE = 255
"""The largest value of a pixel."""


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population standard deviation of every channel over all pixels, in units of white.

    Computed in double precision from the counts of the 256 values, without a floating-point copy of the images.

    Args:
        images: uint8, shape (examples, channels, height, width).

    Returns: mean and standard deviation, float64, shape (channels,), in [0, 1].

    >>> channel_statistics(torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2))
    (tensor([0.5000], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
    """
    counts = torch.stack([channel.flatten().bincount(minlength=WHITE + 1) for channel in images.unbind(1)]).double()
    shares, values = counts / counts.sum(1, keepdim=True), torch.linspace(0, 1, WHITE + 1, dtype=torch.float64)
    mean = shares @ values
    return mean, (shares * (values - mean.unsqueeze(1)).square()).sum(1).sqrt()


def standardise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    r"""Return :math:`z = (x / 255 - m) / s`, float32, for the mean m and standard deviation s > 0 of each channel."""
    shift, scale = ((each.float().view(-1, 1, 1)) for each in (mean / std, WHITE * std))
    return images.float().div_(scale).sub_(shift)


class ImageDataModule(SplitDataModule):
    """Images from files with a training and a test part, standardised and kept in memory.

    Inputs are float32 of shape (batch, \\*\\ ``shape``), labels int64 of shape (batch,). Each channel is standardised
    with its mean and standard deviation over all pixels of the training examples, without those held out for
    validation. There is no augmentation.

    The standardised images are tensors in memory, 4 bytes per value, so that clients' batches are rows of them,
    many times faster than loading image by image: 0.22 GB for MNIST or FashionMNIST, 0.74 GB for CIFAR-10 and
    1.2 GB for SVHN with all examples. ``examples`` limits the training images. The test part is never cut;
    ``Trainer(limit_test_batches=...)`` does that.

    The papers' protocol has no validation part: it trains on all training images and scores the test part. With
    ``validation_fraction=None`` validation is over the test part, as there. A fraction is the right choice
    whenever a decision (a hyperparameter, early stopping, which checkpoint) depends on what is validated.

    A subclass finds the files (:meth:`find`), reads them (:meth:`read`) and downloads them (:meth:`fetch`).

    Args:
        directory: holds the files; see the subclass.
        batch_size: images per training batch.
        validation_fraction: share of the training images to hold out, strictly between 0 and 1, stratified; None
            validates with the test part.
        examples: number of training images to use, including those for validation, stratified; None: all. With the
            same seed, a smaller number gives a subset of a larger one.
        seed: seed of both choices.
        download: get the files with torchvision into ``directory`` where they are missing.

    Attributes:
        num_classes: number of classes.
        shape: channels, height and width of an image.

    Raises:
        FederationError: an option is out of range; the directory or a file is missing (without ``download``, at once);
            a file is truncated, damaged or another one; a class has no training example; a channel is constant; or
            torchvision is needed and not there. All before training.
    """

    num_classes: ClassVar[int] = 10
    shape: ClassVar[tuple[int, int, int]]

    mean: tuple[float, ...]
    """Mean of each channel over the training examples, in units of white (0 to 1); known after ``setup``."""
    std: tuple[float, ...]
    """Standard deviation of each channel, likewise."""

    def __init__(
        self,
        directory: str | Path,
        batch_size: int = 64,
        validation_fraction: float | None = 0.1,
        examples: int | None = None,
        seed: int = 0,
        download: bool = False,
    ) -> None:
        super().__init__(batch_size, seed)
        if validation_fraction is not None:
            why = "None validates with the test part"
            check_number("validation_fraction", validation_fraction, "(0, 1)", why=why)
        if examples is not None:
            check_at_least("examples", examples, 2, why="each class needs one; None is all")
        check_flag("download", download)
        # a path would keep checkpoints from loading with weights_only
        directory = str(check_path("directory", directory))
        self.save_hyperparameters(logger=False)
        self.directory = Path(directory)
        self.validation_fraction = validation_fraction
        self.examples = examples
        self.download = download
        if not download:
            self.find()

    @abstractmethod
    def find(self) -> list[Path]:
        """Return the files of the data set; raise FederationError if one is missing."""

    @abstractmethod
    def read(self) -> tuple[LabelledImages, LabelledImages]:
        """Read the training part and the test part, as they are stored."""

    @abstractmethod
    def fetch(self, datasets: Any) -> None:
        """Download the files into ``directory``; ``datasets`` is ``torchvision.datasets``."""

    def prepare_data(self) -> None:
        """Download the files if ``download`` is set."""
        if not self.download:
            return
        try:
            from torchvision import datasets
        except ImportError as error:
            raise FederationError(
                f"download=True needs torchvision ({error}): pip install torchvision; or get the files of "
                f"{type(self).__name__} by other means"
            ) from error
        self.fetch(datasets)

    def setup(self, stage: str | None = None) -> None:
        """Read, split and standardise the images, once and the same way for every stage."""
        if "train" in vars(self):
            return
        stored, test = self.read()
        train, validation = (LabelledImages(*(part[rows] for part in stored)) for rows in self._split(stored.labels))
        mean, std = channel_statistics(train.images)
        if not std.all():
            raise FederationError(
                f"{self.directory}: channel {int((std == 0).nonzero()[0])} has one value in all {len(train.images)} "
                "training images; the file is damaged: get it anew"
            )
        self.mean, self.std = tuple(mean.tolist()), tuple(std.tolist())
        del stored
        self.train, self.test = (
            TensorDataset(standardise(part.images, mean, std), part.labels) for part in (train, test)
        )
        self.validation = self.test
        if self.validation_fraction is not None:
            self.validation = TensorDataset(standardise(validation.images, mean, std), validation.labels)

    def _split(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the training and of the validation images, ascending; raise FederationError if there are too few."""
        total = len(labels)
        count = total if self.examples is None else self.examples
        if count > total:
            raise FederationError(f"examples={count}, but {self.directory} holds only {total} training images")
        chosen = stratified_order(labels, generator(self.seed, "partition"))[:count]
        held_out = 0 if self.validation_fraction is None else max(1, round(self.validation_fraction * count))
        validation, train = (part.sort().values for part in (chosen[:held_out], chosen[held_out:]))
        in_files, in_training = (each.bincount(minlength=self.num_classes) for each in (labels, labels[train]))
        if not in_files.all():
            raise FederationError(
                f"{self.directory}: no training image is of class {_listed(in_files)}; the file is damaged or another "
                f"data set's: {type(self).__name__} has {self.num_classes} classes"
            )
        if not in_training.all():
            raise FederationError(
                f"no training example is of class {_listed(in_training)}: of {count} examples {held_out} are held out "
                "for validation. Raise examples or lower validation_fraction"
            )
        return train, validation


def _listed(counts: Tensor) -> str:
    """The classes that have no example, as text."""
    return listed((counts == 0).nonzero().flatten().tolist())


IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class MNISTDataModule(ImageDataModule):
    """70,000 handwritten digits of 28×28 grey pixels, 60,000 of them for training; see :class:`ImageDataModule`.

    ``directory`` holds the four IDX files ``train-images-idx3-ubyte``, …, plain or packed with gzip, or has them in
    ``MNIST/raw``, as torchvision lays them out.
    """

    shape = (1, 28, 28)
    torchvision_name: ClassVar[str] = "MNIST"
    """Name of the data set and of its folder in torchvision."""

    def find(self) -> list[Path]:
        """The four IDX files."""
        return find_files(self.directory, [(f"{self.torchvision_name}/raw", IDX_FILES), (".", IDX_FILES)])

    def read(self) -> tuple[LabelledImages, LabelledImages]:
        """Read the training part and the test part, as they are stored."""
        images, labels, test_images, test_labels = self.find()
        return (
            read_idx_images(images, labels, self.shape, self.num_classes),
            read_idx_images(test_images, test_labels, self.shape, self.num_classes),
        )

    def fetch(self, datasets: Any) -> None:
        """Download all four files."""
        getattr(datasets, self.torchvision_name)(self.directory, download=True)


class FashionMNISTDataModule(MNISTDataModule):
    """70,000 pictures of clothes in the format of MNIST, 60,000 of them for training; see :class:`ImageDataModule`.

    ``directory`` holds the four IDX files ``train-images-idx3-ubyte``, …, plain or packed with gzip, or has them in
    ``FashionMNIST/raw``, as torchvision lays them out. MNIST's files have the same names: use another
    directory.
    """

    torchvision_name = "FashionMNIST"


CIFAR_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
CIFAR_BINARY_FILES = tuple(f"{name}.bin" for name in CIFAR_FILES)


class CIFAR10DataModule(ImageDataModule):
    """60,000 colour photographs of 32×32 pixels, 50,000 of them for training; see :class:`ImageDataModule`.

    ``directory`` holds the folder ``cifar-10-batches-py`` (the Python version, which torchvision downloads) or
    ``cifar-10-batches-bin`` (the binary version), or is that folder.
    """

    shape = (3, 32, 32)

    def find(self) -> list[Path]:
        """The five training files and the test file of one version."""
        return find_files(
            self.directory,
            [
                ("cifar-10-batches-py", CIFAR_FILES),
                ("cifar-10-batches-bin", CIFAR_BINARY_FILES),
                (".", CIFAR_FILES),
                (".", CIFAR_BINARY_FILES),
            ],
        )

    def read(self) -> tuple[LabelledImages, LabelledImages]:
        """Read the training part and the test part, as they are stored."""
        *train, test = (read_cifar(path) for path in self.find())
        return join(train), test

    def fetch(self, datasets: Any) -> None:
        """Download the Python version."""
        datasets.CIFAR10(self.directory, download=True)


SVHN_FILES = ("train_32x32.mat", "test_32x32.mat")


class SVHNDataModule(ImageDataModule):
    """99,289 cropped house numbers of 32×32 colour pixels, 73,257 of them for training; see :class:`ImageDataModule`.

    ``directory`` holds ``train_32x32.mat`` and ``test_32x32.mat``. The additional, easier training images of the
    publisher's third file are not used.
    """

    shape = (3, 32, 32)

    def find(self) -> list[Path]:
        """The two MATLAB files."""
        return find_files(self.directory, [(".", SVHN_FILES)])

    def read(self) -> tuple[LabelledImages, LabelledImages]:
        """Read the training part and the test part, as they are stored."""
        train, test = self.find()
        return read_svhn(train), read_svhn(test)

    def fetch(self, datasets: Any) -> None:
        """Download both files."""
        for split in ("train", "test"):
            datasets.SVHN(self.directory, split=split, download=True)
