"""Checkpoint files that are written whole and read only if they are."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fedbayes.errors import FederationError


def damage(path: str | os.PathLike[str]) -> str | None:
    """Return why a file of ``torch.save`` is not whole; None if it is.

    The file is a zip archive with a checksum (CRC-32) of every tensor, which ``torch.load`` does not look at.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = archive.testzip() if torch.serialization.get_crc32_options() else None
    except FileNotFoundError:
        raise
    except Exception as error:  # flipped bytes can make an archive encrypted, compressed or of any length
        return f"{error or type(error).__name__}"
    return None if name is None else f"the checksum of {name} is wrong"


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's own reading and writing of checkpoints, so that nobody goes on from half a file.

    Lightning writes to the temporary folder and moves the file, which is a copy if that folder is on another file
    system: a kill leaves a torn file. Here it is moved within the checkpoint's own folder, all or nothing. A damaged
    file is not read. If it is a ``ModelCheckpoint``'s ``last``, the newest whole checkpoint beside it is read in its
    place, with a warning. Files that are not local are read and written as Lightning does.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write all of ``checkpoint``, or nothing: a crash leaves the file before."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        written = f"{path}.new"
        super().save_checkpoint(checkpoint, written, storage_options)
        os.replace(written, path)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a whole checkpoint.

        Raises:
            FederationError: the file is damaged, and nothing can take its place.
        """
        file = Path(path)
        if not file.is_file() or (reason := damage(file)) is None:
            return super().load_checkpoint(path, *args, **kwargs)
        is_last = file.stem.startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST)
        for other in newest_beside(file) if is_last else ():
            checkpoint = super().load_checkpoint(other, *args, **kwargs) if damage(other) is None else {}
            if "optimizer_states" in checkpoint:  # not of weights alone
                rank_zero_warn(f"{file} is damaged ({reason}): going on from {other.name}, the newest whole checkpoint")
                return checkpoint
        raise FederationError(
            f"the checkpoint {file} is damaged ({reason}), perhaps because the disk was full or the run was killed "
            "while it was copied: give ckpt_path= another checkpoint, or delete the file and begin anew"
        )


def newest_beside(file: Path) -> Iterator[Path]:
    """Yield the other files of the same ending in the folder of ``file``, the newest first."""
    others = [other for other in file.parent.glob(f"*{file.suffix}") if other.is_file() and other != file]
    yield from sorted(others, key=lambda other: (other.stat().st_mtime, other.name), reverse=True)


def use_whole_checkpoints(trainer: L.Trainer) -> None:
    """Let ``trainer`` read and write by :class:`WholeCheckpointIO`, unless it has a plug-in of its own."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = WholeCheckpointIO()
