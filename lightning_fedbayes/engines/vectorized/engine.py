"""The vectorized engine: the clients of a round train at once, as one stack of networks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_fedbayes.engines.client import Client, ClientFailure, ClientState
from lightning_fedbayes.engines.engine import Engine
from lightning_fedbayes.engines.loader import FederatedLoader
from lightning_fedbayes.engines.plain_steps import give_back, take_over
from lightning_fedbayes.engines.plan import RoundPlan, cohort_size
from lightning_fedbayes.engines.round import ClientUpdate
from lightning_fedbayes.engines.state import ResidentModel
from lightning_fedbayes.engines.threads import SMALL_STEP, threads_for
from lightning_fedbayes.engines.vectorized.batches import StackedBatch, StackedBatches
from lightning_fedbayes.engines.vectorized.clipping import clip_norms, clip_values
from lightning_fedbayes.engines.vectorized.log import StackedTrainingLog
from lightning_fedbayes.engines.vectorized.places import Places
from lightning_fedbayes.engines.vectorized.reasons import CannotVectorize
from lightning_fedbayes.engines.vectorized.rows import add_rows
from lightning_fedbayes.engines.vectorized.schedule import Group, Scheduler, Slots, slots_of
from lightning_fedbayes.engines.vectorized.stack import ClientStack, Clip
from lightning_fedbayes.engines.vectorized.start import attributes_of
from lightning_fedbayes.engines.vectorized.step import StackedStep
from lightning_fedbayes.engines.vectorized.trial import Trial
from lightning_fedbayes.errors import FedBayesError
from lightning_fedbayes.seeding import derive_seed, seed_everything

PASSES = 10
"""Operations per parameter that reading, fusing and loading a client's posterior take, roughly."""

Outputs = tuple[Tensor | None, Mapping[str, Any]]
"""What a step gives: the clients' losses, None if it was skipped or has failed; and what else it returned."""

STEPS_PER_BATCH = 16
"""Small steps in one of the Trainer's batches, whose own work takes as long as a third of such a step."""


