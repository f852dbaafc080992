"""The progress bar's words for rounds and clients."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_fedbayes.engines.sequential import Client


def show_client(trainer: L.Trainer, client: Client) -> None:
    """Let the training progress bar say which round and client it is at; other bars stay as they are."""
    bar = trainer.progress_bar_callback
    rounds = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
    text = f"Round {client.round + 1}{rounds}, client {client.position + 1}/{client.cohort} ({client.name})"
    if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
        bar.train_progress_bar.set_description(text, refresh=False)
    elif (
        isinstance(bar, RichProgressBar)
        and bar.is_enabled
        and bar.progress is not None
        and bar.train_progress_bar_id is not None
    ):
        bar.progress.update(bar.train_progress_bar_id, description=text)
