"""Writers of small image files in the layouts of the publishers."""

import gzip
import struct

import numpy as np

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


def cifar_names():
    return [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def cifar_binary(images, labels):
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(images, labels))


def write_cifar(folder, parts, encode, suffix=""):
    """One file of ``parts`` (images, labels) per name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(cifar_names(), parts, strict=True):
        (folder / f"{name}{suffix}").write_bytes(encode(*part))
