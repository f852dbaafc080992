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
        losses, gradients = _stacked(context, model, step, clients, data)
        drawn = torch.get_rng_state()
        shifted, others = _stacked(context, model, step, clients, data, shift=0.1)
        both = zip((losses, *gradients.values()), (shifted, *others.values()), strict=True)
        if not all(_are_close(a[0], b[0]) for a, b in both if a is not None and b is not None):
            raise CannotVectorize(
                "training_step reads parameters from elsewhere than the module, such as the optimizer"
            )
        if not torch.equal(drawn, torch.Generator().manual_seed(SEED).get_state()):  # draws that cannot be held still
            _stacked(context, model, step, clients, data, seed=SEED + 1)
            if torch.equal(torch.get_rng_state(), drawn):
                raise CannotVectorize("training_step seeds torch's generator, and clients would share the draws")
        elif not context.is_coarse:  # else it rounds too much to tell
            _check_singles(context, model, step, clients, data, losses, gradients)


def _stacked(
    context: TrainingContext, model: ResidentModel, step: StackedStep, clients: Sequence[Client], data: Any, *,
    shift: float = 0.0, seed: int = SEED,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return losses and gradients of a step of two clients; to the second one's parameters ``shift`` is added."""
    stack = ClientStack(model, context.optimizers[0], step, clients, [ClientState()] * 2, frozenset(), {})
    try:
        torch.manual_seed(seed)
        for row in stack.optimizer.rows if shift else ():
            if row.is_floating_point():
                row[1] += shift
        losses, _ = stack.forward_backward(range(2), data, 0, 1, alone=True)
        gradients = zip(stack.names, stack.optimizer.parameters)
        return losses, {name: p.grad.clone() for name, p in gradients if p.grad is not None}
    finally:
        stack.remove()


def _check_singles(
    context: TrainingContext, model: ResidentModel, step: StackedStep, clients: Sequence[Client], data: Any,
    losses: Tensor | None, gradients: dict[str, Tensor],
) -> None:
    """Check that each client's own step gives its loss and gradients in the stack."""
    module = context.module
    before = Snapshot(module) if hasattr(module, "on_client_start") else None
    torch.manual_seed(SEED)
    state = torch.get_rng_state()
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
            alike = all(_are_close(a, b.to(a.dtype)) for a, b in pairs)
        if not torch.equal(torch.get_rng_state(), state):
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
