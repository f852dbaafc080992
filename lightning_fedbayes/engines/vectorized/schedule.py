"""Who steps together: the batches of a round arranged so that clients at the same step of equal size form groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_fedbayes.engines.plan import Batching, RoundPlan, batches_per_epoch

Slots = range | tuple[int, ...]
"""Places of clients in a stack, ascending; a ``range`` where they are neighbours, so that their rows are a view."""


@dataclass(frozen=True)
class Group:
    """Clients that take one step together.

    Args:
        step: how many steps each of them has taken before.
        slots: their places in the stack.
        batch_size: examples in each one's batch.
        alone: whether no other group takes this step.
    """

    step: int
    slots: Slots
    batch_size: int
    alone: bool = True


@dataclass(frozen=True)
class Chunk:
    """Clients that are in the stack at the same time.

    Args:
        clients: the client in each slot, those with most steps first, so that the active ones are the first ones.
        groups: the steps, in order.
    """

    clients: tuple[int, ...]
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Schedule:
    """The steps of a round.

    Args:
        chunks: one after another.
        steps_per_batch: most steps in one of the Trainer's batches.
    """

    chunks: tuple[Chunk, ...]
    steps_per_batch: int = 1

    @cached_property
    def batches(self) -> tuple[tuple[Chunk, tuple[Group, ...]], ...]:
        """What each of the Trainer's batches consists of: a chunk, and some steps of it in a row."""
        length = self.steps_per_batch
        return tuple(
            (chunk, chunk.groups[start : start + length])
            for chunk in self.chunks
            for start in range(0, len(chunk.groups), length)
        )

    def __len__(self) -> int:
        return len(self.batches)


class Scheduler:
    """The schedule of any round; the last one is remembered, because cohorts often stay the same.

    Args:
        sizes: number of examples of every client.
        batching: how examples become batches.
        clients_at_once: most clients in the stack.
        steps_per_batch: most steps in one of the Trainer's batches.
    """

    def __init__(
        self, sizes: Sequence[int], batching: Batching, clients_at_once: int, steps_per_batch: int = 1
    ) -> None:
        self.sizes = tuple(sizes)
        self.batching = batching
        self.clients_at_once = clients_at_once
        self.steps_per_batch = steps_per_batch
        self._last: tuple[tuple[int, ...], Schedule] = ((), Schedule(()))

    def __call__(self, plan: RoundPlan) -> Schedule:
        """The schedule of the round of ``plan``."""
        if self._last[0] != plan.cohort:
            chunks = chunk_cohort(plan, self.sizes, self.batching, self.clients_at_once)
            self._last = plan.cohort, Schedule(chunks, self.steps_per_batch)
        return self._last[1]

    def batch_order(self, plan: RoundPlan) -> Iterator[tuple[int, int]]:
        """Client and step of every batch, as a loader is to bring them."""
        for chunk in self(plan).chunks:
            for group in chunk.groups:
                yield from ((chunk.clients[slot], group.step) for slot in group.slots)


def chunk_cohort(
    plan: RoundPlan, sizes: Sequence[int], batching: Batching, clients_at_once: int
) -> tuple[Chunk, ...]:
    """The cohort of ``plan`` in chunks of at most ``clients_at_once`` clients, with the steps that they take together.

    Clients of similar length share a chunk; chunks are as even as they can be.

    >>> from lightning_fedbayes.engines.plan import plan_round
    >>> batching = Batching(batch_size=4, shuffle=False)
    >>> (chunk,) = chunk_cohort(plan_round(0, (8, 6, 3), batching), (8, 6, 3), batching, clients_at_once=3)
    >>> for group in chunk.groups: print(group)
    Group(step=0, slots=range(0, 2), batch_size=4, alone=False)
    Group(step=0, slots=range(2, 3), batch_size=3, alone=False)
    Group(step=1, slots=range(0, 1), batch_size=4, alone=False)
    Group(step=1, slots=range(1, 2), batch_size=2, alone=False)
    """

    def longest_first(client: int) -> tuple[int, int]:
        remainder = _last_batch_size(sizes[client], batching)
        return -batches_per_epoch(sizes[client], batching), -remainder

    order = sorted(plan.cohort, key=longest_first)
    count = -(-len(order) // clients_at_once)
    bounds = [len(order) * i // count for i in range(count + 1)]
    chunks = [tuple(order[bounds[i] : bounds[i + 1]]) for i in range(count)]
    return tuple(Chunk(clients, _groups([sizes[c] for c in clients], batching)) for clients in chunks)


def _groups(sizes: Sequence[int], batching: Batching) -> tuple[Group, ...]:
    """The steps of one chunk, whose clients are ordered by falling number of batches."""
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
    """Examples in the last batch of an epoch."""
    if batching.drop_last:
        return batching.batch_size
    return size - (batches_per_epoch(size, batching) - 1) * batching.batch_size


def slots_of(slots: Sequence[int]) -> Slots:
    """``slots`` as a range, if they are one."""
    if not slots:
        return range(0)
    return range(slots[0], slots[-1] + 1) if slots[-1] - slots[0] + 1 == len(slots) else tuple(slots)
