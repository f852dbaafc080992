"""The round's batches for groups of clients, from the same data and in the same orders as one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from lightning_fedbayes.engines.loader import FailedBatch, FederatedLoader, examples
from lightning_fedbayes.engines.plan import RoundPlan, batches_per_epoch, client_order
from lightning_fedbayes.engines.vectorized.reasons import CannotVectorize
from lightning_fedbayes.engines.vectorized.rows import take_rows
from lightning_fedbayes.engines.vectorized.schedule import Chunk, Schedule, Scheduler, Slots, slots_of


@dataclass(frozen=True)
class StackedBatch:
    """What a group of clients trains on.

    Args:
        parts: clients whose batches have equal shapes, and those batches, tensors of shape (clients, batch, *).
        failures: clients whose batch could not be loaded: slot → error.
    """

    parts: list[tuple[Slots, Any]]
    failures: dict[int, Exception] = field(default_factory=dict)


class StackedBatches:
    """Arranges a loader's batches by the schedule of a round.

    Args:
        loader: the federation's loader.
        scheduler: the schedule of any round.
    """

    def __init__(self, loader: FederatedLoader, scheduler: Scheduler) -> None:
        self.loader = loader
        self.schedule = scheduler
        shapes = {tuple(tensor.shape[1:] for tensor in tensors) for tensors, _ in loader.tensors}
        self._loader = None if len(shapes) == 1 else loader.dataloader(scheduler.batch_order)

    def length(self, plan: RoundPlan) -> int:
        """Number of stacked batches in the round."""
        return len(self.schedule(plan))

    def batches(self, plan: RoundPlan) -> Iterator[list[StackedBatch]]:
        """What the Trainer gets: the stacked batches of a few steps at a time."""
        schedule = self.schedule(plan)
        steps = self._in_memory(plan, schedule) if self._loader is None else self._loaded(plan, schedule, self._loader)
        for _, groups in schedule.batches:
            yield list(islice(steps, len(groups)))

    def _loaded(self, plan: RoundPlan, schedule: Schedule, loader: DataLoader) -> Iterator[StackedBatch]:
        """Stacks of the batches that ``loader`` brings."""
        batches = self.loader.iterate(loader, plan)
        for chunk in schedule.chunks:
            for group in chunk.groups:
                yield stack_batches(group.slots, [next(batches) for _ in group.slots])

    def _in_memory(self, plan: RoundPlan, schedule: Schedule) -> Iterator[StackedBatch]:
        """Stacks of rows of tensors: one index for all clients, and for steps in a row whose batches are alike."""
        chunk: Chunk | None = None
        tensors, index = (), torch.zeros(0)
        for of, groups in schedule.batches:
            if of is not chunk:
                chunk = of
                tensors, rows = self._source(chunk)
                index = self._index(plan, chunk, rows)
            for (slots, size), alike in groupby(groups, lambda group: (group.slots, group.batch_size)):
                steps = [group.step for group in alike]
                picked = take_rows(index, slots)[:, steps[0] : steps[-1] + 1, :size].transpose(0, 1)
                flat = picked.flatten()
                found = [examples(tensor, flat).view(*picked.shape, *tensor.shape[1:]) for tensor in tensors]
                for batch in zip(*found, strict=True):
                    yield StackedBatch([(slots, list(batch))])

    def _source(self, chunk: Chunk) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Tensors that hold the examples of all clients of ``chunk``, and which rows of them are each client's."""
        sources = [self.loader.tensors[client] for client in chunk.clients]
        sizes = [len(tensors[0]) if rows is None else len(rows) for tensors, rows in sources]
        shared = sources[0][0]
        if all(tensors is shared for tensors, _ in sources):
            return shared, [torch.arange(size) if rows is None else rows for size, (_, rows) in zip(sizes, sources)]
        parts = [[t if rows is None else examples(t, rows) for t in tensors] for tensors, rows in sources]
        joined = tuple(torch.cat(each) for each in zip(*parts, strict=True))
        return joined, list(torch.arange(sum(sizes)).split(sizes))

    def _index(self, plan: RoundPlan, chunk: Chunk, rows: list[Tensor]) -> Tensor:
        """Row of every example of every batch, shape (clients, steps, batch size); 0 where there is none."""
        batching, sizes = self.loader.batching, [len(each) for each in rows]
        steps = [batching.local_epochs * batches_per_epoch(size, batching) for size in sizes]
        index = torch.zeros(len(sizes), max(steps), batching.batch_size, dtype=torch.int64)
        for slot, client in enumerate(chunk.clients):
            size = sizes[slot]
            count = batches_per_epoch(size, batching)
            for epoch, order in enumerate(client_order(plan.round, client, size, batching)):
                used = rows[slot][order][: count * batching.batch_size]
                index[slot, epoch * count : (epoch + 1) * count].view(-1)[: len(used)] = used
        return index


def stack_batches(slots: Slots, batches: list[Any]) -> StackedBatch:
    """Loaded batches, one for each slot, as stacks of those with equal shapes.

    Raises:
        CannotVectorize: a batch holds something other than tensors.
    """
    failures = {slot: batch.error for slot, batch in zip(slots, batches) if isinstance(batch, FailedBatch)}
    alike: dict[Any, list[tuple[int, list[Tensor]]]] = {}
    for slot, batch in zip(slots, batches, strict=True):
        if slot in failures:
            continue
        leaves, structure = tree_flatten(batch)
        wrong = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
        if wrong:
            raise CannotVectorize(f"batches hold more than tensors ({wrong[0]}), which cannot be stacked")
        key = structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
        alike.setdefault(key, []).append((slot, leaves))
    parts = []
    for (structure, *_), members in alike.items():
        leaves = [torch.stack(each) for each in zip(*(leaves for _, leaves in members), strict=True)]
        parts.append((slots_of([slot for slot, _ in members]), tree_unflatten(leaves, structure)))
    return StackedBatch(parts, failures)
