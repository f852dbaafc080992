"""One training step of several clients at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fedbayes.engines.plain_steps import loss_and_rest
from lightning_fedbayes.engines.state import Tensors
from lightning_fedbayes.engines.vectorized.attributes import holding_attributes
from lightning_fedbayes.engines.vectorized.log import StackedTrainingLog
from lightning_fedbayes.engines.vectorized.places import Places


@dataclass(frozen=True)
class Attributes:
    """What a module's ``on_client_start`` has set on it.

    Args:
        stacked: what differs between clients, name → tensor of shape (clients, *), or something made of such.
        shared: what does not.
    """

    stacked: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepOutput:
    """What a stacked step gives.

    Args:
        losses: one per client, shape (clients,), with gradient; None if ``training_step`` skipped the batch.
        rest: what else ``training_step`` returned; tensors have a first dimension of clients.
        buffers: buffers that were replaced (not updated in place), shape (clients, *).
    """

    losses: Tensor | None
    rest: dict[str, Any]
    buffers: Tensors


class StackedStep:
    """``training_step`` under :func:`torch.func.vmap`, with every client's own parameters, buffers and noise.

    Args:
        module: the user's module.
        places: where its parameters and buffers live.
        log: takes the calls of ``self.log``.
        context: what the step runs in, such as autocast.
    """

    def __init__(
        self,
        module: L.LightningModule,
        places: Places,
        log: StackedTrainingLog,
        context: Callable[[], AbstractContextManager],
    ) -> None:
        self.module = module
        self.places = places
        self.log = log
        self._context = context
        self._takes_index = len(inspect.signature(module.training_step).parameters) > 1
        self._vmapped = torch.func.vmap(self._one, randomness="different")
        self._batch_idx = 0
        self._shared: dict[str, Any] = {}
        self._constants: dict[str, Any] = {}
        self._skipped = False

    def __call__(
        self, parameters: Tensors, buffers: Tensors, attributes: Attributes, batch: Any, batch_idx: int
    ) -> StepOutput:
        """Take the forward pass.

        Args:
            parameters, buffers: name → tensor of shape (clients, *).
            attributes: what is set on the module meanwhile.
            batch: the clients' batches, tensors of shape (clients, batch, *).
            batch_idx: as ``training_step`` takes it.
        """
        self._batch_idx, self._shared, self._constants, self._skipped = batch_idx, attributes.shared, {}, False
        self.log.begin_step()
        with self._context():
            losses, rest, logged, replaced = self._vmapped(parameters, buffers, attributes.stacked, batch)
        self.log.end_step(logged)
        return StepOutput(None if self._skipped else losses, {**self._constants, **rest}, replaced)

    def _one(self, parameters: Tensors, buffers: Tensors, attributes: dict[str, Any], batch: Any) -> tuple:
        """The step of one client, as vmap sees it."""
        held = {**self._shared, **attributes, "_current_fx_name": "training_step"}
        with holding_attributes(self.module, held), self.places.holding({**parameters, **buffers}):
            output = self.module.training_step(*((batch, self._batch_idx) if self._takes_index else (batch,)))
            after = {name: self.places[name] for name in buffers}
        replaced = {name: buffer for name, buffer in after.items() if buffer is not buffers[name]}
        values = self.log.step_values()
        if output is None:
            self._skipped = True
            return next(iter(parameters.values())).detach().sum(), {}, values, replaced
        loss, rest = loss_and_rest(output)
        if loss.numel() != 1:
            raise MisconfigurationException(f"the loss of `training_step` must be one number, not {loss.numel()}")
        self._constants = {name: value for name, value in rest.items() if not isinstance(value, Tensor)}
        tensors = {name: value.detach() for name, value in rest.items() if isinstance(value, Tensor)}
        return loss.reshape(()), tensors, values, replaced
