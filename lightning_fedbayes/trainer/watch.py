"""Watch over what ``training_step`` reads of the Trainer: a stack of clients has no position of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L

from lightning_fedbayes.core.errors import CannotVectorize

SHARED = frozenset(
    {
        "accelerator",
        "barebones",
        "callbacks",
        "current_epoch",
        "datamodule",
        "default_root_dir",
        "device_ids",
        "evaluating",
        "global_rank",
        "is_global_zero",
        "lightning_module",
        "local_rank",
        "log_dir",
        "log_every_n_steps",
        "logger",
        "loggers",
        "lr_scheduler_configs",
        "max_epochs",
        "min_epochs",
        "model",
        "node_rank",
        "num_devices",
        "num_nodes",
        "optimizers",
        "precision",
        "precision_plugin",
        "predicting",
        "sanity_checking",
        "state",
        "strategy",
        "testing",
        "training",
        "validating",
        "world_size",
    }
)
"""Names of what all clients of a round find alike in the Trainer."""


class WatchedTrainer:
    """A Trainer of which only :data:`SHARED` can be read."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._watched = trainer

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The Trainer's class, which some methods of a module ask for."""
        return type(self._watched)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the Trainer.

        Raises:
            CannotVectorize: clients that train at once do not have it in common.
        """
        if name not in SHARED:
            raise CannotVectorize(f"training_step reads trainer.{name}, which clients that train at once do not share")
        return getattr(self._watched, name)


@contextmanager
def watched(trainer: L.Trainer, module: L.LightningModule) -> Iterator[None]:
    """Inside, ``module`` finds a :class:`WatchedTrainer` in place of its Trainer."""
    modules = [each for each in module.modules() if isinstance(each, L.LightningModule)]
    before = [each._trainer for each in modules]
    for each in modules:
        vars(each)["_trainer"] = WatchedTrainer(trainer)
    try:
        yield
    finally:
        for each, own in zip(modules, before, strict=True):
            vars(each)["_trainer"] = own