class VectorizedEngine(Engine):
    """Trains clients at once: a step is one of all clients that have a batch of that size left.

    ``training_step`` runs under vmap with each client's own parameters, buffers and noise, and the
    user's optimizer steps the stack. The module itself holds the global model throughout. Without noise the result is
    that of the sequential engine to rounding; with noise, the same in distribution.

    Args:
        trainer, model, names, sizes, optimizer_state, seed: see :class:`~lightning_fedbayes.engines.engine.Engine`.
        trial: what a trial of the first batch has shown.
        loader: the federation's loader.
        clients_at_once: most clients in the stack.
    """

    name: ClassVar[str] = "vectorized"

    def __init__(
        self,
        trainer: L.Trainer,
        model: ResidentModel,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        *,
        trial: Trial,
        loader: FederatedLoader,
        clients_at_once: int,
        **options: Any,
    ) -> None:
        module = trainer.lightning_module
        self.log: StackedTrainingLog
        super().__init__(trainer, model, names, sizes, StackedTrainingLog(module), **options)
        self.trial = trial
        self.clients_at_once = clients_at_once
        self._step = StackedStep(module, Places(module), self.log, trainer.precision_plugin)
        self._clip = clipping(trainer)
        self._stack: ClientStack | None = None
        self._failures: dict[int, Exception] = {}
        self.arrange(loader)

    def arrange(self, loader: FederatedLoader) -> None:
        """Let ``loader`` bring stacked batches."""
        sizes, batching = loader.clients.sizes, loader.batching
        largest = min(self.clients_at_once, cohort_size(len(sizes), batching.fraction))
        steps = STEPS_PER_BATCH if self.trial.flops * largest <= SMALL_STEP else 1
        self._scheduler = Scheduler(sizes, batching, self.clients_at_once, steps)
        loader.arrangement = StackedBatches(loader, self._scheduler)

    def install(self) -> None:
        """Take over the Trainer's batches."""
        take_over(self.trainer, self._train_batch, self._prepare)
        self.log.install()

    def remove(self) -> None:
        """Give the Trainer its own batches back."""
        self._drop_stack()
        give_back(self.trainer)
        self.log.remove()

    def num_batches(self, plan: RoundPlan) -> int:
        """One for each few steps of groups of clients."""
        return len(self._scheduler(plan)) if plan.cohort else 1

    def begin_round(self, plan: RoundPlan) -> None:
        """Prepare for the clients of ``plan``."""
        super().begin_round(plan)
        if plan.cohort:
            self._schedule = self._scheduler(plan)
        self._positions = {client: position for position, client in enumerate(plan.cohort)}

    def end_round(self, *, success: bool) -> None:
        """Keep what the clients keep, if the round counts."""
        self._drop_stack()
        super().end_round(success=success)

    def begin_batch(self, batch_idx: int) -> Sequence[Client]:
        """At the first batch of a chunk, stack its clients."""
        chunk, groups = self._schedule.batches[batch_idx]
        if groups[0] is not chunk.groups[0]:
            return ()
        clients = [self.client(self._positions[number]) for number in chunk.clients]
        self._failures = {}
        self._losses = torch.zeros(len(clients), device=self.trainer.strategy.root_device)
        self._batches = [0] * len(clients)
        starts = self.plan.starts
        self._lengths = [starts[client.position + 1] - starts[client.position] for client in clients]
        self._kept: dict[int, Any] = {}
        self.log.begin_chunk(len(clients))
        seed_everything(derive_seed(self.seed, "training", self.plan.round, min(chunk.clients)))
        try:
            with self.threads():
                self._stack = self.stack(clients)
        except Exception as error:  # of on_client_start
            self._failures = dict.fromkeys(range(len(clients)), error)
        return clients

    def stack(self, clients: Sequence[Client]) -> ClientStack:
        """The networks of ``clients``, as they start."""
        states = [self.states.get(client.number, ClientState()) for client in clients]
        optimizer, trial = self.trainer.optimizers[0], self.trial
        return ClientStack(
            self.model, optimizer, self._step, clients, states, trial.stacked_keys, trial.layouts
        )

    def _prepare(self, batches: list[StackedBatch]) -> Any:
        """Bring stacked batches to the device. Returns what callbacks see of them: one after another in a list."""
        convert, device = self.trainer.precision_plugin.convert_input, self.trainer.strategy.root_device
        if device.type != "cpu" or type(self.trainer.precision_plugin) is not Precision:
            batches = [
                StackedBatch([(s, move_data_to_device(convert(data), device)) for s, data in b.parts], b.failures)
                for b in batches
            ]
        self._batches_at_hand = batches
        return [data for batch in batches for _, data in batch.parts]

    def _train_batch(self, optimizer: Optimizer, batch_idx: int, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """A few stacked steps, in place of the Trainer's automatic optimization. Returns the outputs of the last."""
        if not self.plan.cohort:
            return {}
        _, groups = self._schedule.batches[batch_idx]
        progress = self.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        outputs: Outputs = None, {}
        with threads_for(self.trial.flops * max(len(group.slots) for group in groups)):
            for group, batch in zip(groups, self._batches_at_hand, strict=True):
                progress.increment_ready()
                outputs = self._train_group(group, batch, batch_idx)
                progress.increment_completed()
        losses, rest = outputs
        return rest if losses is None else {"loss": losses.mean(), **rest}

    def _train_group(self, group: Group, batch: StackedBatch, batch_idx: int) -> Outputs:
        """One step of a group."""
        for slot, error in batch.failures.items():
            self._failures.setdefault(slot, error)
        parts = [part for slots, data in batch.parts for part in self._parts(slots, data)]
        if len(parts) > 1:
            group = replace(group, alone=False)
        outputs: Outputs = None, {}
        for slots, data in parts:
            outputs = self._train(slots, data, group, batch_idx)
        return outputs

    def _parts(self, slots: Slots, data: Any) -> Iterator[tuple[Slots, Any]]:
        """The clients that have not failed, with their batches, in groups that can step together."""
        healthy = slots_of([slot for slot in slots if slot not in self._failures]) if self._failures else slots
        if self._stack is None or not healthy:
            return
        for together in self._stack.optimizer.alike(healthy):
            yield together, data if together == slots else _rows_of(data, [slots.index(slot) for slot in together])

    def _train(self, slots: Slots, data: Any, group: Group, batch_idx: int) -> Outputs:
        """One step of clients of one kind; if it fails, one after another, so that only those fail that must."""
        assert self._stack is not None
        optimizer = self._stack.optimizer
        try:
            losses, rest = self._stack.forward_backward(
                slots, data, group.step, batch_idx, alone=group.alone, clip=self._clip
            )
        except (MisconfigurationException, FedBayesError):
            raise  # a mistake in the set-up, the same for every client
        except Exception as error:
            if len(slots) == 1:
                self._failures[slots[0]] = _explained(error)
                return None, {}
            singles = [(range(slot, slot + 1), _rows_of(data, [place])) for place, slot in enumerate(slots)]
            return [self._train(single, batch, group, batch_idx) for single, batch in singles][-1]
        try:
            optimizer.skip() if losses is None else optimizer.step()
        except Exception as error:  # it may have stepped some of them
            self._failures.update(dict.fromkeys(slots, error))
            return None, {}
        self.log.add(slots, data)
        if self.keep_optimizer:
            done = [slot for slot in slots if group.step + 1 == self._lengths[slot]]
            self._kept.update({slot: optimizer.keep(slot) for slot in done})
        if losses is not None:
            add_rows(self._losses, slots, losses)
            for slot in slots:
                self._batches[slot] += 1
        return losses, rest

    def end_batch(self, batch_idx: int, outputs: Any) -> Sequence[ClientUpdate | ClientFailure]:
        """At the last batch of a chunk, read what its clients send."""
        chunk, groups = self._schedule.batches[batch_idx]
        if groups[-1] is not chunk.groups[-1]:
            return ()
        stack, logged = self._stack, self.log.end_chunk(chunk.clients)
        results: list[ClientUpdate | ClientFailure] = []
        if stack is None:
            return [ClientFailure(number, self._failures[slot]) for slot, number in enumerate(chunk.clients)]
        with self.threads():
            losses, posteriors = self._losses.tolist(), stack.read_posteriors()
        for slot, number in enumerate(chunk.clients):
            if slot in self._failures:
                results.append(ClientFailure(number, self._failures[slot]))
                continue
            metrics = logged[slot]
            if self._batches[slot]:
                metrics = {"train_loss": losses[slot] / self._batches[slot], **metrics}
            results.append(
                ClientUpdate(number, self.sizes[number], posteriors[slot], stack.read_buffers(slot), metrics)
            )
            kept = [self._kept[slot]] if slot in self._kept else []
            self._trained[number] = ClientState(stack.read_local(slot), kept)
        last = self.client(self._positions[chunk.clients[-1]])
        vars(self.trainer.lightning_module).update(attributes_of(stack.attributes, last))
        self._drop_stack()
        return results

    def threads(self) -> AbstractContextManager[None]:
        """Inside, torch uses one thread if the posteriors of the round are small."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters.values())
        return threads_for(PASSES * parameters * len(self.plan.cohort))

    def _drop_stack(self) -> None:
        """Forget the clients in the stack."""
        if self._stack is not None:
            self._stack.remove()
            self._stack = None


def _explained(error: Exception) -> Exception:
    """``error``, or what to do if ``training_step`` has turned out not to be stackable after all."""
    if isinstance(error, RuntimeError) and "vmap" in str(error):
        reason = str(error).strip().split("\n")[0]
        return CannotVectorize(
            f"training_step can no longer run for several clients at once: {reason} Use engine='sequential'"
        )
    return error


def _rows_of(data: Any, places: list[int]) -> Any:
    """Some of the clients' batches."""
    return tree_map(lambda tensor: tensor[places], data)


def clipping(trainer: L.Trainer) -> Clip | None:
    """What the Trainer's gradient clipping does to stacked gradients."""
    limit = trainer.gradient_clip_val
    if not limit or limit < 0:
        return None
    clip = clip_values if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE else clip_norms
    return lambda gradients: clip(gradients, limit)
