"""The round's batches for groups of clients, from the same data and in the same orders as one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from lightning_fedbayes.engines.loader import FailedBatch, FederatedLoader
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
        """Stacks of rows of tensors."""
        for chunk in schedule.chunks:
            yield from self._rows(plan, chunk)

    def _rows(self, plan: RoundPlan, chunk: Chunk) -> Iterator[StackedBatch]:
        """Batches as rows of tensors, one index for all clients."""
        sources = [self.loader.tensors[client] for client in chunk.clients]
        sizes = [len(tensors[0]) if rows is None else len(rows) for tensors, rows in sources]
        shared = sources[0][0]
        if any(tensors is not shared for tensors, _ in sources):
            parts = [[t if rows is None else t[rows] for t in tensors] for tensors, rows in sources]
            shared = tuple(torch.cat(each) for each in zip(*parts, strict=True))
            ends = torch.tensor(sizes).cumsum(0).tolist()
            orders = [torch.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        else:
            orders = [torch.arange(size) if rows is None else rows for size, (_, rows) in zip(sizes, sources)]
        index = self._index(plan, chunk, sizes, orders)
        for group in chunk.groups:
            picked = take_rows(index, group.slots)[:, group.step, : group.batch_size]
            yield StackedBatch([(group.slots, [tensor[picked] for tensor in shared])])

    def _index(self, plan: RoundPlan, chunk: Chunk, sizes: list[int], rows: list[Tensor]) -> Tensor:
        """Row of every example of every batch, shape (clients, steps, batch size); 0 where there is none."""
        batching = self.loader.batching
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
