"""Schedule and batches of a round: clients at the same step with batches of equal size form a group, which steps
together.

Batches come from the same data and in the same order as client by client.
"""

import copy
from collections import UserDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice, pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_fedbayes.clients.loader import FederatedLoader, examples
from lightning_fedbayes.core.errors import CannotVectorize
from lightning_fedbayes.core.loading import FailedBatch
from lightning_fedbayes.core.private_torch import register_pytree_node, tree_flatten, tree_map, tree_unflatten
from lightning_fedbayes.server.plan import Batching, RoundPlan, batches_per_epoch, client_order

Slots = range | tuple[int, ...]
"""Rows of clients in a stack, ascending. A ``range`` if they are consecutive, so that selecting them gives a view."""


def slots_of(slots: Sequence[int]) -> Slots:
    """Return ``slots`` as a range if they are consecutive, else as a tuple."""
    if not slots:
        return range(0)
    return range(slots[0], slots[-1] + 1) if slots[-1] - slots[0] + 1 == len(slots) else tuple(slots)


def take_rows(stack: Tensor, slots: Slots) -> Tensor:
    """Return the rows ``slots`` of a tensor of shape (clients, *): a view if they are consecutive, else a copy."""
    return stack[slots.start : slots.stop] if isinstance(slots, range) else stack[list(slots)]


def put_rows(stack: Tensor, slots: Slots, rows: Tensor) -> None:
    """Write ``rows`` into the rows ``slots`` of ``stack``, unless they are the view from :func:`take_rows`."""
    if not isinstance(slots, range):
        stack[list(slots)] = rows.to(stack.dtype)  # counts of new clients are of single precision, of others double
        return
    target = stack[slots.start : slots.stop]
    if target.data_ptr() != rows.data_ptr():
        target.copy_(rows)


def add_rows(stack: Tensor, slots: Slots, rows: Tensor | float) -> None:
    """Add ``rows`` to the rows ``slots`` of ``stack``."""
    if len(slots) == len(stack) or isinstance(slots, range):
        (stack if len(slots) == len(stack) else take_rows(stack, slots)).add_(rows)
    else:
        stack[list(slots)] += rows


