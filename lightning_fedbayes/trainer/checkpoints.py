"""Checkpoint files: written and read whole, and always between two rounds."""

from __future__ import annotations

import copy
import os
import zipfile
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fedbayes.clients.states import options_of
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
        if not file.is_file() or (reason := damage(file)) is None:
            return super().load_checkpoint(path, *args, **kwargs)
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


Checkpoint = dict[str, Any]


class RoundBoundary:
    """The Trainer's progress at the start of a round, for checkpoints inside the round."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.loop_state = loop_state(trainer.fit_loop)
        self.global_step = trainer.global_step
        self.schedulers = [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
        self.param_groups = [options_of(optimizer) for optimizer in trainer.optimizers]

    def apply(self, checkpoint: Checkpoint, rounds_done: int) -> None:
        """Move ``checkpoint`` to the start of the round."""
        checkpoint["loops"]["fit_loop"] = copy.deepcopy(self.loop_state)
        checkpoint["global_step"] = self.global_step
        if "lr_schedulers" in checkpoint:
            checkpoint["lr_schedulers"] = copy.deepcopy(self.schedulers)
        for state, groups in zip(checkpoint.get("optimizer_states", []), self.param_groups, strict=False):
            state["param_groups"] = [{**now, **then} for now, then in zip(state["param_groups"], groups, strict=True)]
        close_round(checkpoint, rounds_done)


def loop_state(loop: Any, prefix: str = "") -> dict[str, Any]:
    """Return ``loop.state_dict()`` in a fraction of its time, which every round pays."""
    state = {f"{prefix}state_dict": loop.on_save_checkpoint()}
    for name, value in vars(loop).items():
        if hasattr(value, "on_save_checkpoint"):
            state |= loop_state(value, f"{prefix}{name}.")
        elif is_dataclass(value) and hasattr(value, "state_dict"):
            state[f"{prefix}{name}"] = _counts(value)
    return state


def _counts(progress: Any) -> dict[str, Any]:
    """Return the fields of Lightning's counters, as ``dataclasses.asdict`` does."""
    return {name: _counts(value) if is_dataclass(value) else value for name, value in vars(progress).items()}


def close_round(checkpoint: Checkpoint, rounds_done: int) -> None:
    """Make ``checkpoint`` say that exactly ``rounds_done`` rounds are complete.

    Lightning writes checkpoints while an epoch is open, and would finish it on resuming, from other batch counts.
    """
    checkpoint["epoch"] = rounds_done
    loops = checkpoint["loops"]["fit_loop"]
    for scope in ("total", "current"):
        epochs = loops["epoch_progress"][scope]
        epochs.update(dict.fromkeys(epochs, rounds_done))
        batches = loops["epoch_loop.batch_progress"][scope]
        batches.update(dict.fromkeys(batches, batches["ready"]))
    loops["epoch_loop.batch_progress"]["is_last_batch"] = False
    for state in checkpoint.get("optimizer_states", []):
        state["state"] = {}  # every client starts with its kept state
