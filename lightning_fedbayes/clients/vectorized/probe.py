"""Probe: a dry run of the first batch of two clients, to find whether and how a module can be trained as a stack."""

import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import Metric

from lightning_fedbayes.clients.context import TrainingContext, loss_and_rest, takes_index
from lightning_fedbayes.clients.engine import threads_for
from lightning_fedbayes.clients.loader import FailedBatch, FederatedLoader
from lightning_fedbayes.clients.model import ResidentModel
from lightning_fedbayes.clients.snapshot import LIBRARIES, Modes, ModuleState, Snapshot, noted_buffers, with_attributes
from lightning_fedbayes.clients.states import Client, ClientState, options_of, parameters_of
from lightning_fedbayes.clients.vectorized.metrics import StackedTrainingLog
from lightning_fedbayes.clients.vectorized.optimizer import check_elementwise
from lightning_fedbayes.clients.vectorized.schedule import stack_batches
from lightning_fedbayes.clients.vectorized.stack import ClientStack
from lightning_fedbayes.clients.vectorized.step import StackedStep
from lightning_fedbayes.core import private_torch
from lightning_fedbayes.core.errors import CannotVectorize
from lightning_fedbayes.core.seeding import random_state


@dataclass(frozen=True)
class ProbeResult:
    """Properties of a module and its optimizer that the vectorized engine needs.

    Args:
        stacked_keys: names of the optimizer's state that has the parameter's shape.
        reads_index: ``training_step`` uses the number of the batch.
        flops, bytes_per_client: floating-point operations of one client's step, in matrix products and convolutions,
            and memory that one more client in the stack takes.
        shared_buffers: names of buffers that do not change.
        switches_modes: a client's first step, or ``on_client_start``, puts layers into training or evaluation.
    """

    stacked_keys: frozenset[str]
    reads_index: bool
    flops: int
    bytes_per_client: int
    shared_buffers: frozenset[str]
    switches_modes: bool


def probe(
    context: TrainingContext, model: ResidentModel, loader: FederatedLoader, clients: Sequence[Client], most: float
) -> ProbeResult:
    """Take one step of two clients as a stack, in a dry run. Raise CannotVectorize, with the reason, if none can.

    Of a step that takes more than ``most`` operations no more is found out than their number.
    """
    try:
        return _probe(context, model, loader, clients, most)
    except ChangesForGood:
        return _probe(context, model, loader, clients, most)


