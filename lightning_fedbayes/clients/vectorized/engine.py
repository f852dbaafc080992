"""The vectorized engine: the clients of a round train together, as one stack of networks."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedbayes.clients.context import Step, TrainingContext
from lightning_fedbayes.clients.engine import SMALL_STEP, Engine, threads_for
from lightning_fedbayes.clients.loader import FederatedLoader
from lightning_fedbayes.clients.model import ResidentModel, Tensors
from lightning_fedbayes.clients.states import Client, ClientState
from lightning_fedbayes.clients.vectorized import schedule
from lightning_fedbayes.clients.vectorized.metrics import StackedTrainingLog
from lightning_fedbayes.clients.vectorized.optimizer import counts_by_row
from lightning_fedbayes.clients.vectorized.probe import ProbeResult, explained
from lightning_fedbayes.clients.vectorized.stack import ClientStack, attributes_of, clipping
from lightning_fedbayes.clients.vectorized.step import StackedStep, StepModes
from lightning_fedbayes.core.errors import FedBayesError, FederationError, FusionError, listed
from lightning_fedbayes.core.messages import ClientFailure, ClientUpdate
from lightning_fedbayes.core.seeding import derive_seed, seed_everything
from lightning_fedbayes.server.plan import RoundPlan, cohort_size

PASSES = 10
"""Approximate operations per parameter for reading, fusing and loading a client's posterior."""
Outputs = tuple[Tensor | None, Mapping[str, Any]]
"""Result of a step: the clients' losses, None if it was skipped or failed, and the other values that it returned."""
STEPS_PER_BATCH = 16
"""Small steps in one batch of the loop. Its overhead per batch is a third of a small step."""


