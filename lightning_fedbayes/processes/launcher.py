"""Processes that are started from this one, and what they bring back to it."""

from __future__ import annotations

import io
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher


class RememberingLauncher(_MultiProcessingLauncher):
    """Lightning's own, which brings weights and metrics back; this one also what the callbacks know."""

    def get_extra_results(self, trainer: L.Trainer) -> dict[str, Any]:
        """What the first process sends: Lightning's, and the state of each callback."""
        buffer = io.BytesIO()
        torch.save({callback.state_key: callback.state_dict() for callback in self._callbacks(trainer)}, buffer)
        return {**super().get_extra_results(trainer), "callback_states": buffer.getvalue()}

    def update_main_process_results(self, trainer: L.Trainer, extra: dict[str, Any]) -> None:
        """Give the callbacks of this process the state of those of the first."""
        super().update_main_process_results(trainer, extra)
        states = torch.load(io.BytesIO(extra["callback_states"]), map_location="cpu", weights_only=False)
        for callback in self._callbacks(trainer):
            if states.get(callback.state_key):
                callback.load_state_dict(states[callback.state_key])

    @staticmethod
    def _callbacks(trainer: Any) -> list[L.Callback]:
        return trainer.callbacks
