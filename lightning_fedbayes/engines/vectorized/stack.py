"""The networks of several clients in one stack, and what they do together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_fedbayes.engines.client import Client, ClientState, parameters_of
from lightning_fedbayes.engines.state import ResidentModel, Tensors
from lightning_fedbayes.engines.vectorized.layout import Layout, empty_with_layout
from lightning_fedbayes.engines.vectorized.optimizer import Kept, StackedOptimizer
from lightning_fedbayes.engines.vectorized.rows import put_rows, take_rows
from lightning_fedbayes.engines.vectorized.schedule import Slots
from lightning_fedbayes.engines.vectorized.start import start_clients
from lightning_fedbayes.engines.vectorized.step import Attributes, StackedStep
from lightning_fedbayes.posterior import GaussianPosterior

Clip = Callable[[Sequence[Tensor]], None]


class ClientStack:
    """Parameters, buffers and optimizer state of several clients; the module itself keeps the global model.

    Args:
        model: the resident network, whose global model the clients start from.
        optimizer: the user's, of whose parameters every client gets its own.
        step: the stacked training step.
        clients: who is in the stack, slot by slot.
        states: what each of them has kept.
        stacked_keys: see :class:`~lightning_fedbayes.engines.vectorized.optimizer.StackedOptimizer`.
        layouts: how the stacks of parameters lie in memory, by name; see
            :mod:`~lightning_fedbayes.engines.vectorized.layout`.
    """

    def __init__(
        self,
        model: ResidentModel,
        optimizer: Optimizer,
        step: StackedStep,
        clients: Sequence[Client],
        states: Sequence[ClientState],
        stacked_keys: Collection[str],
        layouts: Mapping[str, Layout | None],
    ) -> None:
        self.model = model
        self.step = step
        names = {id(parameter): name for name, parameter in model.parameters.items()}
        self.names = [names[id(parameter)] for parameter in parameters_of(optimizer)]
        locals_ = [state.local for state in states]
        rows = [_stack(model.global_parameters[name], name, locals_, layouts.get(name)) for name in self.names]
        live = {**dict(model.module.named_buffers()), **model.global_buffers}
        self.buffers = {name: _stack(value, name, locals_) for name, value in live.items()}
        kept: list[Kept] = [state.optimizers[0] if state.optimizers else {} for state in states]
        everything = {**dict(zip(self.names, rows)), **self.buffers}
        # before anything is changed that must be put back
        self.attributes = start_clients(step.module, clients, step.places, everything)
        self.optimizer = StackedOptimizer(optimizer, rows, kept, stacked_keys)

    def forward_backward(
        self, slots: Slots, batch: Any, steps: int, batch_idx: int, *, alone: bool, clip: Clip | None = None
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Gradients of the clients in ``slots``, ready for :meth:`StackedOptimizer.step`.

        Args:
            slots: clients of one kind.
            batch: their batches, tensors of shape (clients, batch, *).
            steps: how many steps each of them has taken.
            batch_idx: what ``training_step`` is told.
            alone: see :meth:`StackedOptimizer.select`.
            clip: changes the gradients in place.

        Returns: the losses, shape (clients,), None if the batch is skipped; and what else ``training_step`` returned.
        """
        optimizer = self.optimizer
        optimizer.select(slots, steps, alone=alone)
        parameters: Tensors = dict(zip(self.names, optimizer.parameters))
        buffers = {name: take_rows(stack, slots) for name, stack in self.buffers.items()}
        before = {name: rows.clone() for name, rows in buffers.items()}
        stacked = self.attributes.stacked
        if stacked:
            stacked = tree_map(lambda value: take_rows(value, slots), stacked)
        try:
            output = self.step(parameters, buffers, Attributes(stacked, self.attributes.shared), batch, batch_idx)
            if output.losses is not None:
                for parameter in optimizer.parameters:
                    parameter.grad = None
                output.losses.backward(torch.ones_like(output.losses))  # of each client alone: they share nothing
                if clip is not None:
                    clip([p.grad for p in optimizer.parameters if p.grad is not None])
        except Exception:
            for name, rows in before.items():  # the clients that are well try again alone
                put_rows(self.buffers[name], slots, rows)
            raise
        for name, buffer in (buffers | output.buffers).items():
            put_rows(self.buffers[name], slots, buffer)
        if output.losses is None:
            return None, output.rest
        return output.losses.detach(), output.rest

    def read_posteriors(self) -> list[GaussianPosterior]:
        """What each client sends: views of the stack, slot by slot."""
        self.optimizer.write_back()
        rows = dict(zip(self.names, self.optimizer.rows))
        count = len(self.optimizer.rows[0])
        everything = {
            name: rows.get(name, parameter.detach().expand(count, *parameter.shape))
            for name, parameter in self.model.parameters.items()
        }
        with self.step.places.holding(everything):
            stacked = self.model.read_posterior()
        return stacked.unbind()

    def read_buffers(self, slot: int) -> Tensors:
        """The buffers that a client sends."""
        sent = self.model.federated_buffers
        return {name: self.buffers[name][slot] for name in sent}

    def read_local(self, slot: int) -> Tensors:
        """What a client keeps for its next round: local parameters and buffers."""
        rows = {**dict(zip(self.names, self.optimizer.rows)), **self.buffers}
        return {
            name: (rows[name][slot] if name in rows else value).clone()
            for name, value in self.model.kept_values().items()
        }

    def remove(self) -> None:
        """Give the optimizer its own parameters back."""
        self.optimizer.remove()


def _stack(value: Tensor, name: str, local: Sequence[Tensors], layout: Layout | None = None) -> Tensor:
    """``value`` once for each client, or what the client has kept under ``name``; shape (clients, *)."""
    stack = empty_with_layout((len(local), *value.shape), layout, value)
    stack.copy_(value)
    for slot, kept in enumerate(local):
        if name in kept:
            stack[slot] = kept[name]
    return stack
