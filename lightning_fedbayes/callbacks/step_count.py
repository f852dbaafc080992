"""The Trainer's count of steps where processes share the clients: that of one process that trains all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L


class StepCount:
    """Brings the counts of a round's steps together, so that loggers and names of checkpoints agree.

    Args:
        trainer: at the start of a round.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.steps, self.batches = self._now(trainer)

    @staticmethod
    def _now(trainer: L.Trainer) -> tuple[int, int]:
        """Steps of the optimizer, and batches that loggers count."""
        return trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped

    def own(self, trainer: L.Trainer, *, idle: bool) -> tuple[int, int]:
        """Steps and batches of this process, at the last batch of a round.

        Args:
            trainer: which is to count that batch itself, yet.
            idle: whether this process has had no client; its batch does not count.
        """
        steps, batches = self._now(trainer)
        return steps - self.steps, 0 if idle else batches + 1 - self.batches

    def take(self, trainer: L.Trainer, everyone: Sequence[tuple[int, int]]) -> None:
        """Count the steps of all processes.

        Args:
            trainer: which is to count its last batch itself, yet.
            everyone: what each process has of its :meth:`own`.
        """
        loop: Any = trainer.fit_loop.epoch_loop
        total = loop.automatic_optimization.optim_progress.optimizer.step.total
        others = self.steps + sum(each for each, _ in everyone) - self._now(trainer)[0]
        total.ready += others
        total.completed += others
        loop._batches_that_stepped = self.batches + sum(each for _, each in everyone) - 1
