"""Writers of small image files in the layouts of the publishers."""

import gzip
import pickle
import struct

import numpy as np
from scipy.io import savemat

IDX_NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def examples(count, shape, seed=0, first=0):
    """Random images, uint8, and labels 0, 1, …, 9, 0, … from ``first`` on, int64."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)
    return pixels, (np.arange(count) + first) % 10


def idx(array):
    """The bytes of an IDX file."""
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
    """The bytes of a file of the binary version."""
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(images, labels))


def cifar_pickle(images, labels):
    """The bytes of a file of the Python version, written by this Python."""
    return pickle.dumps({"data": images.reshape(len(images), -1), "labels": [int(each) for each in labels]}, protocol=2)


def cifar_pickle_of_2009(images, labels):
    """The same as Python 2 and its NumPy wrote it: byte strings, and integers for the flags of a dtype."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    raw = images.tobytes()
    flags = b"(K\x03" + text(b"|") + b"NNN" + number(-1) * 2 + b"K\x00tb"
    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR" + flags
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85"
        + text(b"b")
        + b"tR(K\x01"
        + number(len(images))
        + number(len(raw) // len(images))
        + b"\x86"
        + dtype
        + b"\x89"
        + b"T"
        + struct.pack("<i", len(raw))
        + raw
        + b"tb"
    )
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


def write_cifar(folder, parts, encode, suffix=""):
    """One file of ``parts`` (images, labels) per name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(cifar_names(), parts, strict=True):
        (folder / f"{name}{suffix}").write_bytes(encode(*part))


def write_svhn(path, images, labels):
    """A MATLAB file, compressed like the publisher's, where 10 stands for the digit 0."""
    stored = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
    savemat(path, {"X": images.transpose(2, 3, 1, 0), "y": stored}, do_compression=True)
