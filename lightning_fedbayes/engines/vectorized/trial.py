"""The first batch of two clients, trained without consequences, to see whether and how a module can be stacked."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_fedbayes.engines.client import Client, ClientState, parameters_of
from lightning_fedbayes.engines.loader import FailedBatch, FederatedLoader
from lightning_fedbayes.engines.plain_steps import step_obstacles
from lightning_fedbayes.engines.state import ResidentModel
from lightning_fedbayes.engines.vectorized.attributes import Snapshot
from lightning_fedbayes.engines.vectorized.batches import stack_batches
from lightning_fedbayes.engines.vectorized.entrywise import check_entrywise
from lightning_fedbayes.engines.vectorized.layout import Layout, layout_of
from lightning_fedbayes.engines.vectorized.log import StackedTrainingLog
from lightning_fedbayes.engines.vectorized.places import Places
from lightning_fedbayes.engines.vectorized.reasons import CannotVectorize
from lightning_fedbayes.engines.vectorized.stack import ClientStack
from lightning_fedbayes.engines.vectorized.step import StackedStep
from lightning_fedbayes.engines.vectorized.threads import threads_for


@dataclass(frozen=True)
class Trial:
    """What the vectorized engine must know of a module.

    Args:
        buffers: names of the buffers that change in a step, of which every client needs its own.
        stacked_keys: names of the optimizer's state that has the parameter's shape.
        layouts: how the gradients of the parameters lie in memory, by name.
        flops: floating-point operations of one client's step, in matrix products and convolutions.
        bytes_per_client: memory that one more client in the stack takes.
    """

    buffers: tuple[str, ...]
    stacked_keys: frozenset[str]
    layouts: Mapping[str, Layout | None]
    flops: int
    bytes_per_client: int


def try_two_clients(
    trainer: L.Trainer, model: ResidentModel, loader: FederatedLoader, clients: Sequence[Client]
) -> Trial:
    """Take one step of ``clients`` as a stack and forget it.

    Args:
        trainer: in ``fit``, with its optimizers.
        model: the resident network.
        loader: the federation's loader.
        clients: two clients.

    Raises:
        CannotVectorize: the module, its optimizer, its batches or the Trainer do not allow it; the message says why.
    """
    obstacle = next(step_obstacles(trainer), None) or next(_stacking_obstacles(trainer, model), None)
    if obstacle is not None:
        raise CannotVectorize(obstacle)
    module = trainer.lightning_module
    first = loader.load(0, clients[0].number)
    if isinstance(first, FailedBatch):
        raise CannotVectorize(f"the first batch could not be loaded: {first.error}") from first.error
    ((slots, data),) = stack_batches(range(2), [first, first]).parts
    data = move_data_to_device(trainer.precision_plugin.convert_input(data), trainer.strategy.root_device)

    log, places = StackedTrainingLog(module), Places(module)
    step = StackedStep(module, places, log, trainer.precision_plugin.train_step_context)
    buffers = [name for name, _ in module.named_buffers()]
    log.install()
    try:
        flops, allocations = FlopCounterMode(display=False), _Allocations()
        with threads_for(0), _undisturbed(module), flops, allocations:
            stack = ClientStack(
                model, trainer.optimizers[0], step, clients, [ClientState()] * 2, buffers, frozenset(), {}
            )
            layouts: dict[str, Layout | None] = {}
            stack.optimizer.select(slots, 0, alone=True)
            for name, parameter in zip(stack.names, stack.optimizer.parameters):
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient, name=name: layouts.update({name: layout_of(gradient)}))
            before = {name: (buffer._version, buffer.clone()) for name, buffer in stack.buffers.items()}
            try:
                stack.forward_backward(slots, data, 0, 0, alone=True)
            finally:
                stack.remove()
            # batch norm writes without telling the version counter; other writes may leave the values as they were
            changed = tuple(
                name
                for name, (version, values) in before.items()
                if stack.buffers[name]._version != version or not torch.equal(stack.buffers[name], values)
            )
    except CannotVectorize:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise CannotVectorize(f"training_step cannot run for several clients at once: {reason}") from error
    finally:
        log.remove()
    stacked_keys = check_entrywise(trainer.optimizers[0])
    own = sum(p.numel() * p.element_size() for p in parameters_of(trainer.optimizers[0]))
    total = allocations.bytes // 2 + own * (2 + len(stacked_keys))
    return Trial(changed, stacked_keys, layouts, flops.get_total_flops() // 2, total)


def _stacking_obstacles(trainer: L.Trainer, model: ResidentModel) -> Iterator[str]:
    """What would go unnoticed, or cannot be shared by the clients of a stack, in words."""
    own = {id(p) for p in model.parameters.values()}
    for parameter in parameters_of(trainer.optimizers[0]):
        if id(parameter) not in own:
            yield "the optimizer holds a tensor that is no parameter of the module"
    for name, parameter in model.parameters.items():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield f"the parameter {name} has a hook, which would not see the clients' gradients"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield "a gradient scaler would skip the step of all clients when one overflows; use bf16-mixed"


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` runs without consequences for its attributes and the generators of random numbers.

    Raises:
        CannotVectorize: it changed an attribute or drew from a generator, which all clients would share.
    """
    snapshots = {path: Snapshot(each) for path, each in module.named_modules()}
    host = random.getstate(), np.random.get_state()
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices):
            yield
        changed = [f"{path}.{name}" if path else name for path, each in snapshots.items() for name in each.changes()]
        if changed:
            raise CannotVectorize(f"training_step changes self.{changed[0]}, which clients would share")
        if random.getstate() != host[0] or not _equal(np.random.get_state(), host[1]):
            raise CannotVectorize(
                "training_step draws from Python's or NumPy's generator, and clients would share the draw; use torch's"
            )
    finally:
        random.setstate(host[0])
        np.random.set_state(host[1])
        for snapshot in snapshots.values():
            snapshot.restore()


def _equal(first: Any, second: Any) -> bool:
    """Whether two states of NumPy's generator are the same."""
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


class _Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make: more than a step ever holds at once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            new = [t for t in tree_leaves(result) if isinstance(t, Tensor) and not any(t is given for given in args)]
            self.bytes += sum(t.numel() * t.element_size() for t in new)
        return result
