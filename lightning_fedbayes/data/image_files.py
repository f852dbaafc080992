"""Files of image data sets as their publishers distribute them: IDX (MNIST), CIFAR-10 and SVHN."""

from __future__ import annotations

import codecs
import gzip
import io
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.io import loadmat
from torch import Tensor

from lightning_fedbayes.core.errors import FederationError, listed


class LabelledImages(NamedTuple):
    """Images as they are stored, with their labels.

    Attributes:
        images: uint8, shape (examples, channels, height, width).
        labels: int64, shape (examples,).
    """

    images: Tensor
    labels: Tensor


def find_files(directory: Path, layouts: Sequence[tuple[str, Sequence[str]]]) -> list[Path]:
    """Return the files of a data set, in the first of several layouts that ``directory`` has.

    Args:
        directory: the directory that the user gave.
        layouts: folder within it ("." for itself) and names of the files there; each file may still be packed, with
            ``.gz`` after its name.

    Raises:
        FederationError: there is no such directory, no layout has a file there, or the first that has one lacks others.
    """
    if not directory.is_dir():
        raise FederationError(f"there is no directory {directory}; give the one that holds the data set's files")
    for folder, names in layouts:
        found = [_plain_or_packed(directory / folder / name) for name in names]
        missing = [name for name, path in zip(names, found) if path is None]
        if not missing:
            return [path for path in found if path is not None]
        if len(missing) < len(names):
            raise FederationError(f"{directory / folder} lacks {listed(missing)}; complete the folder")
    inside = ", ".join(sorted(path.name for path in directory.iterdir())[:20]) or "nothing"
    places = ", ".join(str(Path(folder) / names[0]) for folder, names in layouts)
    raise FederationError(
        f"{directory} holds none of {places} (nor the same with .gz), but {inside}; give the directory that holds them"
    )


def _plain_or_packed(path: Path) -> Path | None:
    """Return ``path`` if that file exists, else the same packed with gzip, else None."""
    packed = path.with_name(f"{path.name}.gz")
    return path if path.is_file() else packed if packed.is_file() else None


def read_bytes(path: Path) -> bytearray:
    """Return the content of a file, unpacked if its name ends in ``.gz``.

    Raises:
        FederationError: a packed file is damaged or truncated.
    """
    if path.suffix != ".gz":
        return bytearray(path.read_bytes())
    try:
        with gzip.open(path) as file:
            return bytearray(file.read())
    except (EOFError, OSError, zlib.error) as error:
        raise FederationError(
            f"{path}, {path.stat().st_size} bytes, cannot be unpacked ({error}); it is truncated or damaged: get it "
            "anew"
        ) from error


def check_length(path: Path, expected: int, found: int) -> None:
    """Raise FederationError unless ``found`` bytes are as many as ``expected``."""
    if found != expected:
        raise FederationError(
            f"{path}: expected {expected} bytes, found {found}; the file is "
            f"{'truncated' if found < expected else 'damaged'}: get it anew"
        )


def check_images(path: Path, images: Tensor, labels: Tensor, shape: tuple[int, int, int], classes: int) -> None:
    """Raise FederationError unless ``images`` are of ``shape``, with one label in [0, ``classes``) each."""
    if tuple(images.shape[1:]) != shape:
        raise FederationError(
            f"{path} holds images of (channels, height, width) {tuple(images.shape[1:])} instead of {shape}; it "
            "belongs to another data set"
        )
    if len(images) != len(labels):
        raise FederationError(f"{path}: {len(images)} images, but {len(labels)} labels; get both anew")
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise FederationError(
            f"{path}: a label is {wrong[0].item()}, and {len(wrong) - 1} more are out of range; the {classes} classes "
            f"are 0 to {classes - 1}: the file is damaged or belongs to another data set"
        )


def join(parts: Sequence[LabelledImages]) -> LabelledImages:
    """Concatenate the images of several files of one data set."""
    return LabelledImages(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))


