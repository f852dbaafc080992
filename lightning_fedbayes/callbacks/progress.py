"""The progress bar's words for rounds and clients."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_fedbayes.engines.client import Client


def show_clients(trainer: L.Trainer, clients: Sequence[Client]) -> None:
    """Let the training progress bar say which round and clients it is at; other bars stay as they are."""
    bar = trainer.progress_bar_callback
    rounds = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
    first = clients[0]
    if len(clients) == 1:
        who = f"client {first.position + 1}/{first.cohort} ({first.name})"
    elif len(clients) == first.cohort:
        who = f"all {first.cohort} clients at once"
    else:
        who = f"{len(clients)} of {first.cohort} clients at once"
    text = f"Round {first.round + 1}{rounds}, {who}"
    if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
        bar.train_progress_bar.set_description(text, refresh=False)
    elif (
        isinstance(bar, RichProgressBar)
        and bar.is_enabled
        and bar.progress is not None
        and bar.train_progress_bar_id is not None
    ):
        bar.progress.update(bar.train_progress_bar_id, description=text)
