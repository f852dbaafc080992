"""Checkpoint files: written and read whole."""

import os
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fedbayes.core.errors import FederationError


def damage(path: str | os.PathLike[str]) -> str | None:
    """Return why a zip file of ``torch.save`` fails its checksums, which ``torch.load`` ignores. None if whole."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = archive.testzip() if torch.serialization.get_crc32_options() else None
    except FileNotFoundError:
        raise
    except Exception as error:  # flipped bytes can make an archive encrypted, compressed or of any length
        return f"{error or type(error).__name__}"
    return None if name is None else f"the checksum of {name} is wrong"


class WholeCheckpointIO(TorchCheckpointIO):
    """Reads and writes checkpoints as Lightning does, but only whole files.

    Lightning writes to the temporary folder and moves the file, which is a copy if that folder is on another file
    system: a kill leaves a torn file. Here it is moved within the checkpoint's folder, all or nothing. A damaged file
    is refused. If it is a ``ModelCheckpoint``'s ``last``, the newest whole checkpoint in the folder is read in its
    place, with a warning. Files that are not local are read and written as Lightning does.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` in one step: a crash keeps the earlier file."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        written = f"{path}.new"
        super().save_checkpoint(checkpoint, written, storage_options)
        os.replace(written, path)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a whole checkpoint. Raise FederationError if the file is damaged, and no other can take its place."""
        file = Path(path)
        reason = damage(file) if file.is_file() else None
        try:
            if reason is None:
                return super().load_checkpoint(path, *args, **kwargs)
        except (RuntimeError, ValueError, UnpicklingError) as error:  # bytes between its parts, which have no checksum
            reason = f"{type(error).__name__}: {error}"
        is_last = file.stem.startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST)
        others = [each for each in file.parent.glob(f"*{file.suffix}") if each.is_file() and each != file]
        others.sort(key=lambda other: (other.stat().st_mtime, other.name), reverse=True)  # the newest first
        for other in others if is_last else ():
            checkpoint = super().load_checkpoint(other, *args, **kwargs) if damage(other) is None else {}
            if "optimizer_states" in checkpoint:  # not of weights alone
                rank_zero_warn(f"{file} is damaged ({reason}): going on from {other.name}, the newest whole checkpoint")
                return checkpoint
        remedy = "give ckpt_path= another checkpoint, or delete the file and start again"
        raise FederationError(f"the checkpoint {file} is damaged ({reason}): {remedy}")


def use_whole_checkpoints(trainer: L.Trainer) -> None:
    """Let ``trainer`` read and write by :class:`WholeCheckpointIO`, unless a user has given a plug-in."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = WholeCheckpointIO()
