"""The fast loop: a training step without unused hooks, in a third of the time of Lightning's step.

Lightning's step calls 20 hooks and copies contexts around each. Where neither the module, nor a callback, nor a plugin
uses them, the functions here take the same step: the same numbers bit by bit, the same progress counts. And a watch
over what ``training_step`` reads of the Trainer: a stack of clients has no single position.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning as L
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_fedbayes.callbacks.trainer.strategy import ClientParallelStrategy
from lightning_fedbayes.clients.context import Step, loss_and_rest, takes_index
from lightning_fedbayes.clients.engine import Engine
from lightning_fedbayes.clients.snapshot import swapped
from lightning_fedbayes.clients.states import drop_gradients
from lightning_fedbayes.core.errors import CannotVectorize

TESTED = ("2.6",)
"""Versions of Lightning that the tests compare the fast loop with. With others Lightning's loop runs."""
OWN_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fedbayes")
"""Packages with callbacks that leave weights, options and batches unchanged in their hooks of a batch."""

STEP_HOOKS = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "optimizer_step"),
    *("optimizer_zero_grad", "configure_gradient_clipping", "backward"),
)
"""Hooks of a step, besides ``training_step``."""

BATCH_HOOKS = (
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
    *("on_train_batch_start", "on_train_batch_end"),
)
"""Hooks of a module or datamodule around a step. The fast loop calls those of callbacks, too."""

NAMES = """
accelerator barebones callbacks current_epoch datamodule default_root_dir device_ids evaluating global_rank
is_global_zero lightning_module local_rank log_dir log_every_n_steps logger loggers lr_scheduler_configs max_epochs
min_epochs model node_rank num_devices num_nodes optimizers precision precision_plugin predicting sanity_checking state
strategy testing training validating world_size
"""
SHARED = frozenset(NAMES.split())
"""Attributes of the Trainer that all clients of a round share."""
Advance = Callable[[Any], None]
"""Trains on the next batch of a data fetcher: the epoch loop's ``advance``."""


def is_tested() -> bool:
    """Return True if this version of Lightning is one of :data:`TESTED`."""
    return ".".join(L.__version__.split(".")[:2]) in TESTED


def step_is_plain(trainer: L.Trainer) -> bool:
    """Return True if a step is only ``training_step``, backward and the optimizer's step, in full precision.

    See :func:`step_obstacles`. Gradients must not be clipped or accumulated either. Lightning hands the optimizer a
    closure that evaluates the loss. Only an optimizer that is known to ignore it is called without.
    """
    return (
        type(trainer.precision_plugin) is Precision
        and not trainer.gradient_clip_val
        and all(type(o).__module__.startswith("torch.optim.") and not _needs_closure(o) for o in trainer.optimizers)
        and next(step_obstacles(trainer), None) is None
    )


def step_obstacles(trainer: Any) -> Iterator[str]:
    """Yield, in words, what must happen in a step besides ``training_step``, backward, clipping and the optimizer."""
    if not is_tested():
        yield f"the fast loop is not tested with lightning {L.__version__}"
    if type(trainer).__module__.startswith("pytorch_lightning"):
        yield "the Trainer is of the package pytorch_lightning; take that of its twin, `import lightning as L`"
    elif type(trainer.strategy) not in (SingleDeviceStrategy, ClientParallelStrategy):
        yield f"the strategy is {type(trainer.strategy).__name__}"
    if not isinstance(trainer.profiler, PassThroughProfiler):
        yield f"{type(trainer.profiler).__name__} profiles the hooks"
    if trainer._detect_anomaly:
        yield "detect_anomaly=True"
    if trainer.accumulate_grad_batches != 1:
        yield f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
    if len(trainer.optimizers) != 1:
        yield f"there are {len(trainer.optimizers)} optimizers"
    yield from (f"{type(each).__name__} needs a closure" for each in trainer.optimizers if _needs_closure(each))
    yield from hooks_of_steps(trainer)


def hooks_of_steps(trainer: Any) -> Iterator[str]:
    """Yield, in words, the hooks of a step that the user has written."""
    owners: list[tuple[Any, Iterable[str]]] = [(trainer.lightning_module, (*STEP_HOOKS, *BATCH_HOOKS))]
    owners += [(callback, [hook for hook in STEP_HOOKS if hasattr(L.Callback, hook)]) for callback in trainer.callbacks]
    if trainer.datamodule is not None:
        owners.append((trainer.datamodule, BATCH_HOOKS[:3]))
    for owner, hooks in owners:
        yield from (f"{type(owner).__name__} has a hook {hook}" for hook in hooks if is_overridden(hook, owner))


