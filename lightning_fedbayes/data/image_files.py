"""Files of images as their publishers lay them out: finding them, reading their bytes, and what must hold of them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fedbayes.errors import FederationError


class LabelledImages(NamedTuple):
    """Images as they are stored, and what they show.

    Attributes:
        images: uint8, shape (examples, channels, height, width).
        labels: int64, shape (examples,).
    """

    images: Tensor
    labels: Tensor


def find_files(directory: Path, layouts: Sequence[tuple[str, Sequence[str]]]) -> list[Path]:
    """The files of a data set, in the first of several layouts that is there.

    Args:
        directory: what the user gave.
        layouts: folder within it ("." for itself) and names of the files there; each file may have been left packed,
            with ``.gz`` behind its name.

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
            raise FederationError(f"{directory / folder} lacks {', '.join(missing)}; complete the folder")
    inside = ", ".join(sorted(path.name for path in directory.iterdir())[:20]) or "nothing"
    places = ", ".join(str(Path(folder) / names[0]) for folder, names in layouts)
    raise FederationError(
        f"{directory} holds none of {places} (nor the same with .gz), but {inside}; give the directory that holds them"
    )


def _plain_or_packed(path: Path) -> Path | None:
    """``path``, or the same packed with gzip, whichever is there; the plain one first, which reads faster."""
    packed = path.with_name(f"{path.name}.gz")
    return path if path.is_file() else packed if packed.is_file() else None


def read_bytes(path: Path) -> bytearray:
    """The content of a file, unpacked if its name ends in ``.gz``.

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
    """Raise FederationError unless as many bytes were found as expected."""
    if found != expected:
        raise FederationError(
            f"{path}: expected {expected} bytes, found {found}; the file is "
            f"{'truncated' if found < expected else 'damaged'}: get it anew"
        )


def check_images(path: Path, images: Tensor, labels: Tensor, shape: tuple[int, int, int], classes: int) -> None:
    """Raise FederationError unless ``images`` are of ``shape``, with one label in [0, ``classes``) each.

    Args:
        path: of the file, for the error.
        images: shape (examples, channels, height, width).
        labels: integers, shape (examples,).
        shape: channels, height and width that the data set has.
        classes: number of classes that it has.
    """
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
    """Several files of one data set, one after the other."""
    return LabelledImages(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))
