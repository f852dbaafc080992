"""The Trainer's count of steps where processes share the clients: that of one process that trains all of them."""

from __future__ import annotations

from typing import Any

import lightning as L

from lightning_fedbayes.processes import Processes


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

    def add_others(self, trainer: L.Trainer, processes: Processes, *, idle: bool) -> None:
        """Count the steps of the other processes, after the last batch of a round.

        Args:
            trainer: which is to count that batch itself, yet.
            processes: that share the clients.
            idle: whether this process has had none; its batch does not count.
        """
        if processes.count == 1:
            return
        steps, batches = self._now(trainer)
        own = steps - self.steps, 0 if idle else batches + 1 - self.batches
        everyone = processes.gather(own)
        loop: Any = trainer.fit_loop.epoch_loop
        total = loop.automatic_optimization.optim_progress.optimizer.step.total
        others = sum(each for each, _ in everyone) - own[0]
        total.ready += others
        total.completed += others
        loop._batches_that_stepped = self.batches + sum(each for _, each in everyone) - 1