def stack_obstacles(trainer: L.Trainer) -> Iterator[str]:
    """Yield :func:`step_obstacles`, and callbacks with hooks of a batch that cannot use a list of stacked batches.

    A callback with a true attribute ``sees_stacks`` can, and leaves weights and options alone.
    """
    yield from step_obstacles(trainer)
    for config in trainer.lr_scheduler_configs:
        own = config.frequency != 1 or is_overridden("lr_scheduler_step", trainer.lightning_module)
        if config.interval == "step" and own:
            yield f"{type(config.scheduler).__name__} does not move by itself in every step"
    for callback, hook in batch_watchers(trainer):
        if not getattr(callback, "sees_stacks", False):
            why = "would see stacked batches of all clients; give it an attribute sees_stacks = True if it can use them"
            yield f"the callback {type(callback).__name__} has a hook {hook}, and {why}"


def batch_watchers(trainer: Any) -> Iterator[tuple[L.Callback, str]]:
    """Yield the user's callbacks with hooks of a batch, and the name of each such hook."""
    for callback in trainer.callbacks:
        for hook in ("on_train_batch_start", "on_train_batch_end"):
            home = getattr(getattr(callback, hook), "__module__", "")  # a LambdaCallback's hook is the user's
            if is_overridden(hook, callback) and home.split(".")[0] not in OWN_PACKAGES:
                yield callback, hook


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return True if the optimizer evaluates the loss itself, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def fast_step(trainer: L.Trainer) -> Step:
    """Return ``training_step``, backward and the optimizer's step, called as Lightning's step is."""
    module = trainer.lightning_module
    with_index = takes_index(module)
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    attributes = module.__dict__

    def step(optimizer: Optimizer, batch_idx: int, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        attributes["_current_fx_name"] = "training_step"  # for self.log; setattr of nn.Module costs 1 µs
        batch = kwargs["batch"]
        output = module.training_step(batch, batch_idx) if with_index else module.training_step(batch)
        attributes["_current_fx_name"] = None
        loss, extra = (None, {}) if output is None else loss_and_rest(output)
        progress.increment_ready()
        drop_gradients(optimizer)
        if loss is not None:  # else Lightning, too, counts a step, without gradients
            loss.backward()
        optimizer.step()
        progress.increment_completed()
        return {} if loss is None else {"loss": loss.detach(), **extra}

    return step


def fast_advance(trainer: Any, step: Step, engine: Engine) -> Advance:
    """Return a function that trains ``engine`` on one batch by ``step``, in place of the epoch loop's ``advance``."""
    loop: Any = trainer.fit_loop.epoch_loop
    module = trainer.lightning_module
    attributes = module.__dict__
    progress, connector, results = loop.batch_progress, trainer._logger_connector, loop._results
    callbacks: list[L.Callback] = trainer.callbacks
    starts = [each.on_train_batch_start for each in callbacks if is_overridden("on_train_batch_start", each)]
    ends = [each.on_train_batch_end for each in callbacks if is_overridden("on_train_batch_end", each)]
    device, prepare = trainer.strategy.root_device, engine.prepare
    moves = not engine.takes_own_steps and any(each.interval == "step" for each in trainer.lr_scheduler_configs)
    if prepare is None and device.type != "cpu":
        prepare = partial(move_data_to_device, device=device)

    def advance(fetcher: Any) -> None:
        batch, _, _ = next(fetcher)
        progress.increment_ready()
        batch_idx = progress.current.ready - 1
        progress.is_last_batch = fetcher.done
        if prepare is not None:
            batch = prepare(batch)
        # as connector.on_batch_start(batch), which looks the results up by the state of the Trainer, three times
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        attributes["_current_fx_name"] = "on_train_batch_start"
        for hook in starts:
            hook(trainer, module, batch, batch_idx)
        attributes["_current_fx_name"] = None
        progress.increment_started()
        outputs = step(trainer.optimizers[0], batch_idx, {"batch": batch, "batch_idx": batch_idx})
        progress.increment_processed()
        if moves:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        attributes["_current_fx_name"] = "on_train_batch_end"
        for hook in ends:
            hook(trainer, module, outputs, batch, batch_idx)  # pyright: ignore[reportArgumentType]
        attributes["_current_fx_name"] = None
        if results:  # something has been logged
            connector.on_batch_end()
        results.batch = results.batch_size = None
        progress.increment_completed()
        if results:
            connector.update_train_step_metrics()

    return advance


class WatchedTrainer:
    """A Trainer with only the attributes of :data:`SHARED`."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._watched = trainer

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The Trainer's class, which some methods of a module ask for."""
        return type(self._watched)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the Trainer. Raise CannotVectorize if clients that train at once do not share it."""
        if name not in SHARED:
            raise CannotVectorize(f"training_step reads trainer.{name}, which clients that train at once do not share")
        return getattr(self._watched, name)


def watched(trainer: L.Trainer, module: L.LightningModule) -> swapped:
    """Inside, ``module`` finds a :class:`WatchedTrainer` in place of its Trainer."""
    modules = [each for each in module.modules() if isinstance(each, L.LightningModule)]
    return swapped([((vars(each), "_trainer"), WatchedTrainer(trainer)) for each in modules])
