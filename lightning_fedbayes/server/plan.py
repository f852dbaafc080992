"""Plan of a round: which clients train, and on which batches. It follows from (seed, round, client)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FederationError, check_at_least, check_number, is_whole, listed, shown
from lightning_fedbayes.core.seeding import generator
from lightning_fedbayes.server.schedule import Timeline, Turn

STRIDE = 2**31
"""Distance between the numbers of a client's problems: number k of client n trains as client n + k · STRIDE."""
Fraction = float | Literal["turns"]
"""Share of the clients in a round, or one client after the other."""


@dataclass(frozen=True)
class Batching:
    """Rule by which each client's examples become batches.

    Args:
        batch_size, drop_last: of the loader: examples per batch, and whether to leave out a last one that is not full.
        shuffle: a new order in every local epoch. Otherwise the order of the data set.
        local_epochs: passes over a client's data per round, E.
        fraction: share of the clients that take part in a round, C in (0, 1], or "turns": one after the other.
        seed: of all orders and cohorts.
        limit: most batches of each client in a local epoch: a number (int), or a share of them (float), rounded down.
        problems: number of problems that each client solves in a round, one after the other, each as another client.
    """

    batch_size: int
    shuffle: bool = True
    drop_last: bool = False
    local_epochs: int = 1
    fraction: Fraction = 1.0
    seed: int = 0
    limit: int | float = 1.0
    problems: int = 1


@dataclass(frozen=True)
class RoundPlan:
    """Cohort of a round, and how many batches each of its clients trains for.

    Raises FederationError if a number has the wrong type.

    Args:
        round, cohort: the round's number, from 0, and its clients, ascending.
        starts: the number of batches before each client's first one, and of all: shape (cohort + 1,). A server that
            does not train needs none.
        local_epochs: passes of each client over its batches.
        clients: number of clients in the federation. 0: as many as in the cohort.
        turn: in a federation without rounds, which messages arrive when. The cohort are the clients that start then.
    """

    round: int
    cohort: tuple[int, ...]
    starts: tuple[int, ...] = (0,)
    local_epochs: int = 1
    clients: int = 0
    turn: Turn | None = None

    def __post_init__(self) -> None:
        check_at_least("round", self.round, -1)  # before the first
        check_at_least("clients", self.clients, 0)
        for name, values in (("cohort", self.cohort), ("starts", self.starts)):
            if not isinstance(values, tuple) or not all(map(is_whole, values)):
                raise FederationError(f"{name}={shown(values)}: give a tuple of whole numbers, such as (0, 1, 2)")

    @property
    def share(self) -> float:
        """Share of one client among all, 1 / K."""
        return 1 / max(1, self.clients or len(self.cohort))

    @property
    def senders(self) -> "RoundPlan":
        """The plan of the clients that send something: of each client's problems the first."""
        if not self.cohort or max(self.cohort) < STRIDE:
            return self
        return replace(self, cohort=tuple(client for client in self.cohort if client < STRIDE), starts=(0,))

    @property
    def heard(self) -> "RoundPlan":
        """The plan of the clients with messages to be fused: the :attr:`senders`, or the clients that arrive."""
        if self.turn is None:
            return self.senders
        return replace(self, cohort=tuple(sorted(arrival.client for arrival in self.turn.arrivals)), starts=(0,))

    @property
    def num_batches(self) -> int:
        """Batches of the whole round."""
        return self.starts[-1]

    @cached_property
    def members(self) -> frozenset[int]:
        """The cohort, to look a client up in."""
        return frozenset(self.cohort)

    @cached_property
    def lengths(self) -> dict[int, int]:
        """Client → its number of batches."""
        return {client: end - start for client, (start, end) in zip(self.cohort, itertools.pairwise(self.starts))}