class VectorizedEngine(Engine):
    """Trains clients together: clients at the same step with batches of equal size take that step as one.

    ``training_step`` runs under vmap with the parameters, buffers and noise of each client, and the user's optimizer
    steps the stack, of at most ``clients_at_once``. The module, which the probe has ``probed``, holds the global model
    throughout. Without noise the result equals the sequential engine's up to rounding. With noise it has the same
    distribution.
    """

    name: ClassVar[str] = "vectorized"
    takes_own_steps: ClassVar[bool] = True

    def __init__(
        self,
        context: TrainingContext,
        model: ResidentModel,
        loader: FederatedLoader,
        *,
        probed: ProbeResult,
        clients_at_once: int,
        **options: Any,
    ) -> None:
        self.log: StackedTrainingLog
        self.probed, self.clients_at_once = probed, clients_at_once
        super().__init__(context, model, loader, StackedTrainingLog(context), **options)
        self._step = StackedStep(context, self.log)
        self._step.shared_buffers = probed.shared_buffers
        self._clip = clipping(context)
        optimizer = context.optimizers[0]
        has_state = self.keep_optimizer or model.learned is not None
        self._counts = counts_by_row(optimizer, probed.stacked_keys) if has_state else frozenset[str]()
        self._stack: ClientStack | None = None
        self._failures: dict[int, Exception] = {}
        self._modes: StepModes | None = None
        self._buffer_names = dict(context.module.named_buffers()).keys()
        self.prepare = self._prepare

    def use(self, loader: FederatedLoader) -> None:
        """See :meth:`Engine.use`. The loader then brings stacked batches."""
        super().use(loader)
        batching = loader.batching
        largest = min(self.clients_at_once, cohort_size(len(self.sizes), batching.fraction))
        steps = STEPS_PER_BATCH if self.probed.flops * largest <= SMALL_STEP else 1
        self._scheduler = schedule.Scheduler(self.sizes, batching, self.clients_at_once, steps)
        loader.arrangement = schedule.StackedBatches(loader, self._scheduler)

    def num_batches(self, plan: RoundPlan) -> int:
        """See :meth:`Engine.num_batches`: each has up to :data:`STEPS_PER_BATCH` steps."""
        return len(self._scheduler(plan)) if plan.cohort else 1

    def begin_round(self, plan: RoundPlan) -> None:
        """See :meth:`Engine.begin_round`."""
        super().begin_round(plan)
        new = sorted(dict(self.context.module.named_buffers()).keys() - self._buffer_names)
        if new:
            raise FederationError(
                f"the buffers {listed(new)} were registered after the federation was made, such as in on_train_start: "
                "register them in __init__, configure_model or on_fit_start, or take engine='sequential'"
            )
        if plan.cohort:
            self._schedule = self._scheduler(plan)
        self._positions = {client: position for position, client in enumerate(plan.cohort)}
        if self.probed.switches_modes and len(self.sizes) > 1:  # the modes of one client stay as it leaves them
            self._modes = StepModes(self.context.module)

    def end_round(self, *, success: bool) -> None:
        """Drop the stack. If the round succeeded, keep the clients' states."""
        self._drop_stack()
        if self._modes is not None:
            self._modes.restore()
        for optimizer in self.context.optimizers:
            optimizer.zero_grad()
            optimizer.state.clear()
        if self.context.course is not None:
            self.context.course.end_round()
        super().end_round(success=success)

    def begin_batch(self, batch_idx: int) -> Sequence[Client]:
        """At the first batch of a chunk, stack its clients."""
        if not self.plan.cohort:
            return ()
        chunk, groups = self._batch = self._schedule.batches[batch_idx]
        if groups[0] is not chunk.groups[0]:
            return ()
        clients = [self.client(self._positions[number]) for number in chunk.clients]
        if self.context.course is not None:
            self.context.course.begin_client()
        self._failures = {}
        self._losses, self._added = torch.zeros(2, len(clients), device=self.context.device)
        self._examples = [0] * len(clients)
        starts = self.plan.starts
        self._lengths = [starts[client.position + 1] - starts[client.position] for client in clients]
        self._kept: dict[int, Any] = {}
        self.log.begin_chunk(len(clients))
        seed_everything(derive_seed(self.seed, "training", self.plan.round, min(chunk.clients)))
        states = [self.states.of(client.job) for client in clients]  # once: they may be read from a disk
        problems = [self.problem(client.job, state) for client, state in zip(clients, states, strict=True)]
        if self._modes is not None:
            self._modes.restore()
        try:
            with self.threads():
                begun = [self.optimizer_states(*each) for each in zip(clients, states, problems)]
                of_clients = clients, states, [each[0] if each else {} for each in begun]
                keys = self.probed.stacked_keys, self._counts
                priors = self.local, problems, self.terms(clients, problems, stacked=True)
                optimizer = self.context.optimizers[0]
                self._stack = ClientStack(self.model, optimizer, self._step, *of_clients, *keys, *priors)
        except Exception as error:  # in on_client_start
            self._failures = dict.fromkeys(range(len(clients)), error)
        if self._modes is not None:
            self._modes.begin_clients()
        self._start = time.perf_counter()
        return clients

    def _prepare(self, batches: list[schedule.StackedBatch]) -> Any:
        """Move stacked batches to the device. Returns the list of batches that callbacks see."""
        convert, device = self.context.precision.convert_input, self.context.device
        if device.type != "cpu" or type(self.context.precision) is not Precision:
            moved = [[(s, move_data_to_device(convert(data), device)) for s, data in b.parts] for b in batches]
            batches = [schedule.StackedBatch(parts, b.failures) for parts, b in zip(moved, batches)]
        self._batches_at_hand = batches
        return [data for batch in batches for _, data in batch.parts]

    def train_batch(self, step: Step, optimizer: Optimizer, batch_idx: int, kwargs: Mapping[str, Any]) -> Any:
        """Take a few stacked steps in place of the loop's ``step``. Returns the last outputs."""
        if not self.plan.cohort:
            return {}
        _, groups = self._batch
        steps = self.context.steps
        outputs: Outputs = None, {}
        with threads_for(self.probed.flops * max(len(group.slots) for group in groups)):
            for group, batch in zip(groups, self._batches_at_hand, strict=True):
                steps.increment_ready()
                if self.context.course is not None:
                    self.context.course.move_to(group.step)
                for slot, error in batch.failures.items():
                    self._failures.setdefault(slot, error)
                parts = [part for slots, data in batch.parts for part in self._parts(slots, data, group.step)]
                step_of = group if len(parts) <= 1 else replace(group, alone=False)
                outputs = None, {}
                for part, data in parts:
                    outputs = self._train(part, data, step_of)
                steps.increment_completed()
        losses, rest = outputs
        return rest if losses is None else {"loss": losses.mean(), **rest}

    def _index(self, slot: int, step: int) -> int:
        """Return the number of the batch in the client's local epoch."""
        return step % (self._lengths[slot] // self.plan.local_epochs)

    def _parts(self, slots: schedule.Slots, data: Any, step: int) -> Iterator[tuple[schedule.Slots, Any]]:
        """Yield the clients that have not failed, with their batches, in groups that can step together."""
        healthy = schedule.slots_of([slot for slot in slots if slot not in self._failures]) if self._failures else slots
        if self._stack is None or not healthy:
            return
        kinds = self._stack.optimizer.alike(healthy)
        if self.probed.reads_index and self.plan.local_epochs > 1:
            number = {slot: self._index(slot, step) for slot in healthy}
            kinds = [
                schedule.slots_of([slot for slot in kind if number[slot] == index])
                for kind in kinds
                for index in sorted({number[slot] for slot in kind})
            ]
        for together in kinds:
            yield (
                together,
                data if together == slots else schedule.rows_of_tree(data, [slots.index(slot) for slot in together]),
            )

    def _train(self, slots: schedule.Slots, data: Any, group: schedule.Group) -> Outputs:
        """Take one step of clients of one kind. If it fails, or they branch differently, step smaller groups."""
        assert self._stack is not None
        optimizer = self._stack.optimizer
        try:
            index = self._index(slots[0], group.step)
            optimizer.select(slots, group.step, alone=group.alone)
            losses, rest = None, {}
            if self._modes is not None:
                self._modes.enter(group.step)
            for _ in range(optimizer.draws):
                with optimizer.drawn():
                    losses, rest = self._stack.forward_backward(slots, data, index, clip=self._clip)
            if self._modes is not None:
                self._modes.check()
        except (MisconfigurationException, FedBayesError):
            raise  # an error in the set-up, the same for every client
        except Exception as error:
            if len(slots) == 1:
                self._failures[slots[0]] = explained(error)
                return None, {}
            truths = error.truths if isinstance(error, schedule.Disagreement) else range(len(slots))
            rows = [[row for row, each in enumerate(truths) if each == truth] for truth in dict.fromkeys(truths)]
            parts = [
                (schedule.slots_of([slots[row] for row in some]), schedule.rows_of_tree(data, some)) for some in rows
            ]
            return [self._train(part, batch, group) for part, batch in parts][-1]
        try:
            optimizer.skip() if losses is None else optimizer.step()
            if self.model.learned is not None and losses is not None:
                done = [(group.step + 1) / self._lengths[slot] for slot in slots]
                self.model.learned.observe(optimizer.optimizer, done)
        except FedBayesError:
            raise
        except Exception as error:  # some of them may have been stepped
            self._failures.update(dict.fromkeys(slots, error))
            return None, {}
        for slot, error in self.log.add(slots, data).items():
            self._failures.setdefault(slot, error)
        if self.keep_optimizer or self.model.learned is not None:
            done = [slot for slot in slots if group.step + 1 == self._lengths[slot]]
            self._kept.update({slot: optimizer.read_state(slot) for slot in done})
        if losses is not None:
            added = self._stack.added
            schedule.add_rows(self._losses, slots, (losses - added) * group.batch_size)
            schedule.add_rows(self._added, slots, added * group.batch_size)
            for slot in slots:
                self._examples[slot] += group.batch_size
        return losses, rest

    def end_batch(self, batch_idx: int) -> Iterator[ClientUpdate | ClientFailure]:
        """At the last batch of a chunk, yield the updates of its clients one by one: few are in memory at once."""
        if not self.plan.cohort or self._batch[1][-1] is not self._batch[0].groups[-1]:
            return
        clients, course = self._batch[0].clients, self.context.course
        if course is not None:
            course.move_to(max(self._lengths))
            course.end_client(max(self._lengths))
        stack, logged = self._stack, self.log.end_chunk(clients)
        if stack is None:
            seconds = (time.perf_counter() - self._start) / len(clients)
            yield from (self._failed(slot, number, seconds) for slot, number in enumerate(clients))
            return
        with self.threads():
            losses, added = self._losses.tolist(), self._added.tolist()
            posteriors = stack.read_posteriors(partial(self._measured, clients))
        seconds = (time.perf_counter() - self._start) / len(clients)
        for slot, (number, posterior) in enumerate(zip(clients, posteriors)):
            buffers, own = {}, {}
            try:
                if slot not in self._failures:
                    client = self.client(self._positions[number])
                    found = None if stack.measured is None else self.found(stack.measured, client, slot=slot)
                    posterior, buffers, own = self.sent_and_kept(number, posterior, stack.read_buffers(slot), found)
            except FusionError as unusable:
                self._failures[slot] = unusable
            if slot in self._failures:
                yield self._failed(slot, number, seconds)
                continue
            metrics = logged[slot]
            if self._examples[slot]:
                sums = {"train_loss": losses[slot]} | ({"added_loss": added[slot]} if added[slot] else {})
                metrics = {name: value / self._examples[slot] for name, value in sums.items()} | metrics
            kept = self.kept_states([self._kept[slot]] if self.keep_optimizer and slot in self._kept else [])
            self.states.keep(number, ClientState(stack.read_local(slot), kept, **own))
            yield ClientUpdate(number, self.sizes[number], posterior, buffers, metrics, seconds, own["kept"])
        last = self.client(self._positions[clients[-1]])
        vars(self.context.module).update(attributes_of(stack.attributes, last))
        self._drop_stack()

    def _measured(self, clients: Sequence[int], slot: int, values: Tensors, buffers: Tensors) -> Tensors:
        """Return the variances of the client in ``slot``, or the global ones if it has failed."""
        assert self.model.learned is not None
        if slot not in self._failures:
            number = clients[slot]
            client, local = self.client(self._positions[number]), self.states.of(number).local
            try:
                return self.measured(client, local, values, buffers, self._kept[slot])
            except (MisconfigurationException, FedBayesError):
                raise
            except Exception as error:
                self._failures[slot] = error
        return self.model.learned.variances

    def _failed(self, slot: int, client: int, seconds: float) -> ClientFailure:
        return ClientFailure(client, self._failures[slot], self.sizes[client], seconds)

    def threads(self) -> AbstractContextManager[None]:
        """See :meth:`Engine.threads`: one thread if the posteriors of the round are small."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters.values())
        return threads_for(PASSES * parameters * len(self.plan.cohort))

    def close(self) -> None:
        """See :meth:`Engine.close`."""
        self._drop_stack()
        super().close()

    def _drop_stack(self) -> None:
        if self._stack is not None:
            self._stack.optimizer.remove()
            self._stack = None
