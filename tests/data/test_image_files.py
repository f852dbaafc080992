"""Readers of image files: what was written comes back, and damage is named with file, expectation and finding."""

import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as arrays
from scipy.io import loadmat, savemat

from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.data.image_files import find_files, read_cifar, read_idx, read_idx_images, read_svhn

from .image_files import cifar_binary, cifar_pickle, cifar_pickle_of_2009, examples, idx, write_idx, write_svhn


def assert_read(read, images, labels):
    assert (read.images.dtype, read.labels.dtype) == (torch.uint8, torch.int64)
    assert np.array_equal(read.images, images)
    assert np.array_equal(read.labels, labels)


@given(arrays.arrays(np.uint8, arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)))
@settings(deadline=None)
def test_any_idx_array_comes_back(tmp_path_factory, array):
    path = tmp_path_factory.mktemp("idx") / "file"
    path.write_bytes(idx(array))
    assert np.array_equal(read_idx(path, array.ndim), array)


@pytest.mark.parametrize("packed", [False, True])
def test_idx_images(tmp_path, packed):
    images, labels = examples(12, (1, 4, 5))
    write_idx(tmp_path, "train", images, labels, packed)
    paths = find_files(tmp_path, [(".", ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"])])
    assert [path.suffix for path in paths] == [".gz" if packed else ""] * 2
    assert_read(read_idx_images(*paths, (1, 4, 5), 10), images, labels)


@pytest.mark.parametrize(
    ("encode", "name"),
    [
        (cifar_binary, "data_batch_1.bin"),
        (cifar_pickle, "data_batch_1"),
        (cifar_pickle_of_2009, "data_batch_1"),
    ],
)
def test_cifar(tmp_path, encode, name):
    images, labels = examples(11, (3, 32, 32))
    (tmp_path / name).write_bytes(encode(images, labels))
    assert_read(read_cifar(tmp_path / name), images, labels)


def test_svhn_has_ten_for_zero(tmp_path):
    images, labels = examples(21, (3, 32, 32))
    write_svhn(tmp_path / "train_32x32.mat", images, labels)
    assert set(loadmat(tmp_path / "train_32x32.mat")["y"].flatten()) == set(range(1, 11))
    assert_read(read_svhn(tmp_path / "train_32x32.mat"), images, labels)


def refused(read, path, content, *message):
    path.write_bytes(content)
    with pytest.raises(FederationError) as error:
        read(path)
    for part in (path.name, *message):
        assert part in str(error.value)


IMAGES = idx(np.zeros((5, 2, 3)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (IMAGES[:-7], "expected 46 bytes, found 39; the file is truncated"),
        (IMAGES + b"x", "expected 46 bytes, found 47; the file is damaged"),
        (IMAGES[:9], "expected 16 bytes, found 9; the file is truncated"),
        (idx(np.zeros(5)), "begins with the bytes 00 00 08 01, but an IDX file with 3 dimensions"),
        (b"\x00\x00\x0d\x03" + IMAGES[4:], "begins with the bytes 00 00 0d 03"),
        (b"\x1f\x8b\x08\x00", "begins with the bytes 1f 8b 08 00"),
        (b"", "of no content"),
    ],
)
def test_damaged_idx_files(tmp_path, content, message):
    refused(lambda path: read_idx(path, 3), tmp_path / "images", content, message)


@pytest.mark.parametrize(
    "damage", [lambda packed: packed[:-20], lambda packed: packed[:30] + b"?" + packed[31:], lambda packed: b"no gzip"]
)
def test_damaged_packed_files(tmp_path, damage):
    write_idx(tmp_path, "train", *examples(50, (1, 4, 4)), packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    refused(lambda path: read_idx(path, 3), path, damage(path.read_bytes()), "cannot be unpacked", "bytes")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((5, 2, 3)), np.zeros(4), "5 images, but 4 labels"),
        (np.zeros((5, 3, 3)), np.zeros(5), "(1, 3, 3) instead of (1, 2, 3)"),
        (np.zeros((3, 2, 3)), np.array([0, 10, 200]), "a label is 10, and 1 more are out of range; the 10 classes"),
    ],
)
def test_images_and_labels_that_do_not_fit(tmp_path, images, labels, message):
    (tmp_path / "labels").write_bytes(idx(labels))
    refused(
        lambda path: read_idx_images(path, tmp_path / "labels", (1, 2, 3), 10),
        tmp_path / "images",
        idx(images),
        message,
    )


PAIR = examples(3, (3, 32, 32))


class Evil:
    def __reduce__(self):
        return eval, ("1/0",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_1.bin", cifar_binary(*PAIR)[:-5], "expected 9219 bytes, found 9214"),
        ("data_batch_1.bin", b"", "expected 3073 bytes, found 0"),
        ("data_batch_1.bin", bytes([11]) + cifar_binary(*PAIR)[1:], "a label is 11"),
        ("data_batch_1", cifar_pickle(*PAIR)[:-50], "is no batch of CIFAR-10 ("),
        ("data_batch_1", cifar_pickle_of_2009(*PAIR)[:500], "500 bytes, is no batch of CIFAR-10 ("),
        ("data_batch_1", pickle.dumps({"data": Evil(), "labels": [1]}), "it asks for builtins.eval"),
        ("data_batch_1", pickle.dumps({"labels": [1]}), "KeyError: 'data'"),
        ("data_batch_1", cifar_pickle(PAIR[0], PAIR[1][:2]), "3 images, but 2 labels"),
        ("data_batch_1", b"<html>404</html>", "is no batch of CIFAR-10"),
    ],
)
def test_damaged_cifar_files(tmp_path, name, content, message):
    refused(read_cifar, tmp_path / name, content, message)


@pytest.mark.parametrize("damage", [lambda mat: mat[:-500], lambda mat: mat[:100], lambda mat: b"<html>404</html>"])
def test_damaged_svhn_files(tmp_path, damage):
    path = tmp_path / "train_32x32.mat"
    write_svhn(path, *PAIR)
    content = damage(path.read_bytes())
    refused(read_svhn, path, content, f"{len(content)} bytes, is no file of SVHN's cropped digits")


def test_other_svhn_files_and_labels(tmp_path):
    path = tmp_path / "train_32x32.mat"
    write_svhn(path, PAIR[0], np.array([1, 2, 11]))
    with pytest.raises(FederationError, match="a label is 11"):
        read_svhn(path)
    savemat(path, {"X": PAIR[0]})
    with pytest.raises(FederationError, match="KeyError: 'y'"):
        read_svhn(path)


def test_sizes_beyond_the_file_take_no_memory(tmp_path):
    content = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**31, 2**15, 2**15) + b"few"
    refused(lambda path: read_idx(path, 3), tmp_path / "images", content, f"expected {2**61 + 16} bytes, found 19")
