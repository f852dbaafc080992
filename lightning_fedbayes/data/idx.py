"""IDX files, the format of MNIST and FashionMNIST."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from lightning_fedbayes.data.image_files import LabelledImages, check_images, check_length, read_bytes
from lightning_fedbayes.errors import FederationError

UNSIGNED_BYTES = 8
"""Third byte of a file whose entries are unsigned bytes."""


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The array in an IDX file of unsigned bytes, plain or packed with gzip, uint8.

    Two zero bytes, the type of the entries, the number of dimensions; the size of each dimension in four bytes, the
    most significant first; then the entries in row-major order.

    Args:
        path: of the file.
        dimensions: 1 for labels, 3 for images.

    Raises:
        FederationError: the first four bytes are others, or the length is not what the sizes say.
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
    """The images of one IDX file and the labels of another.

    Args:
        images: file of three dimensions (examples, height, width).
        labels: file of one dimension (examples).
        shape: channels (1), height and width that the images must have.
        classes: number of classes.

    Raises:
        FederationError: see :func:`read_idx` and :func:`~lightning_fedbayes.data.image_files.check_images`.
    """
    read = LabelledImages(read_idx(images, 3).unsqueeze(1), read_idx(labels, 1).long())
    check_images(images, *read, shape, classes)
    return read
