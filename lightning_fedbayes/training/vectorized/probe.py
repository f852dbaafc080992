"""Probe: a dry run of the first batch of two clients, to find whether and how a module can be trained as a stack."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from lightning_fedbayes.errors import CannotVectorize
from lightning_fedbayes.private_torch import (
    TorchDispatchMode,
    has_backward_hook,
    has_gradient_hook,
    has_step_hook,
    tree_leaves,
)
from lightning_fedbayes.training.client import Client, ClientState, options_of, parameters_of
from lightning_fedbayes.training.context import TrainingContext
from lightning_fedbayes.training.engine import threads_for
from lightning_fedbayes.training.loader import FailedBatch, FederatedLoader
from lightning_fedbayes.training.model import ResidentModel
from lightning_fedbayes.training.vectorized.dry_run import dry_run
from lightning_fedbayes.training.vectorized.log import StackedTrainingLog
from lightning_fedbayes.training.vectorized.optimizer import set_parameters
from lightning_fedbayes.training.vectorized.schedule import stack_batches
from lightning_fedbayes.training.vectorized.stack import ClientStack, Layout, layout_of
from lightning_fedbayes.training.vectorized.step import StackedStep

LARGEST = 8
"""Number of entries of every dimension of a parameter with which an optimizer is tried."""

STEPS = 8
"""Number of steps with which an optimizer is tried: it may do something else every few steps."""


@dataclass(frozen=True)
class ProbeResult:
    """Properties of a module and its optimizer that the vectorized engine needs.

    Args:
        stacked_keys: names of the optimizer's state that has the parameter's shape.
        layouts: name of the parameter → memory layout of its stacked gradient.
        flops: floating-point operations of one client's step, in matrix products and convolutions.
        bytes_per_client: memory that one more client in the stack takes.
    """

    stacked_keys: frozenset[str]
    layouts: Mapping[str, Layout | None]
    flops: int
    bytes_per_client: int


def probe(
    context: TrainingContext, model: ResidentModel, loader: FederatedLoader, clients: Sequence[Client]
) -> ProbeResult:
    """Take one step of two clients as a stack, in a dry run.

    Args:
        context: the training loop's module, optimizers and options.
        model: the resident network.
        loader: the federation's loader.
        clients: two clients.

    Raises:
        CannotVectorize: the module, its optimizer, its batches or the Trainer do not allow it; the message says why.
    """
    module = context.module
    log = StackedTrainingLog(context)
    log.install()
    try:
        obstacle = next(iter(context.obstacles()), None) or next(_stacking_obstacles(context, model), None)
        if obstacle is not None:
            raise CannotVectorize(obstacle)
        optimizer = context.optimizers[0]
        step = StackedStep(context, log)
        flops, allocations = FlopCounterMode(display=False), _Allocations()
        data = _first_batch(context, loader, clients)
        with threads_for(0):
            with dry_run(module, optimizer):
                stack = ClientStack(model, optimizer, step, clients, [ClientState()] * 2, frozenset(), {})
                try:
                    with flops, allocations:
                        layouts = _layouts(stack, data)
                finally:
                    stack.remove()
            with dry_run(module, optimizer):
                _check_independence(model, optimizer, step, clients, data)
        stacked_keys = check_elementwise(optimizer)
    except CannotVectorize:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise CannotVectorize(f"a step cannot run for several clients at once: {reason}") from error
    finally:
        log.remove()
    own = sum(p.numel() * p.element_size() for p in parameters_of(optimizer))
    total = allocations.bytes // 2 + own * (2 + len(stacked_keys))
    return ProbeResult(stacked_keys, layouts, flops.get_total_flops() // 2, total)


def _first_batch(context: TrainingContext, loader: FederatedLoader, clients: Sequence[Client]) -> Any:
    """Return the first batch of one of the ``clients``, twice in a stack."""
    batches = [loader.load(0, client.number) for client in clients]
    batch = next((batch for batch in batches if not isinstance(batch, FailedBatch)), batches[0])
    if isinstance(batch, FailedBatch):
        raise CannotVectorize(f"a first batch could not be loaded: {batch.error}") from batch.error
    ((_, data),) = stack_batches(range(2), [batch, batch]).parts
    return move_data_to_device(context.precision.convert_input(data), context.device)


def _layouts(stack: ClientStack, data: Any) -> dict[str, Layout | None]:
    """Take a forward and a backward pass. Returns the memory layouts of the gradients by name."""
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
    """Check that the first client's loss and gradient do not depend on the second client's parameters.

    Raises:
        CannotVectorize: they do.
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


