"""A federation without rounds over a network: every free client trains, and messages are fused as they arrive."""

import os
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from torch import Tensor

from lightning_fedbayes.core.errors import FederationError, FusionError
from lightning_fedbayes.core.messages import ClientFailure, ClientOutcome, ClientUpdate
from lightning_fedbayes.core.seeding import generator
from lightning_fedbayes.server import Asynchronous
from lightning_fedbayes.server.guard import FEWEST
from lightning_fedbayes.server.plan import RoundPlan
from lightning_fedbayes.server.schedule import Arrival, Delays, Fusion, Turn
from lightning_fedbayes.transport.flower import roster
from lightning_fedbayes.transport.flower.wire import to_arrays

if TYPE_CHECKING:
    from lightning_fedbayes.transport.flower.strategy import FusionStrategy


class Job(NamedTuple):
    """Work of a client that is under way: its version of the global posterior, its node, and its start in seconds."""

    client: int
    started: int
    node: int
    since: float


class Heard(NamedTuple):
    """Message of a client that has arrived, and the version that it began with."""

    message: ClientUpdate | ClientFailure
    started: int


class Course:
    """Messages under way, and messages that have arrived since the last fusion. Late ones do not count.

    A client that has answered, or was given up, begins again after the next fusion. ``resumed`` is the
    :meth:`state_dict` of a run that has ended too early.
    """

    def __init__(self, strategy: "FusionStrategy", resumed: Mapping[str, Any]) -> None:
        assert strategy.schedule is not None
        self.strategy, self.schedule, self.server = strategy, strategy.schedule, strategy.running
        self.clients, self.timeout = strategy._roster, strategy._timeout
        self._log = log = None if strategy.checkpoint is None else strategy.checkpoint.with_suffix(".jsonl")
        self._jobs: dict[str, Job] = {}
        self._heard: dict[int, Heard] = {}
        self._resumed: dict[int, int] = dict(resumed.get("clients", {}))
        self._buffers: dict[int, Mapping[str, Tensor]] = dict(resumed.get("buffers", {}))
        self._turn: Turn | None = None
        self._begin = time.monotonic()
        if log is not None and log.exists():  # a run that was killed may have written one line more
            os.truncate(log, sum(map(len, log.read_bytes().splitlines(keepends=True)[: self.server.rounds])))

    @property
    def free(self) -> dict[int, int]:
        """The clients that are not at work, client → node."""
        return {client: node for client, node in self.clients.nodes.items() if client not in self.busy}

    @property
    def busy(self) -> set[int]:
        """The clients that are at work."""
        return {job.client for job in self._jobs.values()}

    def turn(self, grid: Grid, round: int, arrays: ArrayRecord, fewest: int) -> list[ClientOutcome]:
        """Run the federation after ``round`` fusions until messages are to be fused. Return outcomes as they arrived.

        Raises FederationError if fewer than ``fewest`` clients are connected.
        """
        began = time.monotonic()
        nodes = self.clients.look(grid, self.timeout)
        if len(nodes) < fewest:
            nodes = self.clients.wait(grid, fewest, self.timeout, at_once=True)
        together, buffer = self.schedule.together(len(nodes))
        if not round and together >= FEWEST and self.server.safeguards.max_influence is not None:
            buffer = max(buffer, FEWEST)  # fewer cannot be compared
        turn = Turn((), (), frozenset(), (), 0.0, len(nodes))
        told = {"share": 1 / max(1, turn.clients), "begun": not self.server.is_new}
        self._buffers[round] = self.server.buffers
        starts, refused = set[int](), set[int]()
        while True:
            self._go_on(grid, round)
            for client in self._ready(round, together):
                self._start(grid, client, round, arrays, told)
                starts.add(client)
            late = time.monotonic() - began > self.timeout
            due = self._due(round, max(buffer, fewest), late)
            if due is not None:
                self._turn = turn._replace(starts=tuple(sorted(starts)), refused=frozenset(refused))
                outcomes = self._admit(round, due)
                if self._due(round, max(buffer, fewest), late) is not None:
                    return outcomes
            if not self._hear(grid, round, refused):
                time.sleep(roster.POLL_SECONDS)
            self.clients.look(grid, self.timeout)

    def _admit(self, round: int, due: list[int]) -> list[ClientOutcome]:
        """Let the server admit these clients, or note their failures."""
        assert self._turn is not None
        now = time.monotonic() - self._begin
        arrivals = tuple(Arrival(now, client, self._heard[client].started) for client in due)
        waiting = tuple(Arrival(now, job.client, job.started) for job in self._jobs.values())
        self._turn = turn = self._turn._replace(arrivals=arrivals, waiting=waiting, time=now)
        self.server.begin(RoundPlan(round, turn.starts, clients=turn.clients, turn=turn).heard)
        heard = [self._heard[client].message for client in due]
        self.server.hear({each.client: each.num_examples for each in heard if isinstance(each, ClientUpdate)})
        outcomes = [self.server.admit(*self._heard[client]) for client in due]
        for each in outcomes:
            if each.error is not None:
                failure = ClientFailure(each.client, each.error)
                self._heard[each.client] = self._heard[each.client]._replace(message=failure)
        return outcomes

    def end(self, outcomes: Collection[ClientOutcome]) -> None:
        """Add the fusion to the history and the log, and forget versions that no message will need."""
        turn, self._turn, server = self._turn, None, self.server
        if turn is None:
            return
        server.history[-1].update(turn.figures(server.rounds - 1))
        heard = {arrival.client: arrival.started for arrival in turn.arrivals}
        good = [each.client for each in outcomes if each.error is None]
        arrived = tuple((client, heard.pop(client)) for client in good)
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            fusion = Fusion(turn.clients, turn.starts, arrived, tuple(sorted(heard)))
            with self._log.open("a") as file:
                file.write(fusion.line(server.rounds))
        self._heard = {client: each for client, each in self._heard.items() if client not in {*good, *heard}}
        needed = set(self._under_way().values())
        self._buffers = {version: each for version, each in self._buffers.items() if version in needed}
        assert server.versions is not None
        server.versions.forget(needed)

    def state_dict(self) -> dict[str, Any]:
        """Return the clients at work, client → version, and the global buffers of these versions."""
        return {"clients": self._under_way(), "buffers": dict(self._buffers)}

    def _under_way(self) -> dict[int, int]:
        held = {client: each.started for client, each in self._heard.items()}
        return {job.client: job.started for job in self._waited(self.server.rounds)} | held | self._resumed

    def _go_on(self, grid: Grid, round: int) -> None:
        """Ask clients again that were at work when the run ended, from their versions, if they connect in time."""
        assert self.server.versions is not None
        late = time.monotonic() - self._begin > self.timeout
        for client, started in list(self._resumed.items()):
            if late or self.schedule.is_too_late(started, round):
                del self._resumed[client]
            elif client in self.clients.nodes:
                del self._resumed[client]
                shared = self.server.versions.begun[started]
                told = {"share": shared.share, "begun": not shared.is_new}
                self._start(grid, client, started, to_arrays(shared.posterior, self._buffers[started]), told)

    def _ready(self, round: int, together: int) -> list[int]:
        """Return the clients that begin now: drawn from the free ones, until enough are at work."""
        known = list(self.clients.nodes)
        if together < len(known):
            draws = generator(self.strategy.seed, "cohort", round)
            known = [known[place] for place in torch.randperm(len(known), generator=draws).tolist()]
        free = [client for client in known if client not in self.busy and client not in self._heard]
        return free[: max(0, together - len(self._waited(round)))]

    def _start(self, grid: Grid, client: int, started: int, arrays: ArrayRecord, told: Mapping[str, Any]) -> None:
        node = self.clients.nodes[client]
        question = self.strategy._ask(node, client, started + 1, arrays, told)
        sent = list(filter(None, grid.push_messages([question])))
        if sent:
            self._jobs[sent[0]] = Job(client, started, node, time.monotonic())
        else:
            failure = FusionError(f"client {client}: Flower does not take the message to it")
            self._heard[client] = Heard(ClientFailure(client, failure), started)

    def _hear(self, grid: Grid, round: int, refused: set[int]) -> bool:
        """Take the messages that have arrived. Return False if there are none."""
        replies = {}
        for reply in grid.pull_messages(list(self._jobs)) if self._jobs else ():
            identity = reply.metadata.reply_to_message_id
            job = self._jobs.get(identity)
            if job is not None and (reply.has_error() or reply.metadata.src_node_id == job.node):
                replies[identity] = reply
        for identity in sorted(replies, key=lambda each: self._jobs[each].client):  # arrivals at once go by number
            client, started, *_ = self._jobs.pop(identity)
            if self.schedule.is_too_late(started, round):
                refused.add(client)
                late = FusionError(
                    f"client {client}: its message comes {round - started} versions of the global posterior late, more "
                    "than max_staleness allows"
                )
                self._heard[client] = Heard(ClientFailure(client, late), started)
            else:
                self._heard[client] = Heard(self.strategy._read(replies[identity], client, started + 1), started)
        for identity, job in list(self._jobs.items()):
            if time.monotonic() - job.since > self.timeout:  # the message of a node that has died never comes
                silence = FusionError(f"client {job.client}: no reply within {self.timeout:g} s")
                self._heard[self._jobs.pop(identity).client] = Heard(ClientFailure(job.client, silence), job.started)
        return bool(replies)

    def _waited(self, round: int) -> list[Job]:
        return [job for job in self._jobs.values() if not self.schedule.is_too_late(job.started, round)]

    def _due(self, round: int, buffer: int, late: bool) -> list[int] | None:
        """Return the clients to fuse now, in the order of arrival. None to wait for more."""
        valid = sum(isinstance(each.message, ClientUpdate) for each in self._heard.values())
        ends = not self._waited(round) and (late or bool(self._heard))
        return list(self._heard) if valid >= buffer or ends else None


def check_schedule(schedule: Asynchronous, min_clients: int) -> None:
    """Raise FederationError for a schedule of one process, or one with too few messages for any fusion."""
    if schedule.replay is not None:
        raise FederationError("replay= repeats a log in one process: give it to FederatedBayes(schedule=...)")
    if schedule.delays != Delays():
        raise FederationError("delays= are those of a simulation: over a network the real ones count; leave them out")
    if schedule.buffer is not None and schedule.buffer < min_clients:
        why = f"buffer={schedule.buffer} with min_clients={min_clients}"
        raise FederationError(f"{why}: every fusion would have too few messages")
