"""Runs of several processes that stop together, between two rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L

from lightning_fedbayes.processes import Processes


def stop_together(trainer: L.Trainer, processes: Processes, in_round: Callable[[], bool]) -> None:
    """Hold back a ``trainer.should_stop`` that one process sets inside a round until all have ended it.

    Otherwise that process would leave, and the others wait for it.

    Args:
        trainer: whose epoch loop is to be watched; the engine that has taken it over gives it back.
        processes: that share the clients.
        in_round: whether clients are still training in this process.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    inner, asked = loop.on_advance_end, False

    def on_advance_end(fetcher: Any) -> None:
        nonlocal asked
        asked, trainer.should_stop = asked or trainer.should_stop, False
        if not in_round():
            trainer.should_stop, asked = any(processes.gather(asked)), False
        inner(fetcher)

    loop.on_advance_end = on_advance_end
