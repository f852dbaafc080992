"""The MATLAB files of SVHN's cropped digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scipy.io import loadmat

from lightning_fedbayes.data.image_files import LabelledImages, check_images
from lightning_fedbayes.errors import FederationError

SHAPE = (3, 32, 32)
CLASSES = 10


def read_svhn(path: Path) -> LabelledImages:
    """The images of a file with ``X`` of shape (32, 32, 3, examples) and ``y``, where 10 stands for the digit 0.

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
