"""Dry run: a step without consequences, compared with each client's own, refused if clients would share its changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_fedbayes.clients.context import TrainingContext, loss_and_rest, takes_index
from lightning_fedbayes.clients.model import ResidentModel
from lightning_fedbayes.clients.snapshot import ModuleState, Snapshot, noted_buffers
from lightning_fedbayes.clients.states import Client, ClientState, options_of, parameters_of
from lightning_fedbayes.clients.vectorized.stack import ClientStack
from lightning_fedbayes.clients.vectorized.step import StackedStep
from lightning_fedbayes.clients.vectorized.swap import with_attributes
from lightning_fedbayes.core.errors import CannotVectorize
from lightning_fedbayes.core.private_torch import tree_map
from lightning_fedbayes.core.seeding import random_state


class ChangesForGood(CannotVectorize):
    """A dry run has changed something that cannot be put back, such as an entry of a network's configuration.

    What the first step of all sets, no later one changes: a second dry run then finds nothing.
    """


@contextmanager
def dry_run(module: nn.Module, optimizer: Optimizer) -> Iterator[Callable[[], None]]:
    """Inside, ``module`` runs without consequences for itself and for random number generators.

    Gives a function that raises CannotVectorize if the module has changed something that all clients would share.
    """
    before = ModuleState(module, (*module.named_parameters(), *module.named_buffers()))
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    options = options_of(optimizer)
    host = random.getstate(), np.random.get_state()
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}

    def check() -> None:
        found = [(path, name, each) for path, each in before.snapshots.items() for name in each.changes()]
        changed = [f"{path}.{name}" if path else name for path, name, _ in found]
        changed += before.written()
        if changed:
            stays = len(changed) == len(found) and not any(each.can_restore(name) for _, name, each in found)
            error = ChangesForGood if stays else CannotVectorize
            raise error(f"training_step changes self.{changed[0]}, which clients would share")
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        reached = [name for name, p in module.named_parameters() if p.grad is not None and id(p) in held]
        if reached:
            raise CannotVectorize(f"training_step keeps the parameter {reached[0]} elsewhere than in its module")
        if options_of(optimizer) != options:
            raise CannotVectorize("training_step changes the optimizer's options, which clients would share")
        numpy_state = zip(np.random.get_state(), host[1], strict=True)
        if random.getstate() != host[0] or not all(np.array_equal(now, before) for now, before in numpy_state):
            raise CannotVectorize(
                "training_step draws from Python's or NumPy's generator, and clients would share the draw; use torch's"
            )

    for parameter in module.parameters():
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices):
            yield check
    finally:
        random.setstate(host[0])
        np.random.set_state(host[1])
        before.restore()
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name]
        for group, own in zip(optimizer.param_groups, options, strict=True):
            group.update(own)


SEED = 0x5EED
"""Seed of the dry run, which no training_step sets by chance."""


def check_buffers(stack: ClientStack) -> None:
    """Raise CannotVectorize if a step has changed buffers that no client sends, which the module would keep."""
    sent = stack.model.global_buffers
    live = dict(stack.model.module.named_buffers())
    for name in noted_buffers(stack.model.module, sent):
        if not torch.equal(stack.buffers[name][0], live[name]):
            raise CannotVectorize(f"training changes the buffer {name}, which is not persistent, so nobody averages it")


def check_against_single(
    context: TrainingContext, model: ResidentModel, step: StackedStep, clients: Sequence[Client], data: Any
) -> None:
    """Check that a step of two clients at once is that of each alone, where random draws are held still.

    What a step counts or remembers out of sight, as in a closure, shows here, and parameters from elsewhere: the first
    client must not notice that the second's are changed.

    Raises:
        CannotVectorize: it is not, or the step seeds torch's generator.
    """
    with Still():
        torch.manual_seed(SEED)
        seeded = random_state(context.device)
        losses, gradients = _stacked(context, model, step, clients, data)
        drawn = random_state(context.device)
        shifted, others = _stacked(context, model, step, clients, data, shift=0.1)
        both = zip((losses, *gradients.values()), (shifted, *others.values()), strict=True)
        if not all(_are_close(a[0], b[0]) for a, b in both if a is not None and b is not None):
            raise CannotVectorize(
                "training_step reads parameters from elsewhere than the module, such as the optimizer"
            )
        if not torch.equal(drawn, seeded):  # draws that cannot be held still
            _stacked(context, model, step, clients, data, seed=SEED + 1)
            if torch.equal(random_state(context.device), drawn):
                raise CannotVectorize("training_step seeds torch's generator, and clients would share the draws")
        elif not context.is_coarse:  # else it rounds too much to tell
            _check_singles(context, model, step, clients, data, losses, gradients)


def _stacked(
    context: TrainingContext,
    model: ResidentModel,
    step: StackedStep,
    clients: Sequence[Client],
    data: Any,
    *,
    shift: float = 0.0,
    seed: int = SEED,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return losses and gradients of a step of two clients; to the second one's parameters ``shift`` is added."""
    stack = ClientStack(model, context.optimizers[0], step, clients, [ClientState()] * 2, [{}] * 2)
    try:
        torch.manual_seed(seed)
        for name, row in zip(stack.names, stack.optimizer.rows if shift else ()):
            if row.is_floating_point() and name not in model.frozen:
                row[1] += shift
        stack.optimizer.select(range(2), 0, alone=True)
        losses, _ = stack.forward_backward(range(2), data, 1)
        gradients = zip(stack.names, stack.optimizer.parameters)
        return losses, {name: p.grad.clone() for name, p in gradients if p.grad is not None}
    finally:
        stack.remove()


