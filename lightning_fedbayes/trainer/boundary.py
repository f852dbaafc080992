"""Checkpoints that always lie between two rounds, whenever they are written."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L

Checkpoint = dict[str, Any]


class RoundBoundary:
    """The Trainer's progress at the start of a round, for checkpoints that are written inside the round.

    Args:
        trainer: the Trainer, between two rounds.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.loop_state = trainer.fit_loop.state_dict()
        self.global_step = trainer.global_step
        self.schedulers = [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
        self.param_groups = [
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]

    def apply(self, checkpoint: Checkpoint, rounds_done: int) -> None:
        """Make ``checkpoint`` one of the start of the round."""
        checkpoint["loops"]["fit_loop"] = copy.deepcopy(self.loop_state)
        checkpoint["global_step"] = self.global_step
        if "lr_schedulers" in checkpoint:
            checkpoint["lr_schedulers"] = copy.deepcopy(self.schedulers)
        for state, groups in zip(checkpoint.get("optimizer_states", []), self.param_groups, strict=False):
            state["param_groups"] = [{**now, **then} for now, then in zip(state["param_groups"], groups, strict=True)]
        close_round(checkpoint, rounds_done)


def close_round(checkpoint: Checkpoint, rounds_done: int) -> None:
    """Make ``checkpoint`` say that ``rounds_done`` rounds are complete and nothing else has begun.

    Lightning writes checkpoints while an epoch is still open (during validation, or after a batch) and tries to finish
    that epoch on resuming, from batch counts that need not be those of the next round.
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
        state["state"] = {}  # every client starts with its own


def pending_plateau(trainer: L.Trainer) -> dict[str, Any]:
    """Return what epoch-wise ``ReduceLROnPlateau`` schedulers are still to be given after a round, monitor → value.

    Lightning steps them after it has written the round's checkpoint, and on resuming leaves that step out.
    """
    monitors = [str(config.monitor) for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    return {name: trainer.callback_metrics[name] for name in monitors if name in trainer.callback_metrics}


def step_plateau(trainer: L.Trainer, pending: dict[str, Any], rounds_done: int) -> None:
    """Take the steps of :func:`pending_plateau` after ``rounds_done`` rounds."""
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor in pending and rounds_done % config.frequency == 0:
            config.scheduler.step(pending[config.monitor])
