"""The Trainer's fit loop, as a federation changes it, and the way back."""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_info
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fedbayes.callbacks.trainer import fast_loop
from lightning_fedbayes.callbacks.trainer.data import FederatedSource, brought
from lightning_fedbayes.callbacks.trainer.strategy import collective_of
from lightning_fedbayes.clients.context import Course, TrainingContext
from lightning_fedbayes.clients.engine import Engine
from lightning_fedbayes.clients.loader import FederatedLoader
from lightning_fedbayes.clients.settings import FederationSettings
from lightning_fedbayes.clients.snapshot import with_attributes
from lightning_fedbayes.clients.states import options_of
from lightning_fedbayes.core.errors import FederationError, shown
from lightning_fedbayes.core.exchange import Collective

IN_TRAINING_STEP = {"_current_fx_name": "training_step"}
"""Attribute by which a LightningModule knows from where ``self.log`` is called."""
SETTINGS = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches", "optimizers")
"""Attributes of a Trainer that engines take once."""
settings_of = attrgetter(*SETTINGS)
Checkpoint = dict[str, Any]


class TrainsClients(L.Callback):
    """A callback by which a Trainer trains clients: ``settings`` of the federation, ``engine`` of the present fit."""

    settings: FederationSettings
    _loop: Any = None  # the FitLoop, once there is one

    @property
    def engine(self) -> Engine:
        """The engine, once training has begun."""
        raise NotImplementedError

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Give the Trainer and the module back as they were."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the Trainer and the module back as they were."""
        if stage == "fit" and self._loop is not None:
            self._loop.restore()


