"""Launchers of processes: Lightning's, and one that brings the callbacks' states back to the main process."""

from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessLauncher  # noqa: F401


class RememberingLauncher(_MultiProcessingLauncher):
    """Brings the callbacks' states back to the main process, as Lightning's launcher does weights and metrics."""

    def get_extra_results(self, trainer: L.Trainer) -> dict[str, Any]:
        """Return Lightning's results and a file of the callbacks' states, on which a pipe would block."""
        states = {each.state_key: each.state_dict() for each in trainer.callbacks}  # pyright: ignore
        with NamedTemporaryFile(suffix=".pt", delete=False) as file:
            torch.save(states, file)
        return {**super().get_extra_results(trainer), "callback_states": file.name}

    def update_main_process_results(self, trainer: L.Trainer, extra: dict[str, Any]) -> None:
        """Give the callbacks of this process the states of the first process."""
        super().update_main_process_results(trainer, extra)
        file = Path(extra["callback_states"])
        states = torch.load(file, map_location="cpu", weights_only=False)
        file.unlink()
        for callback in trainer.callbacks:  # pyright: ignore
            if states.get(callback.state_key):
                callback.load_state_dict(states[callback.state_key])
