"""Probe: a dry run of the first batch of two clients, to find whether and how a module can be trained as a stack."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_fedbayes.errors import CannotVectorize
from lightning_fedbayes.private_torch import (
    TorchDispatchMode,
    has_backward_hook,
    has_gradient_hook,
    has_step_hook,
    tree_leaves,
    tree_map,
)
from lightning_fedbayes.training.client import Client, ClientState, options_of, parameters_of
from lightning_fedbayes.training.context import TrainingContext, loss_and_rest, takes_index
from lightning_fedbayes.training.engine import threads_for
from lightning_fedbayes.training.loader import FailedBatch, FederatedLoader
from lightning_fedbayes.training.model import ResidentModel
from lightning_fedbayes.training.optimizers import has_own_state
from lightning_fedbayes.training.snapshot import Snapshot, noted_buffers
from lightning_fedbayes.training.vectorized.dry_run import dry_run
from lightning_fedbayes.training.vectorized.log import StackedTrainingLog
from lightning_fedbayes.training.vectorized.optimizer import set_parameters
from lightning_fedbayes.training.vectorized.reasons import explain
from lightning_fedbayes.training.vectorized.schedule import stack_batches
from lightning_fedbayes.training.vectorized.stack import ClientStack, Layout, layout_of
from lightning_fedbayes.training.vectorized.step import StackedStep
from lightning_fedbayes.training.vectorized.swap import with_attributes

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
        reads_index: ``training_step`` uses the number of the batch.
        flops: floating-point operations of one client's step, in matrix products and convolutions.
        bytes_per_client: memory that one more client in the stack takes.
    """

    stacked_keys: frozenset[str]
    layouts: Mapping[str, Layout | None]
    reads_index: bool
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
        index = _Index(0)
        with threads_for(0), context.watched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operations that are slow in a stack, or the same ones as in training
            with dry_run(module, optimizer):
                torch.manual_seed(1)
                stack = ClientStack(model, optimizer, step, clients, [ClientState()] * 2, frozenset(), {})
                try:
                    with flops, allocations:
                        layouts = _layouts(stack, data, index)
                    _check_buffers(stack)
                finally:
                    stack.remove()
                drawn = torch.get_rng_state()
            with dry_run(module, optimizer):
                _check_independence(model, optimizer, step, clients, data)
                if torch.equal(torch.get_rng_state(), drawn):  # from another seed
                    raise CannotVectorize("training_step seeds torch's generator, and clients would share the draws")
            with dry_run(module, optimizer):
                _check_against_single(context, model, step, clients, data)
        stacked_keys = check_elementwise(optimizer)
    except CannotVectorize:
        raise
    except Exception as error:
        raise CannotVectorize(f"a step cannot run for several clients at once: {explain(error)}") from error
    finally:
        log.remove()
    own = sum(p.numel() * p.element_size() for p in parameters_of(optimizer))
    total = allocations.bytes // 2 + own * (2 + len(stacked_keys))
    return ProbeResult(stacked_keys, layouts, index.is_read, flops.get_total_flops() // 2, total)


def _first_batch(context: TrainingContext, loader: FederatedLoader, clients: Sequence[Client]) -> Any:
    """Return the first batch of one of the ``clients``, twice in a stack."""
    batches = [loader.load(0, client.number) for client in clients]
    batch = next((batch for batch in batches if not isinstance(batch, FailedBatch)), batches[0])
    if isinstance(batch, FailedBatch):
        raise CannotVectorize(f"a first batch could not be loaded: {batch.error}") from batch.error
    ((_, data),) = stack_batches(range(2), [batch, batch]).parts
    return move_data_to_device(context.precision.convert_input(data), context.device)


def _layouts(stack: ClientStack, data: Any, index: int) -> dict[str, Layout | None]:
    """Take a forward and a backward pass. Returns the memory layouts of the gradients by name."""
    layouts: dict[str, Layout | None] = {}
    stack.optimizer.select(range(2), 0, alone=True)
    for name, parameter in zip(stack.names, stack.optimizer.parameters):
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient, name=name: layouts.update({name: layout_of(gradient)}))
    stack.forward_backward(range(2), data, 0, index, alone=True)
    return layouts


def _check_buffers(stack: ClientStack) -> None:
    """Raise CannotVectorize if a step has changed buffers that no client sends, which the module would keep."""
    sent = stack.model.global_buffers
    live = dict(stack.model.module.named_buffers())
    for name in noted_buffers(stack.model.module, sent):
        if not torch.equal(stack.buffers[name][0], live[name]):
            raise CannotVectorize(f"training changes the buffer {name}, which is not persistent, so nobody averages it")


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


def _check_against_single(
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
            with step.swap.using({**own, **buffers}):
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


class _Index(int):
    """The number of a batch, which notes that it is used."""

    is_read = False


def _noting(name: str) -> Any:
    def method(self: _Index, *args: Any) -> Any:
        self.is_read = True
        return getattr(int, name)(self, *args)

    return method


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("divmod", "rdivmod", "pow", "rpow", "neg", "pos", "abs", "lshift", "rlshift", "rshift", "rrshift", "invert"),
    *("and", "rand", "or", "ror", "xor", "rxor", "eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "float", "index"),
    *("hash", "format", "str", "repr", "round", "trunc", "ceil", "floor"),
):
    setattr(_Index, f"__{_name}__", _noting(f"__{_name}__"))


def _stacking_obstacles(context: TrainingContext, model: ResidentModel) -> Iterator[str]:
    """Yield the reasons why a stack cannot train this module, of those that a dry run would not show."""
    own = {id(p) for p in model.parameters.values()}
    if not parameters_of(context.optimizers[0]):
        yield "the optimizer has no parameters"
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
    if has_own_state(optimizer):
        yield f"{type(optimizer).__name__} holds more than a state per parameter, which clients would share"
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
    if not type(optimizer).__module__.startswith("torch.optim."):
        _check_closure(optimizer, [row[0] for row in rows])
    return frozenset(
        key
        for parameter, state in together.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    )


def _check_closure(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Check that ``optimizer`` evaluates the loss once, before it changes anything, and does not look at its value.

    Raises:
        CannotVectorize: it does something else with the closure that Lightning hands over.
    """
    random = torch.Generator().manual_seed(0)
    without, with_closure = (_copy_of(optimizer, parameters) for _ in range(2))
    for each in (without, with_closure):
        set_parameters(each, [Parameter(p.clone()) for p in parameters])
    for _ in range(4 * STEPS):
        gradients = [torch.randn(p.shape, generator=random).to(p) for p in parameters]
        before = [p.detach().clone() for p in parameters_of(with_closure)]
        seen: list[bool] = []

        def closure() -> Tensor:
            parameters = parameters_of(with_closure)
            seen.append(all(torch.equal(p, old) for p, old in zip(parameters, before)))  # noqa: B023
            for p, gradient in zip(parameters, gradients):  # noqa: B023
                p.grad = gradient.clone()
            return torch.rand((), generator=random)

        for p, gradient in zip(parameters_of(without), gradients):
            p.grad = gradient.clone()
        without.step()
        with_closure.step(closure)  # pyright: ignore
        pairs = zip(parameters_of(without), parameters_of(with_closure))
        if seen != [True] or not all(torch.equal(a, b) for a, b in pairs):
            raise CannotVectorize(f"{type(optimizer).__name__} uses the closure, which evaluates one client's loss")


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