class FitLoop:
    """Data, length, steps, counters and checkpoints of a Trainer's fit loop. :meth:`restore` undoes all changes."""

    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.trainer: Any = trainer  # its annotations leave some attributes out
        self.module = module
        self._fit: Any = trainer.fit_loop
        self._epoch: Any = trainer.fit_loop.epoch_loop
        self._engine: Engine | None = None
        self._boundary: RoundBoundary | None = None
        self._number = 0  # of the batch in the round
        self._is_inside = False  # a batch is under way
        self._limit = trainer.limit_train_batches
        self._steps_before = (0, 0)
        self.told: tuple[int, int] | None = None  # rounds and steps of a federation over a network, by its server
        self._undo = ExitStack()
        self.collective: Collective = collective_of(trainer)  # the processes that share the clients of a round

    @property
    def part(self) -> tuple[int, int]:
        """Number of this process, and of those that split every batch: under DDP they train each client together."""
        together = isinstance(self.trainer.strategy, DDPStrategy)
        return (self.trainer.global_rank, self.trainer.world_size) if together else (0, 1)

    def replace_data(self, federate: Callable[[Any], Any]) -> None:
        """Let the Trainer train on ``federate(loader)`` of the user's training loader, once it asks for that."""
        self.put(self._fit, "_data_source", FederatedSource(self._fit._data_source, federate))
        self._undo.callback(setattr, self.trainer, "__class__", type(self.trainer))
        self.trainer.__class__ = self._with_own_steps(type(self.trainer))
        self.put(self.trainer, "limit_train_batches", 1.0)  # Lightning's limit is per epoch, ours per client

    def _with_own_steps(self, plain: type[L.Trainer]) -> type[L.Trainer]:
        """Return ``plain`` with ``estimated_stepping_batches`` of the present client, or of the largest one."""
        loop = self

        class Federated(plain):
            @property
            def max_epochs(self) -> int | None:
                return loop.told[0] if loop.told and loop.told[0] else super().max_epochs

            @property
            def estimated_stepping_batches(self) -> int | float:
                if self.train_dataloader is None:
                    self.fit_loop.setup_data()
                loader, rounds = self.train_dataloader, self.max_epochs
                if rounds in (None, -1) or not isinstance(loader, FederatedLoader):
                    return super().estimated_stepping_batches
                if loop.told is not None and not loop.told[0 if loop._is_inside else 1]:
                    why = "trainer.estimated_stepping_batches depends on all clients' data. The server asks for their"
                    known = "steps before the first round if configure_optimizers reads it at the server, too"
                    raise FederationError(f"{why} {known}; otherwise give the module an argument total_steps")
                if loop.told is not None and not loop._is_inside:
                    return loop.told[1]
                if loop._is_inside:
                    largest = [self.num_training_batches] * max(rounds, 1)
                else:
                    largest = [loader.most_batches(round) for round in range(max(rounds, 1))]
                steps = sum(math.ceil(batches / self.accumulate_grad_batches) for batches in largest)
                return steps * loader.batching.local_epochs

        Federated.__name__, Federated.__qualname__ = plain.__name__, plain.__qualname__
        Federated.__module__ = plain.__module__  # which tells the Trainer of another package
        return Federated

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until :meth:`restore`, which puts back what ``owner`` itself had there, if anything."""
        own = vars(owner)
        self._undo.callback(own.__setitem__ if name in own else own.pop, name, own.get(name))
        setattr(owner, name, value)

    def ignore(self, message: str) -> None:
        """Ignore warnings of this pattern until :meth:`restore`."""
        warnings.filterwarnings("ignore", message=message)
        mine = warnings.filters[0]

        def forget() -> None:
            filters: Any = warnings.filters
            if mine in filters:
                filters.remove(mine)

        self._undo.callback(forget)

    def setup_data(self) -> None:
        """Let the Trainer ask for its training loader now."""
        self._fit.setup_data()

    @property
    def limits(self) -> dict[str, Any]:
        """Most batches of each client, and most clients in a round: two with ``fast_dev_run``."""
        return {"limit": self._limit, "clients_in_a_round": 2 if self.trainer.fast_dev_run else None}

    def set_length(self, num_batches: int) -> None:
        """Let the epoch that begins have ``num_batches``. Lightning itself would keep the first epoch's length."""
        self._fit.max_batches = num_batches
        self._fit._combined_loader.limits = [num_batches]
        self.trainer.val_check_batch = num_batches

    def set_epoch(self, epoch: int) -> None:
        """Let the next epoch of the Trainer be number ``epoch``, and its last."""
        progress = self._fit.epoch_progress
        for scope in (progress.total, progress.current):
            scope.ready = scope.started = scope.processed = scope.completed = epoch
        self._fit.max_epochs = epoch + 1

    def context(self) -> TrainingContext:
        """Return what an engine needs to know of the loop."""
        trainer, module = self.trainer, self.module
        limit = trainer.gradient_clip_val
        return TrainingContext(
            module=module,
            optimizers=trainer.optimizers,
            device=trainer.strategy.root_device,
            precision=trainer.precision_plugin,
            remake_optimizers=lambda: _configure_optimizers(module.configure_optimizers())[0],  # pyright: ignore
            accumulate=trainer.accumulate_grad_batches,
            steps=self._epoch.automatic_optimization.optim_progress.optimizer.step,
            in_training_step=lambda: module._current_fx_name == "training_step",
            training_step_marks=IN_TRAINING_STEP,
            obstacles=lambda: fast_loop.stack_obstacles(trainer),
            watched=lambda: fast_loop.watched(trainer, module),
            watchers=list({id(each): each for each, _ in fast_loop.batch_watchers(trainer)}.values()),
            bring=partial(brought, trainer),
            clip_value=limit if limit and limit > 0 else None,
            clips_norm=trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE,
            mean_over_processes=trainer.strategy.reduce if isinstance(trainer.strategy, DDPStrategy) else None,
            course=course_of(trainer),
        )

    def install(self, engine: Engine, begin: Callable[[int], Any], end: Callable[[int], None]) -> None:
        """Let ``engine`` train on the loop's batches. By the fast loop where a plain step is enough.

        Hooks and ``training_step`` see a client's positions: its ``batch_idx``, ``trainer.num_training_batches`` and
        ``trainer.is_last_batch``, from 0 in each local epoch. ``begin`` and ``end`` are called with the number of a
        batch in the round, before its first hook and after its last.
        """
        self._engine = engine
        self.put(self._epoch, "max_steps", -1)  # fast_dev_run counts batches of a client
        optimization = self._epoch.automatic_optimization
        is_fast = engine.takes_own_steps or fast_loop.step_is_plain(self.trainer)
        if not fast_loop.is_tested():
            rank_zero_info(f"Lightning's own loop runs, because the fast one is not tested with {L.__version__}.")
        step = partial(engine.train_batch, fast_loop.fast_step(self.trainer) if is_fast else optimization.run)
        self.put(optimization, "run", step)
        step_schedulers = self._epoch.update_lr_schedulers

        def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
            if not self._is_inside or interval != "epoch":  # schedulers step once in a round, at its end
                step_schedulers(interval, update_plateau_schedulers)

        self.put(self._epoch, "update_lr_schedulers", update_lr_schedulers)
        bar: Any = self.trainer.progress_bar_callback
        if bar is not None:  # it counts the batches of the round
            show = bar.on_train_batch_end
            self.put(bar, "on_train_batch_end", lambda *args: show(*args[:-1], self._number))
        whole = self._epoch.advance
        inner = fast_loop.fast_advance(self.trainer, step, engine) if is_fast else whole

        def advance(fetcher: Any) -> None:
            while True:
                self._advance(fetcher, whole if self._epoch.restarting else inner, begin, end)
                stops = self.trainer.should_stop or self.trainer.received_sigterm or self._epoch._skip_next_val
                if not is_fast or stops or self._number == self._fit.max_batches:
                    return  # the loop's own on_advance_end follows; after the other batches it would only count
                self._epoch._batches_that_stepped += 1

        self.put(self._epoch, "advance", advance)
        self._given = *settings_of(self.trainer)[:-1], list(self.trainer.optimizers)
        engine.log.install()

    def _advance(
        self, fetcher: Any, inner: fast_loop.Advance, begin: Callable[[int], Any], end: Callable[[int], None]
    ) -> None:
        """Train on the next batch, at the client's positions."""
        assert self._engine is not None
        progress, length = self._epoch.batch_progress, self._fit.max_batches
        if (present := settings_of(self.trainer)) != self._given:
            (name, old, new), *_ = (each for each in zip(SETTINGS, self._given, present) if each[1] != each[2])
            raise FederationError(
                f"a hook has changed trainer.{name} from {shown(old)} to {shown(new)} during the fit, and clients "
                "train as it was: set it before the fit, or end the fit and begin another"
            )
        self._number = number = progress.current.ready
        begin(number)
        first, stop = self._engine.span(number)
        batches = _Batches(fetcher, number + 1 == stop)
        _add(progress.current, -first)
        self._fit.max_batches, self._is_inside = stop - first, True
        left = 0
        try:
            inner(batches)
        except StopIteration:
            if batches.is_exhausted:
                raise
            left = stop - number - 1  # on_train_batch_start has returned -1: the client's local epoch ends here
            for _ in range(left):
                next(fetcher)
        finally:
            self._fit.max_batches, self._is_inside = length, False
            _add(progress.current, first)
        for scope in (progress.current, progress.total) if left else ():
            _add(scope, left)
        self._number += 1 + left
        progress.is_last_batch = self._number == length
        end(self._number - 1)
        if progress.is_last_batch:  # now, when the optimizers have the options of the round again
            self._epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def stop_together(self, in_round: Callable[[], bool]) -> None:
        """Hold ``trainer.should_stop`` back until no process is ``in_round``. Then all stop, or none."""
        inner, asked = self._epoch.on_advance_end, False

        def on_advance_end(fetcher: Any) -> None:
            nonlocal asked
            asked, self.trainer.should_stop = asked or self.trainer.should_stop, False
            if not in_round():
                self.trainer.should_stop, asked = any(self.collective.all_gather(asked)), False
            inner(fetcher)

        self.put(self._epoch, "on_advance_end", on_advance_end)

    @property
    def step_names(self) -> set[str]:
        """Names of figures of single training steps that loggers have got in this round."""
        return set(self._epoch._results.metrics(on_step=True)["log"])

    def begin_round(self) -> None:
        """Note the loop's progress at the start of a round, for checkpoints inside it and for its counters."""
        self._boundary = RoundBoundary(self.trainer)
        self._steps_before = self.trainer.global_step, self._epoch._batches_that_stepped

    def own_steps(self, *, idle: bool) -> tuple[int, int]:
        """Return this process's steps and batches of the round, at its last batch, which does not count if ``idle``."""
        steps, batches = self.trainer.global_step, self._epoch._batches_that_stepped
        before, batches_before = self._steps_before  # the Trainer has yet to count the last batch
        return steps - before, 0 if idle else batches + 1 - batches_before

    def count_steps(self, everyone: Sequence[tuple[int, int]]) -> None:
        """Count the steps of all processes (the :meth:`own_steps` of each), as one process that trains all would."""
        steps, batches = self._steps_before
        total = self._epoch.automatic_optimization.optim_progress.optimizer.step.total
        others = steps + sum(each for each, _ in everyone) - self.trainer.global_step
        total.ready += others
        total.completed += others
        self._epoch._batches_that_stepped = batches + sum(each for _, each in everyone) - 1

    def guard_weights_only(self, between_rounds: Callable[[Checkpoint], None]) -> None:
        """Let weights-only checkpoints of the module pass through ``between_rounds``: they ask no callback."""
        user_hook = self.module.on_save_checkpoint

        def on_save_checkpoint(checkpoint: Checkpoint) -> None:
            if "callbacks" not in checkpoint:
                between_rounds(checkpoint)
            user_hook(checkpoint)

        self.put(self.module, "on_save_checkpoint", on_save_checkpoint)

    def close_round(self, checkpoint: Checkpoint, rounds: int, *, is_done: bool) -> None:
        """Move ``checkpoint`` to a point between rounds: after ``rounds``, or at the start of one that is not done."""
        if is_done:
            close_round(checkpoint, rounds)
        elif self._boundary is not None:
            self._boundary.apply(checkpoint, rounds)

    def pending_plateau(self) -> dict[str, Any]:
        """Return the figures that epoch-wise ``ReduceLROnPlateau`` schedulers still wait for, monitor → value.

        Lightning steps them after it has written the round's checkpoint, and leaves that step out on resuming.
        """
        known = self.trainer.callback_metrics
        monitors = [str(each.monitor) for each in self.trainer.lr_scheduler_configs if each.reduce_on_plateau]
        return {name: known[name] for name in monitors if name in known}

    def step_plateau(self, pending: dict[str, Any], rounds: int) -> None:
        """Take the steps of :meth:`pending_plateau` after ``rounds`` rounds."""
        for config in self.trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and config.monitor in pending and rounds % config.frequency == 0:
                config.scheduler.step(pending[config.monitor])

    def restore(self) -> None:
        """Give Trainer and module back as they were. A second call does nothing."""
        self._undo.close()
        if self._engine is not None:
            self._engine.close()
            self._engine.log.remove()
            self._engine.restore_priors()


