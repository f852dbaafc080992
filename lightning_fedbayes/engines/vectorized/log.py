"""What ``training_step`` logs when it runs for several clients at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_fedbayes.engines.training_log import SIGNATURE, TrainingLog, is_epoch_mean
from lightning_fedbayes.engines.vectorized.rows import add_rows
from lightning_fedbayes.engines.vectorized.schedule import Slots

REDUCTIONS = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax, "min": torch.amin}


class StackedTrainingLog(TrainingLog):
    """Collects what a stacked step logs: means per epoch client by client, the rest over the clients of the step.

    Args:
        module: as in :class:`~lightning_fedbayes.engines.training_log.TrainingLog`.
    """

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__(module)
        self._calls: list[tuple[str, Any, Mapping[str, Any]]] = []
        self._totals: dict[str, Tensor] = {}
        self._examples: dict[str, list[float]] = {}

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for :meth:`lightning.LightningModule.log`; inside a step it only takes notes."""
        if not self.in_training_step:
            self._log(name, value, *args, **kwargs)
            return
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"self.log('{name}', ...) takes one number, not a tensor of shape {tuple(value.shape)}")
        if args:
            given = SIGNATURE.bind(None, name, value, *args, **kwargs).arguments
            kwargs = {key: given[key] for key in list(given)[3:]}
        self._calls.append((name, value, kwargs))

    def begin_step(self) -> None:
        """Forget the notes of the step before."""
        self._calls = []

    def end_step(self, stacked: Callable[[Tensor], Tensor]) -> None:
        """Turn the tensors among the notes into one value per client, by ``stacked``."""
        self._calls = [
            (name, stacked(value.detach().reshape(())) if isinstance(value, Tensor) else value, options)
            for name, value, options in self._calls
        ]

    def begin_chunk(self, clients: int) -> None:
        """Prepare for a stack of ``clients``."""
        self._slots, self._totals, self._examples = clients, {}, {}

    def add(self, slots: Slots, data: Any) -> None:
        """Count what the last step has logged for the clients in ``slots``, whose batches are ``data``."""
        for name, value, options in self._calls:
            weight = options.get("batch_size") or extract_batch_size(tree_map(lambda stack: stack[0], data))
            if is_epoch_mean(value, options):
                if name not in self._totals:
                    like = value if isinstance(value, Tensor) else torch.tensor(0.0)
                    dtype = like.dtype if like.is_floating_point() else torch.float32
                    self._totals[name] = torch.zeros(self._slots, dtype=dtype, device=like.device)
                    self._examples[name] = [0.0] * self._slots
                add_rows(self._totals[name], slots, value * weight)
                examples = self._examples[name]
                for slot in slots:
                    examples[slot] += weight
                self._remember(name, options)
            else:
                if self.is_shared:
                    self.check_local(name, options)
                self._log_now(name, value, {**options, "batch_size": weight * len(slots)})

    def _log_now(self, name: str, value: Any, options: dict[str, Any]) -> None:
        """Let Lightning log one value of all clients of the step."""
        if isinstance(value, Tensor) and value.dim():
            reduce = options.get("reduce_fx", "mean")
            value = REDUCTIONS.get(reduce, reduce)(value.float() if reduce == "mean" else value)
        self.module.__dict__["_current_fx_name"] = "training_step"
        try:
            self._log(name, value, **options)
        finally:
            self.module.__dict__["_current_fx_name"] = None

    def end_chunk(self, clients: tuple[int, ...]) -> list[dict[str, float]]:
        """The means of the clients in the stack, slot by slot; each counts for the round unless it is forgotten."""
        totals = {name: total.tolist() for name, total in self._totals.items()}
        means = []
        for slot, client in enumerate(clients):
            sums = {name: (totals[name][slot], n[slot]) for name, n in self._examples.items() if n[slot]}
            self._clients[client] = dict(sums)
            means.append({name: total / examples for name, (total, examples) in sums.items()})
        return means