def _stacking_obstacles(context: TrainingContext, model: ResidentModel) -> Iterator[str]:
    """Yield the reasons why a stack cannot train this module, of those that a dry run would not show."""
    own = {id(p) for p in model.parameters.values()}
    for parameter in parameters_of(context.optimizers[0]):
        if id(parameter) not in own:
            yield "the optimizer holds a tensor that is no parameter of the module"
    for name, parameter in model.parameters.items():
        if has_gradient_hook(parameter):
            yield f"the parameter {name} has a hook, which would not see the clients' gradients"
    for path, each in model.module.named_modules():
        if has_backward_hook(each):
            yield f"the module {path} has a backward hook, which vmap leaves out"
    optimizer = context.optimizers[0]
    if has_step_hook(optimizer):
        yield f"{type(optimizer).__name__} has a hook on its step, which may look at the module"
    kept = tree_leaves([value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")])
    if any(leaf is parameter for leaf in kept for parameter in parameters_of(optimizer)):
        yield f"{type(optimizer).__name__} keeps parameters elsewhere than in its groups"
    if getattr(context.precision, "scaler", None) is not None:
        yield "a gradient scaler would skip the step of all clients when one overflows; use bf16-mixed"


class _Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that operations create: an upper bound of what a step holds at once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            new = [t for t in tree_leaves(result) if isinstance(t, Tensor) and not any(t is given for given in args)]
            self.bytes += sum(t.numel() * t.element_size() for t in new)
        return result


def check_elementwise(optimizer: Optimizer) -> frozenset[str]:
    """Check, on copies with random gradients, that a step of two stacked networks is the step of each.

    Returns: names of the state that has the parameter's shape.

    Raises:
        CannotVectorize: it is not, for example because the optimizer takes norms of whole tensors.
    """
    random = torch.Generator().manual_seed(0)
    corners = [p.detach()[tuple(slice(LARGEST) for _ in p.shape)].clone() for p in parameters_of(optimizer)]
    # half precision rounds differently in a stack
    corners = [corner if corner.dtype == torch.float64 else corner.float() for corner in corners]
    rows = [torch.stack([corner, corner + 0.1]) for corner in corners]
    together, *alone = (_copy_of(optimizer, corners) for _ in range(3))
    set_parameters(together, [Parameter(stack.clone()) for stack in rows])
    for slot, single in enumerate(alone):
        set_parameters(single, [Parameter(stack[slot].clone()) for stack in rows])
    options = copy.deepcopy(_options(together))
    for step in range(STEPS):
        scale = 0.1 ** (step % 2)
        gradients = [
            torch.stack([scale * torch.randn(p.shape, generator=random), 100 * torch.randn(p.shape, generator=random)])
            for p in corners
        ]
        for parameter, gradient in zip(parameters_of(together), gradients):
            parameter.grad = gradient.to(parameter, copy=True)
        together.step()
        for slot, single in enumerate(alone):
            for parameter, gradient in zip(parameters_of(single), gradients):
                parameter.grad = gradient[slot].to(parameter, copy=True)
            single.step()
    for i, parameter in enumerate(parameters_of(together)):
        expected = torch.stack([parameters_of(single)[i].detach() for single in alone])
        if not torch.allclose(parameter.detach(), expected, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise CannotVectorize(f"{type(optimizer).__name__} does not treat every entry of a parameter alike")
    if _options(together) != options:
        raise CannotVectorize(f"{type(optimizer).__name__} counts in its options, which clients would share")
    return frozenset(
        key
        for parameter, state in together.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    )


def _copy_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Optimizer:
    """Return a copy of ``optimizer`` with other ``parameters`` and without state."""
    own, state = parameters_of(optimizer), optimizer.state
    set_parameters(optimizer, parameters)
    optimizer.state = defaultdict(dict)
    try:
        copied = copy.deepcopy(optimizer)
    finally:
        set_parameters(optimizer, own)
        optimizer.state = state
    # deepcopy leaves out attributes that torch does not know; a learning-rate scheduler's "step" is the original's
    missing = {name: value for name, value in vars(optimizer).items() if name not in vars(copied) and name != "step"}
    vars(copied).update(missing)
    return copied


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups, and its own attributes that are numbers or text."""
    plain = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float | str)}
    return [*options_of(optimizer), plain]
