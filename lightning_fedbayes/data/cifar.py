"""The files of CIFAR-10, in their binary and in their Python version."""

from __future__ import annotations

import codecs
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_fedbayes.data.image_files import LabelledImages, check_images, check_length, read_bytes
from lightning_fedbayes.errors import FederationError

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
CLASSES = 10


def read_cifar(path: Path) -> LabelledImages:
    """The images of one file: binary if its name ends in ``.bin``, else Python's.

    Raises:
        FederationError: see :func:`read_cifar_binary` and :func:`read_cifar_pickle`.
    """
    return read_cifar_binary(path) if ".bin" in path.suffixes else read_cifar_pickle(path)


def read_cifar_binary(path: Path) -> LabelledImages:
    """The images of a file of the binary version: per image one byte of label, then 3 × 32 × 32 bytes of pixels.

    Raises:
        FederationError: the length is no multiple of that, or a label is out of range.
    """
    content = read_bytes(path)
    check_length(path, max(1, -(-len(content) // (PIXELS + 1))) * (PIXELS + 1), len(content))
    rows = torch.frombuffer(content, dtype=torch.uint8).view(-1, PIXELS + 1)
    read = LabelledImages(rows[:, 1:].reshape(-1, *SHAPE), rows[:, 0].long())
    check_images(path, *read, SHAPE, CLASSES)
    return read


def read_cifar_pickle(path: Path) -> LabelledImages:
    """The images of a file of the Python version: a pickled dictionary of ``data`` (examples × 3072) and ``labels``.

    A pickle can run any code that its author likes. So nothing but NumPy arrays and plain values is unpickled.

    Raises:
        FederationError: it is no such pickle, is truncated, holds anything else, or a label is out of range.
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
    """Reads NumPy arrays and plain values only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]
