"""Comparison of a step of two clients at once with the steps of each alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_fedbayes.errors import CannotVectorize
from lightning_fedbayes.private_torch import tree_map
from lightning_fedbayes.training.client import Client, ClientState
from lightning_fedbayes.training.context import TrainingContext, loss_and_rest, takes_index
from lightning_fedbayes.training.model import ResidentModel
from lightning_fedbayes.training.snapshot import Snapshot, noted_buffers
from lightning_fedbayes.training.vectorized.stack import ClientStack
from lightning_fedbayes.training.vectorized.step import StackedStep
from lightning_fedbayes.training.vectorized.swap import with_attributes


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

    What a step counts or remembers out of sight, as in a closure, shows here.

    Raises:
        CannotVectorize: it is not.
    """
    module, optimizer = context.module, context.optimizers[0]
    if context.is_coarse:
        return  # it rounds too much to tell
    state, before = torch.get_rng_state(), Snapshot(module)
    with Still():
        stack = ClientStack(model, optimizer, step, clients, [ClientState()] * 2, frozenset(), {})
        try:
            losses, _ = stack.forward_backward(range(2), data, 0, 1, alone=True)
            gradients = {n: p.grad for n, p in zip(stack.names, stack.optimizer.parameters) if p.grad is not None}
        finally:
            stack.remove()
        for slot, client in enumerate(clients):
            own = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in model.parameters.items()}
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            batch = tree_map(lambda stacked, slot=slot: stacked[slot], data)
            with step.swap.using({**own, **buffers}), step.log.metrics.noting():
                loss = _single_loss(context, client, batch)
            alike = (loss is None) == (losses is None)
            if alike and loss is not None and losses is not None:
                single = torch.autograd.grad(loss.reshape(()), [own[name] for name in gradients], allow_unused=True)
                pairs = [(losses[slot], loss.detach().reshape(()))]
                pairs += [(g[slot], each) for g, each in zip(gradients.values(), single) if each is not None]
                alike = all(torch.allclose(a, b.to(a.dtype), rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in pairs)
            if not torch.equal(torch.get_rng_state(), state):
                break  # draws that cannot be held still: nothing can be said
            if not alike:
                raise CannotVectorize(
                    "a step of two clients at once is not that of each: training_step may count or remember something "
                    "outside of the module"
                )
    before.restore()  # what on_client_start has set


def _single_loss(context: TrainingContext, client: Client, batch: Any) -> Tensor | None:
    """Return the loss of one client on its second ``batch``."""
    module = context.module
    hook = getattr(module, "on_client_start", None)
    if hook is not None:
        hook(client)
    with with_attributes(module, context.training_step_marks), context.precision.train_step_context():
        output = module.training_step(*((batch, 1) if takes_index(module) else (batch,)))
    return None if output is None else loss_and_rest(output)[0]


class Still(TorchFunctionMode):
    """Inside, random draws of torch are constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("dropout", "dropout_", "feature_dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d"):
            return args[0]
        if name in ("randn_like", "rand_like", "bernoulli"):
            return torch.full_like(args[0], 0.25)
        if name in ("randn", "rand"):
            return torch.full(args[0] if isinstance(args[0], Sequence) else args, 0.25, **{
                key: value for key, value in kwargs.items() if key in ("dtype", "device")})
        if name in ("normal_", "uniform_", "bernoulli_"):
            return args[0].fill_(0.25)
        return func(*args, **kwargs)