def course_of(trainer: L.Trainer) -> Course | None:
    """Return the course of learning rates that schedulers or hooks may move in every step. None without any."""
    module, parts = trainer.lightning_module, []
    for value in vars(module).values():
        parts += value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
    configs = [each.scheduler for each in trainer.lr_scheduler_configs if each.interval == "step"]
    found = {id(each): each for each in (*configs, *parts) if isinstance(each, LRScheduler)}
    inner = {id(part) for each in found.values() for part in getattr(each, "_schedulers", ())}  # of a SequentialLR
    own = [each for key, each in found.items() if key not in inner | {id(each) for each in configs}]
    moves = configs or own or next(fast_loop.hooks_of_steps(trainer), None)
    moves = moves or next(fast_loop.batch_watchers(trainer), None)
    return Course(trainer.optimizers, configs, own) if moves else None


def optimizers_of(module: L.LightningModule) -> tuple[list[Optimizer], bool]:
    """Return the optimizers that ``module`` configures, and whether it asks for the number of steps.

    There are none if it needs more of a Trainer than ``max_epochs`` and ``estimated_stepping_batches``.
    """
    asked: list[int] = []

    class Known:
        max_epochs = 1000

        @property
        def estimated_stepping_batches(self) -> int:
            asked.append(1000)
            return 1000

    with torch.random.fork_rng(), with_attributes(module, {"_trainer": Known()}):
        try:
            return _configure_optimizers(module.configure_optimizers())[0], bool(asked)  # pyright: ignore
        except Exception:  # whatever the user's code needs
            return [], bool(asked)