UNSIGNED_BYTES = 8
"""Third byte of a file whose entries are unsigned bytes."""


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read the array in an IDX file of unsigned bytes, plain or packed with gzip; returns uint8.

    The file has two zero bytes, the type of the entries, the number of dimensions; the size of each dimension in four
    bytes, the most significant first; then the entries in row-major order.

    Args:
        path: of the file.
        dimensions: 1 for labels, 3 for images.

    Raises:
        FederationError: the first four bytes are not those, or the length contradicts the sizes.
    """
    content = read_bytes(path)
    magic = bytes([0, 0, UNSIGNED_BYTES, dimensions])
    if bytes(content[:4]) != magic:
        raise FederationError(
            f"{path} begins with the bytes {content[:4].hex(' ') or 'of no content'}, but an IDX file with "
            f"{dimensions} dimension{'s' if dimensions > 1 else ''} of unsigned bytes begins with {magic.hex(' ')}; "
            "it is another file or damaged: get it anew"
        )
    header = 4 + 4 * dimensions
    check_length(path, header, min(len(content), header))
    sizes = struct.unpack(f">{dimensions}I", content[4:header])
    check_length(path, header + math.prod(sizes), len(content))
    return torch.frombuffer(content, dtype=torch.uint8)[header:].view(sizes)


def read_idx_images(images: Path, labels: Path, shape: tuple[int, int, int], classes: int) -> LabelledImages:
    """Read the images of one IDX file, and their labels of another; see :func:`read_idx` and :func:`check_images`."""
    read = LabelledImages(read_idx(images, 3).unsqueeze(1), read_idx(labels, 1).long())
    check_images(images, *read, shape, classes)
    return read


SHAPE = (3, 32, 32)
"""Channels, height and width of the images of CIFAR-10 and SVHN."""
PIXELS = math.prod(SHAPE)
CLASSES = 10


def read_cifar(path: Path) -> LabelledImages:
    """Read one file of CIFAR-10: of the binary version if its name ends in ``.bin``, else of the Python version."""
    return read_cifar_binary(path) if ".bin" in path.suffixes else read_cifar_pickle(path)


def read_cifar_binary(path: Path) -> LabelledImages:
    """Read a file of the binary version: per image one byte of label, then 3 × 32 × 32 bytes of pixels.

    Raises:
        FederationError: the length is no multiple of 3073, or a label is out of range.
    """
    content = read_bytes(path)
    check_length(path, max(1, -(-len(content) // (PIXELS + 1))) * (PIXELS + 1), len(content))
    rows = torch.frombuffer(content, dtype=torch.uint8).view(-1, PIXELS + 1)
    read = LabelledImages(rows[:, 1:].reshape(-1, *SHAPE), rows[:, 0].long())
    check_images(path, *read, SHAPE, CLASSES)
    return read


def read_cifar_pickle(path: Path) -> LabelledImages:
    """Read a file of the Python version: a pickled dictionary of ``data`` (examples × 3072) and ``labels``.

    A pickle can run arbitrary code, so only NumPy arrays and plain values are unpickled.

    Raises:
        FederationError: it is no such pickle, is truncated, holds other objects, or a label is out of range.
    """
    content = read_bytes(path)
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="latin1").load()
        pixels, labels = np.asarray(batch["data"], np.uint8), np.asarray(batch["labels"], np.int64)
        images = torch.from_numpy(pixels.reshape(-1, *SHAPE))
    except Exception as error:  # damage can show as anything
        raise FederationError(
            f"{path}, {len(content)} bytes, is no batch of CIFAR-10 ({type(error).__name__}: {error}); it is "
            "truncated, damaged or another file: get it anew"
        ) from error
    read = LabelledImages(images, torch.from_numpy(labels))
    check_images(path, *read, SHAPE, CLASSES)
    return read


_RECONSTRUCT: Callable[..., Any] = np.empty(0).__reduce__()[0]  # pyright: ignore[reportAssignmentType]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("_codecs", "encode"): codecs.encode,  # how Python 3 writes bytes for Python 2
}


class _Unpickler(pickle.Unpickler):
    """Unpickler that accepts NumPy arrays and plain values only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def read_svhn(path: Path) -> LabelledImages:
    """Read a MATLAB file of SVHN: ``X`` of shape (32, 32, 3, examples), and ``y``, where 10 stands for the digit 0.

    Raises:
        FederationError: it is no MATLAB file, is truncated, lacks ``X`` or ``y``, or a label is out of range.
    """
    try:
        content = loadmat(path)
        pixels, labels = content["X"], content["y"].reshape(-1).astype(np.int64)
        images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1), np.uint8))
    except Exception as error:  # damage can show as anything
        raise FederationError(
            f"{path}, {path.stat().st_size} bytes, is no file of SVHN's cropped digits ({type(error).__name__}: "
            f"{error}); it is truncated, damaged or another file: get it anew"
        ) from error
    read = LabelledImages(images, torch.from_numpy(np.where(labels == 10, 0, labels)))
    check_images(path, *read, SHAPE, CLASSES)
    return read