def _check_singles(
    context: TrainingContext,
    model: ResidentModel,
    step: StackedStep,
    clients: Sequence[Client],
    data: Any,
    losses: Tensor | None,
    gradients: dict[str, Tensor],
) -> None:
    """Check that each client's own step gives its loss and gradients in the stack."""
    module = context.module
    before = Snapshot(module) if hasattr(module, "on_client_start") else None
    torch.manual_seed(SEED)
    state = random_state(context.device)
    for slot, client in enumerate(clients):
        own = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in model.parameters.items()}
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        batch = tree_map(lambda stacked, slot=slot: stacked[slot], data)
        with step.swap.using({**own, **buffers}), step.log.metrics.noting():
            if before is not None:
                module.on_client_start(client)  # pyright: ignore[reportCallIssue]
            with with_attributes(module, context.training_step_marks), context.precision.train_step_context():
                output = module.training_step(*((batch, 1) if takes_index(module) else (batch,)))
            loss = None if output is None else loss_and_rest(output)[0]
        alike = (loss is None) == (losses is None)
        if alike and loss is not None and losses is not None:
            single = torch.autograd.grad(loss.reshape(()), [own[name] for name in gradients], allow_unused=True)
            pairs = [(losses[slot], loss.detach().reshape(()))]
            pairs += [(g[slot], each) for g, each in zip(gradients.values(), single) if each is not None]
            alike = all(_are_close(a, b.to(a.dtype)) for a, b in pairs)
        if not torch.equal(random_state(context.device), state):
            break  # draws that cannot be held still: nothing can be said
        if not alike:
            raise CannotVectorize(
                "a step of two clients at once is not that of each: training_step may count or remember something "
                "outside of the module"
            )
    if before is not None:
        before.restore()  # what on_client_start has set


def _are_close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-3, atol=1e-5, equal_nan=True)


class Still(TorchFunctionMode):
    """Inside, random draws of torch are constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("dropout", "dropout_", "feature_dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d"):
            return args[0]
        if name in ("randn_like", "rand_like", "bernoulli"):
            return torch.full_like(args[0], 0.25)
        if name in ("randn", "rand"):
            return torch.full(
                args[0] if isinstance(args[0], Sequence) else args,
                0.25,
                **{key: value for key, value in kwargs.items() if key in ("dtype", "device")},
            )
        if name in ("normal_", "uniform_", "bernoulli_"):
            return args[0].fill_(0.25)
        return func(*args, **kwargs)