def _probe(
    context: TrainingContext, model: ResidentModel, loader: FederatedLoader, clients: Sequence[Client], most: float
) -> ProbeResult:
    module = context.module
    log = StackedTrainingLog(context)
    log.install()
    try:
        obstacle = next(iter(context.obstacles()), None) or next(_stacking_obstacles(context, model), None)
        if obstacle is not None:
            raise CannotVectorize(obstacle)
        optimizer = context.optimizers[0]
        stacked_keys = check_elementwise(optimizer)  # first: a stack empties the optimizer's state
        step = StackedStep(context, log)
        flops, allocations = FlopCounterMode(display=False), _Allocations()
        data = _first_batch(context, loader, clients)
        index = _Index(0)
        with threads_for(0), context.watched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operations that are slow in a stack, or the same ones as in training
            with dry_run(module, optimizer) as check_unchanged:
                modes = Modes(module)
                stack = ClientStack(model, optimizer, step, clients, [ClientState()] * 2, [{}] * 2)
                try:
                    with flops, allocations:
                        stack.optimizer.select(range(2), 0, alone=True)
                        stack.forward_backward(range(2), data, index)
                    if flops.get_total_flops() // 2 > most:
                        return ProbeResult(stacked_keys, False, flops.get_total_flops() // 2, 0, frozenset(), False)
                    stack.optimizer.check_state()
                    # a hook on_client_start may write into buffers; where all trains, sharing them saves little
                    shares = bool(model.frozen) and not hasattr(module, "on_client_start")
                    live = module.named_buffers() if shares else ()
                    shared = frozenset(name for name, own in live if torch.equal(stack.buffers[name][0], own))
                    switches, modes = not modes.is_now(), Modes(module)
                    if switches:
                        stack.forward_backward(range(2), data, index)
                        _check_modes(modes)
                    if step.branched:
                        # Branches may depend on the batch and on frozen values, as on a mask: clients that find
                        # otherwise step apart. Where a branch depends on what trains, they mostly would.
                        step.shares_batch = True
                        try:
                            stack.forward_backward(
                                range(2), private_torch.tree_map(lambda stacked: stacked[0], data), index
                            )
                        finally:
                            step.shares_batch = False
                    if len(loader.clients.sizes) == 1:  # nobody puts them back
                        check_buffers(stack)
                    log.check_metrics()
                finally:
                    stack.optimizer.remove()
                check_unchanged()
                check_against_single(context, model, step, clients, data)
                check_unchanged()
                _check_modes(modes)
    except CannotVectorize:
        raise
    except Exception as error:
        raise CannotVectorize(f"a step cannot run for several clients at once: {explain(error)}") from error
    finally:
        log.remove()
    frozen = {id(p) for p in model.frozen.values()}
    own = sum(p.numel() * p.element_size() for p in parameters_of(optimizer) if id(p) not in frozen)
    total = allocations.bytes // 2 + own * (2 + len(stacked_keys))
    flops_of_one = flops.get_total_flops() // 2
    return ProbeResult(stacked_keys, index.is_read, flops_of_one, total, shared, switches)


def _first_batch(context: TrainingContext, loader: FederatedLoader, clients: Sequence[Client]) -> Any:
    batches = [loader.load(0, client.number) for client in clients]
    batch = next((batch for batch in batches if not isinstance(batch, FailedBatch)), batches[0])
    if isinstance(batch, FailedBatch):
        raise CannotVectorize(f"a first batch could not be loaded: {batch.error}") from batch.error
    ((_, data),) = stack_batches(range(2), [batch, batch]).parts
    return move_data_to_device(context.precision.convert_input(data), context.device)


def _check_modes(modes: Modes) -> None:
    if not modes.is_now():
        raise CannotVectorize("training_step switches layers between train() and eval() from step to step")


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
    """Yield the reasons why a stack cannot train this module that a dry run would not show."""
    own = {id(p) for p in model.parameters.values()}
    optimizer = context.optimizers[0]
    if not parameters_of(optimizer):
        yield "the optimizer has no parameters"
    for parameter in parameters_of(optimizer):
        if id(parameter) not in own:
            yield "the optimizer holds a tensor that is not a parameter of the module"
    for name, parameter in model.parameters.items():
        if private_torch.has_gradient_hook(parameter):
            yield f"the parameter {name} has a hook, which would not see the clients' gradients"
    for path, each in model.module.named_modules():
        if private_torch.has_backward_hook(each):
            yield f"the module {path} has a backward hook, which vmap leaves out"
    if private_torch.has_step_hook(optimizer):
        yield f"{type(optimizer).__name__} has a hook on its step, which may look at the module"
    kept = private_torch.tree_leaves(
        [value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")]
    )
    if any(leaf is parameter for leaf in kept for parameter in parameters_of(optimizer)):
        yield f"{type(optimizer).__name__} keeps parameters elsewhere than in its groups"
    if getattr(context.precision, "scaler", None) is not None:
        yield "a gradient scaler would skip the step of all clients when one overflows; use bf16-mixed"


class _Allocations(private_torch.TorchDispatchMode):
    """Counts the bytes of all tensors that operations create: an upper bound of what a step holds at once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            new = [
                t
                for t in private_torch.tree_leaves(result)
                if isinstance(t, Tensor) and not any(t is given for given in args)
            ]
            self.bytes += sum(t.numel() * t.element_size() for t in new)
        return result


CAUSES = (
    (r"\.item\(\)", "takes a number out of a tensor by .item(): compute with the tensor itself"),
    (r"data-dependent control flow", "decides by the value of a tensor: use torch.where"),
    (r"data pointer|\.numpy\(\)|numpy", "leaves torch by .numpy() or the like: stay in torch"),
    (r"requires_grad_\(\)|torch\.autograd", "takes gradients itself, or switches them on or off"),
    (r"inplace|in-place", "writes into a tensor that clients share: make a new one"),
    (r"escaped from inside", "keeps a tensor of one step for the next where the module does not hold it"),
    (r"saved-tensor hooks", "checkpoints activations, which a stack of clients cannot"),
    (
        r"aten::(?:lstm|gru|rnn_\w+)\.",
        "runs an LSTM, or a recurrent layer with dropout between layers, half precision, a PackedSequence or on a GPU",
    ),
    (r"not implemented for ([\w:.]+)", r"uses {0}, which torch cannot run for a stack"),
)
"""Pattern in torch's message → what the code does, and what to do instead."""


def explain(error: Exception) -> str:
    """Return in one line what a stack of clients cannot run, in which layer or metric, and where."""
    text = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    for pattern, cause in reversed(CAUSES):
        match = re.search(pattern, str(error))
        if match:
            text = cause.format(*(group.rstrip(".") for group in match.groups()))
    return ", ".join(part for part in (text, _owner(error.__traceback__), _line(error)) if part)


def explained(error: Exception) -> Exception:
    """Return ``error``, or a CannotVectorize with the remedy if vmap refuses what the probe did not meet."""
    if isinstance(error, RuntimeError) and "vmap" in str(error):
        text = f"training_step can no longer run for several clients at once: {explain(error)}"
        return CannotVectorize(f"{text}. Use engine='sequential'")
    return error


def _owner(trace: TracebackType | None) -> str:
    """Return the innermost layer or metric in which the error was raised."""
    name = ""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, Metric):
            return f"in the metric {type(owner).__name__}"
        if isinstance(owner, nn.Module) and not isinstance(owner, L.LightningModule):
            name = f"in the layer {type(owner).__name__}"
        trace = trace.tb_next
    return name


def _line(error: Exception) -> str:
    """Return the innermost line outside of libraries. Of an installed package only if there is no other."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not set(Path(frame.filename).parts) & {*LIBRARIES}]
    if not own:
        return ""
    here = [frame for frame in own if "site-packages" not in Path(frame.filename).parts]
    last = (here or own)[-1]
    return f"at line {last.lineno} of {Path(last.filename).name} (`{last.line}`)"


class ChangesForGood(CannotVectorize):
    """A dry run has set something for good, as in a network's configuration. A second one may find no change."""


@contextmanager
def dry_run(module: nn.Module, optimizer: Optimizer) -> Iterator[Callable[[], None]]:
    """Inside, ``module`` runs without a trace. Gives a check for changes that all clients would share."""
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
            what = "training_step draws from Python's or NumPy's generator, and clients would share the draw"
            raise CannotVectorize(f"{what}; use torch's")

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
    model = stack.model
    live = dict(model.module.named_buffers())
    for name in noted_buffers(model.module, model.global_buffers):
        if not torch.equal(stack.buffers[name][0], live[name]):
            raise CannotVectorize(f"training changes the buffer {name}, which is not persistent: no server averages it")


def check_against_single(
    context: TrainingContext, model: ResidentModel, step: StackedStep, clients: Sequence[Client], data: Any
) -> None:
    """Raise CannotVectorize unless a step of two clients is the step of each, with random draws held still.

    This finds what a step counts or remembers out of sight, as in a closure, seeds of torch's generator, and parameters
    from elsewhere: the first client must not notice that the second's parameters are changed.
    """

    def stacked(shift: float = 0.0, seed: int = SEED) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return losses and gradients of a step of two clients. ``shift`` is added to the second's parameters."""
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
            stack.optimizer.remove()

    with Still():
        torch.manual_seed(SEED)
        seeded = random_state(context.device)
        losses, gradients = stacked()
        drawn = random_state(context.device)
        shifted, others = stacked(shift=0.1)
        both = zip((losses, *gradients.values()), (shifted, *others.values()), strict=True)
        if not _are_close([(a[0], b[0]) for a, b in both if a is not None and b is not None]):
            where = "elsewhere than the module, such as the optimizer"
            raise CannotVectorize(f"training_step reads parameters from {where}")
        if not torch.equal(drawn, seeded):  # draws that cannot be held still
            stacked(seed=SEED + 1)
            if torch.equal(random_state(context.device), drawn):
                raise CannotVectorize("training_step seeds torch's generator, and clients would share the draws")
        elif not context.is_coarse:  # else it rounds too much to tell
            _check_singles(context, model, step, clients, data, losses, gradients)


def _check_singles(
    context: TrainingContext,
    model: ResidentModel,
    step: StackedStep,
    clients: Sequence[Client],
    data: Any,
    losses: Tensor | None,
    gradients: dict[str, Tensor],
) -> None:
    """Check that the step of each client gives its loss and gradients in the stack."""
    module = context.module
    before = Snapshot(module) if hasattr(module, "on_client_start") else None
    torch.manual_seed(SEED)
    state = random_state(context.device)
    for slot, client in enumerate(clients):
        own = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in model.parameters.items()}
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        batch = private_torch.tree_map(lambda stacked, slot=slot: stacked[slot], data)
        with step.swap.using({**own, **buffers}), step.log.noting():
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
            alike = _are_close([(a, b.to(a.dtype)) for a, b in pairs])
        if not torch.equal(random_state(context.device), state):
            break  # draws that cannot be held still: nothing can be said
        if not alike:
            why = "training_step may count or remember something outside of the module"
            raise CannotVectorize(f"a step of two clients at once differs from the step of each: {why}")
    if before is not None:
        before.restore()  # what on_client_start has set


def _are_close(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether the tensors of each pair agree but for rounding, which is relative to the largest of all."""
    scale = max((float(first.nan_to_num(0, 0, 0).abs().max()) for first, _ in pairs if first.numel()), default=0.0)
    tolerance = {"rtol": 1e-3, "atol": 1e-5 * max(1.0, scale), "equal_nan": True}
    return all(torch.allclose(first, second, **tolerance) for first, second in pairs)


class Still(TorchFunctionMode):
    """Inside, random draws of torch are constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("dropout", "dropout_", "feature_dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d"):
            return args[0]
        if name in ("randn_like", "rand_like", "bernoulli"):
            return torch.full_like(args[0], 0.25)
        if name in ("randn", "rand"):
            shape = args[0] if isinstance(args[0], Sequence) else args
            return torch.full(shape, 0.25, **{key: kwargs[key] for key in kwargs.keys() & {"dtype", "device"}})
        return args[0].fill_(0.25) if name in ("normal_", "uniform_", "bernoulli_") else func(*args, **kwargs)
