"""One training step of several clients at once."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_fedbayes.engines.plain_steps import loss_and_rest, takes_index
from lightning_fedbayes.engines.state import Tensors
from lightning_fedbayes.engines.vectorized.attributes import holding_attributes
from lightning_fedbayes.engines.vectorized.functions import StackedFunctions
from lightning_fedbayes.engines.vectorized.log import StackedTrainingLog
from lightning_fedbayes.engines.vectorized.places import Places
from lightning_fedbayes.engines.vectorized.small_sites import Sites, SmallSites
from lightning_fedbayes.engines.vectorized.vmap import clients, enter, leave


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
    """``training_step`` under vmap, with every client's own parameters, buffers and noise.

    Args:
        module: the user's module.
        places: where its parameters and buffers live.
        log: takes the calls of ``self.log``.
        precision: whose context the step runs in, such as autocast.
    """

    def __init__(
        self,
        module: L.LightningModule,
        places: Places,
        log: StackedTrainingLog,
        precision: Precision,
    ) -> None:
        self.module = module
        self.places = places
        self.log = log
        self._context = nullcontext if type(precision) is Precision else precision.train_step_context
        self._takes_index = takes_index(module)
        self._sites = Sites(module)
        torch.func.vmap(torch.sin)(torch.zeros(1))  # loads torch's batching rules that are written in Python

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
        held = {**attributes.shared, "_current_fx_name": "training_step"}
        tensors = {**parameters, **buffers}
        count = len(next(iter(tensors.values())))
        self.log.begin_step()
        with self._context(), clients(count) as level:

            def inside(value: Any) -> Any:
                return tree_map_only(Tensor, lambda stack: enter(stack, level), value)

            held |= {name: inside(value) for name, value in attributes.stacked.items()}
            entered = {name: enter(stack, level) for name, stack in tensors.items()}
            batch = [enter(each, level) for each in batch] if is_list_of_tensors(batch) else inside(batch)
            small = SmallSites(self._sites, parameters, entered)
            functions = StackedFunctions(level, self._sites, small)
            with holding_attributes(self.module, held), self.places.holding(entered), functions:
                output = self.module.training_step(*((batch, batch_idx) if self._takes_index else (batch,)))
                replaced = {
                    name: leave(after, level, count)
                    for name in buffers
                    if (after := self.places[name]) is not entered[name] and after is not None
                }
            self.log.end_step(lambda value: leave(value, level, count))
            if output is None:
                return StepOutput(None, {}, replaced)
            loss, rest = loss_and_rest(output)
            if loss.numel() != 1:
                raise MisconfigurationException(f"the loss of `training_step` must be one number, not {loss.numel()}")
            rest = dict(rest) and tree_map_only(Tensor, lambda value: leave(value.detach(), level, count), dict(rest))
            loss = loss.reshape(()) if loss.dim() else loss
            return StepOutput(leave(loss, level, count), rest, replaced)


def is_list_of_tensors(batch: Any) -> bool:
    """Whether a batch is what a ``TensorDataset`` gives."""
    return type(batch) is list and all(isinstance(each, Tensor) for each in batch)