def row_sums(stack: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum each row of (clients, *), in any order in memory, as ``dtype``."""
    return stack.unsqueeze(1).sum(list(range(1, stack.dim() + 1)), dtype=dtype)


@dataclass(frozen=True)
class Group:
    """Clients that take one step together, in the rows ``slots`` of the stack.

    Each has taken ``step`` steps before and has a batch of ``batch_size`` examples. ``alone`` is True if all clients
    that take this step are here.
    """

    step: int
    slots: Slots
    batch_size: int
    alone: bool = True


@dataclass(frozen=True)
class Chunk:
    """Clients that are in the stack at the same time, those with most steps first, and their steps in order."""

    clients: tuple[int, ...]
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Schedule:
    """The steps of a round, chunk after chunk, up to ``steps_per_batch`` in one of the Trainer's batches."""

    chunks: tuple[Chunk, ...]
    steps_per_batch: int = 1

    @cached_property
    def batches(self) -> tuple[tuple[Chunk, tuple[Group, ...]], ...]:
        """The Trainer's batches: for each the chunk, and its consecutive steps in this batch."""
        length = self.steps_per_batch
        return tuple(
            (chunk, chunk.groups[start : start + length])
            for chunk in self.chunks
            for start in range(0, len(chunk.groups), length)
        )

    def __len__(self) -> int:
        return len(self.batches)


class Scheduler:
    """Makes the schedule of a round, and keeps the last one, because cohorts often stay the same.

    Clients with similar numbers of steps share a chunk. Chunks have at most ``clients_at_once`` clients, and about
    equal numbers of them.
    """

    def __init__(
        self, sizes: Sequence[int], batching: Batching, clients_at_once: int, steps_per_batch: int = 1
    ) -> None:
        self.sizes, self.batching = sizes, batching
        self.clients_at_once, self.steps_per_batch = clients_at_once, steps_per_batch
        self._last: tuple[tuple[int, ...], Schedule] = ((), Schedule(()))

    def __call__(self, plan: RoundPlan) -> Schedule:
        """Return the schedule of the round of ``plan``."""
        if self._last[0] == plan.cohort:
            return self._last[1]
        sizes, batching = self.sizes, self.batching
        steps = {client: batches_per_epoch(sizes[client], batching) for client in plan.cohort}
        order = sorted(plan.cohort, key=lambda client: (-steps[client], -_last_batch_size(sizes[client], batching)))
        count = -(-len(order) // self.clients_at_once)
        bounds = [len(order) * i // count for i in range(count + 1)]
        chunks = [tuple(order[start:end]) for start, end in pairwise(bounds)]
        groups = [_groups([sizes[client] for client in clients], batching) for clients in chunks]
        self._last = plan.cohort, Schedule(tuple(map(Chunk, chunks, groups)), self.steps_per_batch)
        return self._last[1]

    def batch_order(self, plan: RoundPlan) -> Iterator[tuple[int, int]]:
        """Yield (client, step) of every batch in the order in which the loader must bring them."""
        for chunk in self(plan).chunks:
            for group in chunk.groups:
                yield from ((chunk.clients[slot], group.step) for slot in group.slots)


def _groups(sizes: Sequence[int], batching: Batching) -> tuple[Group, ...]:
    """Return the steps of one chunk. Its clients come in order of decreasing number of batches."""
    lengths = [batches_per_epoch(size, batching) for size in sizes]
    short: dict[int, dict[int, list[int]]] = {}  # step → batch size → slots
    for slot, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
        last = _last_batch_size(size, batching)
        if last < batching.batch_size:
            for epoch in range(1, batching.local_epochs + 1):
                short.setdefault(epoch * length - 1, {}).setdefault(last, []).append(slot)
    groups: list[Group] = []
    active = len(sizes)
    for step in range(batching.local_epochs * max(lengths)):
        while lengths[active - 1] * batching.local_epochs <= step:
            active -= 1
        others = short.get(step, {})
        apart = {slot for slots in others.values() for slot in slots}
        full = [slot for slot in range(active) if slot not in apart] if apart else range(active)
        members = {batching.batch_size: full, **{size: others[size] for size in sorted(others, reverse=True)}}
        together = {size: slots_of(slots) for size, slots in members.items() if slots}
        groups += [Group(step, slots, size, len(together) == 1) for size, slots in together.items()]
    return tuple(groups)


def _last_batch_size(size: int, batching: Batching) -> int:
    if batching.drop_last:
        return batching.batch_size
    return min(batching.batch_size, size - (batches_per_epoch(size, batching) - 1) * batching.batch_size)


@dataclass(frozen=True)
class StackedBatch:
    """The batches of a group of clients.

    ``parts`` has (slots, data) of clients with batches of equal shapes, in tensors of shape (clients, batch, *).
    ``failures`` has slot → error of every client with a batch that could not be loaded.
    """

    parts: list[tuple[Slots, Any]]
    failures: dict[int, Exception] = field(default_factory=dict)


class StackedBatches:
    """The batches of a loader in the order of a round's schedule."""

    def __init__(self, loader: FederatedLoader, scheduler: Scheduler) -> None:
        self.loader, self.schedule = loader, scheduler
        self._loader = None if len(loader.shapes) == 1 else loader.dataloader(scheduler.batch_order)

    def length(self, plan: RoundPlan) -> int:
        """Return the number of the Trainer's batches in the round."""
        return len(self.schedule(plan))

    def batches(self, plan: RoundPlan) -> Iterator[list[StackedBatch]]:
        """Yield the Trainer's batches, each a list of the stacked batches of a few steps."""
        schedule = self.schedule(plan)
        if self._loader is None:
            steps = self._in_memory(plan, schedule)
        else:
            loaded = self.loader.iterate(self._loader, plan)
            steps = (
                stack_batches(group.slots, [next(loaded) for _ in group.slots])
                for chunk in schedule.chunks
                for group in chunk.groups
            )
        for _, groups in schedule.batches:
            yield list(islice(steps, len(groups)))

    def _in_memory(self, plan: RoundPlan, schedule: Schedule) -> Iterator[StackedBatch]:
        """Select the batches from tensors in memory, with one index for all clients and consecutive equal steps."""
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
        """Return tensors with the examples of all clients of ``chunk``, and the rows of each client in them."""
        sources = [self.loader.tensors[client] for client in chunk.clients]
        sizes = [len(tensors[0]) if rows is None else len(rows) for tensors, rows in sources]
        shared = sources[0][0]
        if all(tensors is shared for tensors, _ in sources):
            return shared, [torch.arange(size) if rows is None else rows for size, (_, rows) in zip(sizes, sources)]
        parts = [[t if rows is None else examples(t, rows) for t in tensors] for tensors, rows in sources]
        joined = tuple(torch.cat(each) for each in zip(*parts, strict=True))
        return joined, list(torch.arange(sum(sizes)).split(sizes))

    def _index(self, plan: RoundPlan, chunk: Chunk, rows: list[Tensor]) -> Tensor:
        """Return the row of every example of every batch, shape (clients, steps, batch size). 0 as padding."""
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


class Disagreement(RuntimeError):
    """Clients in a stack would take different branches. ``truths`` says what each of them finds."""

    def __init__(self, truths: Sequence[bool]) -> None:
        super().__init__("vmap: data-dependent control flow, in which the clients of a stack disagree")
        self.truths = truths


class _Like:
    """A ``UserDict`` without its entries, such as a ``BatchEncoding`` of Hugging Face."""

    def __init__(self, batch: UserDict) -> None:
        self.empty, self.keys = copy.copy(batch), tuple(batch.data)
        self.empty.data = {}

    def __repr__(self) -> str:
        return f"{type(self.empty).__qualname__}{self.keys}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Like) and repr(self) == repr(other)


def _flatten(batch: UserDict) -> tuple[list[Any], _Like]:
    return list(batch.data.values()), _Like(batch)


def _unflatten(values: Iterable[Any], like: _Like) -> UserDict:
    batch = copy.copy(like.empty)
    batch.data = dict(zip(like.keys, values))
    return batch


def stack_batches(slots: Slots, batches: list[Any]) -> StackedBatch:
    """Stack batches, one for each slot, with others of their form. Raise CannotVectorize for more than tensors."""
    failures = {slot: batch.error for slot, batch in zip(slots, batches) if isinstance(batch, FailedBatch)}
    alike: dict[Any, tuple[Any, list[int], list[list[Tensor]]]] = {}
    for slot, batch in zip(slots, batches, strict=True):
        if slot in failures:
            continue
        leaves, structure = tree_flatten(batch)
        if new := {type(leaf) for leaf in leaves if isinstance(leaf, UserDict)}:
            for kind in new:
                register_pytree_node(kind, _flatten, _unflatten)
            leaves, structure = tree_flatten(batch)
        wrong = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
        if wrong:
            raise CannotVectorize(f"batches hold more than tensors ({wrong[0]}), which cannot be stacked")
        key = repr(structure), *((leaf.shape, leaf.dtype) for leaf in leaves)  # torch < 2.8 cannot hash a structure
        _, members, stacked = alike.setdefault(key, (structure, [], []))
        members.append(slot)
        stacked.append(leaves)
    parts = [
        (slots_of(members), tree_unflatten([torch.stack(each) for each in zip(*stacked, strict=True)], structure))
        for structure, members, stacked in alike.values()
    ]
    return StackedBatch(parts, failures)


def rows_of_tree(data: Any, rows: list[int]) -> Any:
    """Return some clients' batches out of a stacked one."""
    return tree_map(lambda tensor: tensor[rows], data)