class OfClients(Sequence[Any]):
    """One value for each client, by its number or the number of any of its problems."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: Any) -> Any:
        return self.values[number % STRIDE if isinstance(number, int) else number]


def plan_round(round: int, sizes: Sequence[int], batching: Batching, timeline: Timeline | None = None) -> RoundPlan:
    """Return the plan of ``round`` for clients of these ``sizes`` (examples), or of a turn of the ``timeline``."""
    turn = None if timeline is None else timeline.turn(round)
    chosen = choose_cohort(round, len(sizes), batching.fraction, batching.seed) if turn is None else turn.starts
    cohort, starts = [], [0]
    for problem in range(batching.problems):
        for client in chosen:
            cohort.append(client + problem * STRIDE)
            starts.append(starts[-1] + batching.local_epochs * batches_per_epoch(sizes[client], batching))
    clients = len(sizes) if turn is None else turn.clients or len(sizes)
    return RoundPlan(round, tuple(cohort), tuple(starts), batching.local_epochs, clients, turn)


def share_of(plan: RoundPlan, rank: int, count: int) -> RoundPlan:
    """Return the clients of ``plan`` that process ``rank`` of ``count`` trains, which may be none.

    The longest client goes to the process with the least work, then the next longest. No process has more than 4/3 of
    the work that the best split gives the busiest one (Graham 1969).

    >>> plan = RoundPlan(0, cohort=(0, 1, 2), starts=(0, 5, 7, 10))
    >>> share_of(plan, 0, 2).cohort, share_of(plan, 1, 2).cohort
    ((0,), (1, 2))
    """
    if count == 1:
        return plan
    lengths, work, own = plan.lengths, [0] * count, []
    for client in sorted(plan.cohort, key=lambda client: (-lengths[client], client)):
        process = work.index(min(work))
        work[process] += lengths[client]
        if process == rank:
            own.append(client)
    own.sort()
    starts = (0, *itertools.accumulate(lengths[client] for client in own))
    return replace(plan, cohort=tuple(own), starts=starts)


def cohort_size(clients: int, fraction: Fraction) -> int:
    """Return the number of clients in a round, max(⌊C·K + ½⌋, 1). 1 where they take turns."""
    return 1 if isinstance(fraction, str) else max(int(fraction * clients + 0.5), 1)


def check_fraction(fraction: Fraction) -> None:
    """Raise FederationError unless the share of clients in a round lies in (0, 1], or is "turns"."""
    if not (isinstance(fraction, str) and fraction == "turns"):
        why = "it is the share of clients in a round; 'turns' takes one client after the other"
        check_number("fraction", fraction, "(0, 1]", why=why)


def choose_cohort(round: int, clients: int, fraction: Fraction, seed: int) -> tuple[int, ...]:
    """Draw :func:`cohort_size` of K clients without replacement, ascending. "turns": client ``round`` modulo K.

    >>> choose_cohort(0, clients=4, fraction=1.0, seed=0)
    (0, 1, 2, 3)
    >>> [choose_cohort(round, clients=2, fraction="turns", seed=0) for round in range(3)]
    [(0,), (1,), (0,)]
    """
    if fraction == "turns":
        return (round % clients,)
    size = cohort_size(clients, fraction)
    if size >= clients:
        return tuple(range(clients))
    chosen = torch.randperm(clients, generator=generator(seed, "cohort", round))[:size]
    return tuple(sorted(chosen.tolist()))


def batches_per_epoch(size: int, batching: Batching) -> int:
    """Return the number of batches in one pass over ``size`` examples.

    >>> [batches_per_epoch(10, Batching(batch_size=4, limit=limit)) for limit in (1.0, 0.8, 1)]
    [3, 2, 1]
    """
    count = size // batching.batch_size if batching.drop_last else -(-size // batching.batch_size)
    return min(count, batching.limit) if isinstance(batching.limit, int) else int(count * batching.limit)


def client_order(round: int, client: int, size: int, batching: Batching) -> list[Tensor]:
    """Return the order of a client's examples in each local epoch: E permutations of shape (n_k,)."""
    if not batching.shuffle:
        return [torch.arange(size)] * batching.local_epochs
    draws = generator(batching.seed, "order", round, client)
    return [torch.randperm(size, generator=draws) for _ in range(batching.local_epochs)]


def client_batches(round: int, client: int, size: int, batching: Batching) -> list[Tensor]:
    """Return the example numbers of each of a client's batches in a round, all local epochs in a row."""
    count, batches = batches_per_epoch(size, batching), []
    for order in client_order(round, client, size, batching):
        batches += order.split(batching.batch_size)[:count]
    return batches


def check_batches(names: Sequence[str], sizes: Sequence[int], batching: Batching) -> None:
    """Raise FederationError for a client that would never have a batch."""
    idle = [f"{n} ({s})" for n, s in zip(names, sizes, strict=True) if batches_per_epoch(s, batching) == 0]
    if idle and batching.limit != 1.0:
        what = f"limit_train_batches={batching.limit} leaves no batch to the clients {listed(idle)}"
        remedy = "give a number of batches of each client, or a larger share"
        raise FederationError(f"{what} (their numbers of examples in brackets); {remedy}")
    if idle:
        what = f"clients with fewer examples than one batch of {batching.batch_size}, and drop_last=True"
        raise FederationError(f"{what}: {listed(idle)}; they would never train. Use drop_last=False or a smaller batch")
