"""Readers of the benchmarks over small files made on the spot: images are what was written, splits and scales."""

import gzip
import struct

import numpy as np
import pytest
import torch

from benchmarks.readers import ImageDataModule, read_images, read_table, standardisation_of
from lightning_fedbayes.core.errors import FederationError

TRAIN, TEST = 200, 30


def grey(folder, packed=False):
    parts = examples(TRAIN, (1, 28, 28)), examples(TEST, (1, 28, 28), seed=1, first=3)
    for part, (images, labels) in zip(("train", "test"), parts):
        write_idx(folder, part, images, labels, packed)
    return parts


def colour(folder):
    parts = [*(examples(TRAIN // 5, (3, 32, 32), seed) for seed in range(5)), examples(TEST, (3, 32, 32), 9, first=3)]
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    folder.mkdir(parents=True)
    for name, part in zip(names, parts, strict=True):
        rows = (bytes([label]) + image.tobytes() for image, label in zip(*part))
        (folder / f"{name}.bin").write_bytes(b"".join(rows))
    return tuple(np.concatenate(each) for each in zip(*parts[:5])), parts[5]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("mnist", grey),
        ("fashion_mnist", lambda folder: grey(folder / "FashionMNIST" / "raw", packed=True)),
        ("cifar10", lambda folder: colour(folder / "cifar-10-batches-bin")),
    ],
)
def test_images_are_what_was_written_and_standardised_over_those_of_training(name, write, tmp_path):
    written = write(tmp_path)
    for part, (images, labels) in zip(read_images(name, tmp_path), written):
        assert torch.equal(part.images, torch.as_tensor(images))
        assert torch.equal(part.labels, torch.as_tensor(labels))
    module = ImageDataModule(name, tmp_path, validation_fraction=0.25)
    module.setup()
    x, y = module.train.tensors
    assert x.shape == (TRAIN * 3 // 4, *module.shape)
    assert y.bincount().tolist() == [TRAIN * 3 // 40] * 10
    assert x.double().mean((0, 2, 3)).abs().max() < 1e-5
    assert (x.double().std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    assert (len(module.validation), len(module.test)) == (TRAIN // 4, TEST)


def test_fewer_examples_are_some_of_more_and_none_held_out_means_the_test_part(tmp_path):
    grey(tmp_path)
    few, more = (ImageDataModule("mnist", tmp_path, 8, None, count) for count in (60, 120))
    for module in (few, more):
        module.setup()
    labels, more_labels = few.train.tensors[1], more.train.tensors[1]
    assert (len(labels), len(more_labels)) == (60, 120)
    assert few.validation is few.test
    with pytest.raises(FederationError, match=r"holds no file data_batch_1\.bin"):
        read_images("cifar10", tmp_path)


def test_tables_and_their_columns(tmp_path):
    (tmp_path / "table.txt").write_text("\n 1.5\t2  3e2 \n\n-4 5 6\r\n\n")
    assert read_table(tmp_path / "table.txt").tolist() == [[1.5, 2, 300], [-4, 5, 6]]
    scale = standardisation_of(torch.tensor([[1.0, 0.1], [3.0, 0.1], [torch.nan, 0.1]], dtype=torch.float64))
    assert scale.apply(torch.tensor([[2.0, 7.0], [torch.nan, 0.1], [3.0, 0.1]])).tolist() == [[0, 0], [0, 0], [1, 0]]


IDX_NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def examples(count, shape, seed=0, first=0):
    """Random images, uint8, and labels 0, 1, …, 9, 0, … from ``first`` on, int64."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)
    return pixels, (np.arange(count) + first) % 10


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx(folder, part, images, labels, packed=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(IDX_NAMES[part], (images.squeeze(1), labels)):
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array), 1))
        else:
            (folder / name).write_bytes(idx(array))
