"""The first batch of two clients, trained without consequences, to see whether and how a module can be stacked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_fedbayes.engines.client import Client, ClientState, parameters_of
from lightning_fedbayes.engines.loader import FailedBatch, FederatedLoader
from lightning_fedbayes.engines.plain_steps import step_obstacles
from lightning_fedbayes.engines.state import ResidentModel
from lightning_fedbayes.engines.threads import threads_for
from lightning_fedbayes.engines.vectorized.batches import stack_batches
from lightning_fedbayes.engines.vectorized.entrywise import check_entrywise
from lightning_fedbayes.engines.vectorized.layout import Layout, layout_of
from lightning_fedbayes.engines.vectorized.log import StackedTrainingLog
from lightning_fedbayes.engines.vectorized.places import Places
from lightning_fedbayes.engines.vectorized.reasons import CannotVectorize
from lightning_fedbayes.engines.vectorized.stack import ClientStack
from lightning_fedbayes.engines.vectorized.step import StackedStep
from lightning_fedbayes.engines.vectorized.undisturbed import undisturbed


@dataclass(frozen=True)
class Trial:
    """What the vectorized engine must know of a module.

    Args:
        stacked_keys: names of the optimizer's state that has the parameter's shape.
        layouts: how the gradients of the parameters lie in memory, by name.
        flops: floating-point operations of one client's step, in matrix products and convolutions.
        bytes_per_client: memory that one more client in the stack takes.
    """

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
    module, optimizer = trainer.lightning_module, trainer.optimizers[0]
    log = StackedTrainingLog(module)
    step = StackedStep(module, Places(module), log, trainer.precision_plugin)
    flops, allocations = FlopCounterMode(display=False), _Allocations()
    log.install()
    try:
        data = _first_batch(trainer, loader, clients)
        with threads_for(0):
            with undisturbed(module, optimizer):
                stack = ClientStack(model, optimizer, step, clients, [ClientState()] * 2, frozenset(), {})
                try:
                    with flops, allocations:
                        layouts = _layouts(stack, data)
                finally:
                    stack.remove()
            with undisturbed(module, optimizer):
                _check_independence(model, optimizer, step, clients, data)
        stacked_keys = check_entrywise(optimizer)
    except CannotVectorize:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise CannotVectorize(f"a step cannot run for several clients at once: {reason}") from error
    finally:
        log.remove()
    own = sum(p.numel() * p.element_size() for p in parameters_of(optimizer))
    total = allocations.bytes // 2 + own * (2 + len(stacked_keys))
    return Trial(stacked_keys, layouts, flops.get_total_flops() // 2, total)


def _first_batch(trainer: L.Trainer, loader: FederatedLoader, clients: Sequence[Client]) -> Any:
    """The first batch of one of the ``clients``, twice in a stack."""
    batches = [loader.load(0, client.number) for client in clients]
    batch = next((batch for batch in batches if not isinstance(batch, FailedBatch)), batches[0])
    if isinstance(batch, FailedBatch):
        raise CannotVectorize(f"a first batch could not be loaded: {batch.error}") from batch.error
    ((_, data),) = stack_batches(range(2), [batch, batch]).parts
    return move_data_to_device(trainer.precision_plugin.convert_input(data), trainer.strategy.root_device)


def _layouts(stack: ClientStack, data: Any) -> dict[str, Layout | None]:
    """Take a step forward and back. Returns how the gradients lie in memory."""
    layouts: dict[str, Layout | None] = {}
    stack.optimizer.select(range(2), 0, alone=True)
    for name, parameter in zip(stack.names, stack.optimizer.parameters):
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient, name=name: layouts.update({name: layout_of(gradient)}))
    stack.forward_backward(range(2), data, 0, 0, alone=True)
    return layouts


def _check_independence(
    model: ResidentModel, optimizer: Optimizer, step: StackedStep, clients: Sequence[Client], data: Any
) -> None:
    """See that nothing of the second client reaches the first.

    Raises:
        CannotVectorize: the first client's loss or gradient is another when the second one's parameters are.
    """
    seen: list[list[Tensor]] = []
    for shift in (0.0, 0.1):
        stack = ClientStack(model, optimizer, step, clients, [ClientState()] * 2, frozenset(), {})
        try:
            torch.manual_seed(0)  # the same noise
            for row in stack.optimizer.rows:
                if row.is_floating_point():
                    row[1] += shift
            losses, _ = stack.forward_backward(range(2), data, 0, 0, alone=True)
            gradients = [p.grad[0].clone() for p in stack.optimizer.parameters if p.grad is not None]
        finally:
            stack.remove()
        seen.append([*([] if losses is None else [losses[0]]), *gradients])
    if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in zip(*seen, strict=True)):
        raise CannotVectorize("training_step reads parameters from elsewhere than the module, such as the optimizer")


def _stacking_obstacles(trainer: L.Trainer, model: ResidentModel) -> Iterator[str]:
    """What would go unnoticed, or cannot be shared by the clients of a stack, in words."""
    own = {id(p) for p in model.parameters.values()}
    for parameter in parameters_of(trainer.optimizers[0]):
        if id(parameter) not in own:
            yield "the optimizer holds a tensor that is no parameter of the module"
    for name, parameter in model.parameters.items():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield f"the parameter {name} has a hook, which would not see the clients' gradients"
    for path, each in model.module.named_modules():
        if each._backward_hooks or each._backward_pre_hooks:
            yield f"the module {path} has a backward hook, which vmap leaves out"
    optimizer = trainer.optimizers[0]
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        yield f"{type(optimizer).__name__} has a hook on its step, which may look at the module"
    kept = tree_leaves([value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")])
    if any(leaf is parameter for leaf in kept for parameter in parameters_of(optimizer)):
        yield f"{type(optimizer).__name__} keeps parameters elsewhere than in its groups"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield "a gradient scaler would skip the step of all clients when one overflows; use bf16-mixed"


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