class _Batches:
    """A data fetcher whose last batch is the last of a client's local epoch."""

    def __init__(self, fetcher: Any, done: bool) -> None:
        self._fetcher, self.done, self.is_exhausted = fetcher, done, False

    def __next__(self) -> Any:
        try:
            return next(self._fetcher)
        except StopIteration:
            self.is_exhausted = True
            raise


def _add(progress: Any, batches: int) -> None:
    progress.ready += batches
    progress.started += batches
    progress.processed += batches
    progress.completed += batches


class RoundBoundary:
    """The Trainer's progress at the start of a round, for checkpoints inside the round."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.loop_state = trainer.fit_loop.state_dict()
        self.global_step = trainer.global_step
        self.schedulers = [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
        self.param_groups = [options_of(optimizer) for optimizer in trainer.optimizers]

    def apply(self, checkpoint: Checkpoint, rounds_done: int) -> None:
        """Move ``checkpoint`` to the start of the round."""
        checkpoint["loops"]["fit_loop"] = copy.deepcopy(self.loop_state)
        checkpoint["global_step"] = self.global_step
        if "lr_schedulers" in checkpoint:
            checkpoint["lr_schedulers"] = copy.deepcopy(self.schedulers)
        for state, groups in zip(checkpoint.get("optimizer_states", []), self.param_groups, strict=False):
            state["param_groups"] = [{**now, **then} for now, then in zip(state["param_groups"], groups, strict=True)]
        close_round(checkpoint, rounds_done)


def close_round(checkpoint: Checkpoint, rounds_done: int) -> None:
    """Make ``checkpoint`` say that exactly ``rounds_done`` rounds are complete.

    Lightning writes checkpoints while an epoch is open, and would finish it on resuming, from other batch counts.
    """
    checkpoint["epoch"] = rounds_done
    loops = checkpoint["loops"]["fit_loop"]
    for scope in ("total", "current"):
        epochs = loops["epoch_progress"][scope]
        epochs.update(dict.fromkeys(epochs, rounds_done))
        batches = loops["epoch_loop.batch_progress"][scope]
        batches.update(dict.fromkeys(batches, batches["ready"]))
    loops["epoch_loop.batch_progress"]["is_last_batch"] = False
    for state in checkpoint.get("optimizer_states", []):
        state["state"] = {}  # every client starts with its kept state
