"""Federations without rounds: when clients start and messages arrive, in virtual time from the seed."""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import FederationError, is_number, is_whole, shown
from lightning_fedbayes.core.run_file import entry_of, line_of
from lightning_fedbayes.core.seeding import generator
from lightning_fedbayes.methods.late import FedBuff, Late


class Fusion(NamedTuple):
    """Fusion in the log, one line of JSON: ``began`` are the clients that began from the posterior before it.

    ``arrived`` are (client, version) of the admitted messages, in order, with version v the posterior after v fusions.
    ``refused`` failed, were too late or could not be used. Each of the ``clients`` has the share 1 / clients.
    """

    clients: int
    began: tuple[int, ...]
    arrived: tuple[tuple[int, int], ...]
    refused: tuple[int, ...] = ()

    def line(self, number: int) -> str:
        """Return the line of fusion ``number``, from 1."""
        return line_of({"fusion": number, **self._asdict()})


def read_arrivals(path: Path) -> list[Fusion]:
    """Return the fusions of a log, without a last line that was cut off. Raise FederationError for another file."""
    try:
        *lines, _ = path.read_text().split("\n")  # what follows the last line's end was cut off
        fusions, heard = [], dict[int, int]()
        for number, text in enumerate(lines, 1):
            line = entry_of(text)
            arrived = tuple((client, version) for client, version in line["arrived"])
            began, refused = tuple(line["began"]), tuple(line["refused"])
            numbers = (line["clients"], *began, *refused, *(each for pair in arrived for each in pair))
            late = all(version < number for _, version in arrived)
            if line["fusion"] != number or not late or not all(is_whole(each) and each >= 0 for each in numbers):
                raise ValueError(f"line {number} is no fusion {number}")
            for client, version in arrived:
                if version < heard.get(client, 0):
                    raise ValueError(f"in line {number} client {client} has begun before it was heard")
                heard[client] = number
            fusions.append(Fusion(line["clients"], began, arrived, refused))
    except (OSError, ValueError, TypeError, KeyError) as error:
        remedy = "give the file beside the checkpoint of a FusionStrategy(schedule=...)"
        raise FederationError(f"{path} is no log of arrivals: {type(error).__name__}: {error}; {remedy}") from error
    return fusions


@dataclass(frozen=True)
class Delays:
    r"""Time from a client's start to the arrival of its message, in units of virtual time.

    Client k takes :math:`t\,f_k\,e^{s z}` with z from N(0, 1), drawn from the seed for each of its jobs. Raises
    FederationError if an argument is out of range.

    Args:
        typical: t > 0, the median time of a client that is not slow.
        spread: s ≥ 0, standard deviation of the logarithm. 0: all jobs take as long.
        slow: client → its factor :math:`f_k` > 0.
        by_size: the time is proportional to a client's number of examples, t for the mean one.
        network: additional median time of a message on its way, with the same spread. 0 for none.
        away: (client, from, until): in that time it can neither start nor send. What it has finished arrives when it is
            back. ``inf``: never.
        trace: client → the times of its jobs in order, repeated after the last. It replaces everything above for these
            clients.
    """

    typical: float = 1.0
    spread: float = 0.5
    slow: Mapping[int, float] = field(default_factory=dict)
    by_size: bool = False
    network: float = 0.0
    away: Sequence[tuple[int, float, float]] = ()
    trace: Mapping[int, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        errors.check_number("typical", self.typical, "[0, inf)")
        errors.check_number("spread", self.spread, "[0, 5]", why="it is a standard deviation of logarithms")
        errors.check_number("network", self.network, "[0, inf)")
        for name, values in (("slow", self.slow), ("trace", self.trace)):
            errors.check_kind(name, values, Mapping, "give a dict client → value, such as {0: 10.0}")
            for client in values:
                errors.check_at_least(f"{name}: client", client, 0)
        for client, factor in self.slow.items():
            errors.check_number(f"slow[{client}]", factor, "(0, inf)", why="it multiplies the client's time")
        for client, times in self.trace.items():
            if not isinstance(times, Sequence) or not times or not all(is_number(each) and each >= 0 for each in times):
                raise FederationError(f"trace[{client}]={shown(times)}: give times of at least 0, at least one")
        errors.check_kind("away", self.away, Sequence, "give a list of (client, from, until), such as [(3, 2.0, 5.0)]")
        errors.check_flag("by_size", self.by_size)
        for each in self.away:
            whole = isinstance(each, Sequence) and len(each) == 3
            ends = whole and is_whole(each[0]) and is_number(each[1]) and (is_number(each[2]) or each[2] == math.inf)
            if not ends or not 0 <= each[1] < each[2]:
                raise FederationError(f"away: {shown(each)}: give (client, from, until) with 0 ≤ from < until")

    def duration(self, client: int, job: int, size: float, seed: int) -> float:
        """Return the time of job ``job``, from 0, of a client with ``size`` times the mean number of examples."""
        if client in self.trace:
            return float(self.trace[client][job % len(self.trace[client])])
        draws = torch.randn(2, generator=generator(seed, "delay", job, client), dtype=torch.float64)
        work, network = (math.exp(self.spread * float(z)) for z in draws)
        own = self.typical * self.slow.get(client, 1.0) * (size if self.by_size else 1.0)
        return own * work + self.network * network

    def back(self, client: int, time: float) -> float:
        """Return ``time`` if the client is there then, otherwise the time when it is back."""
        for _ in self.away:  # one absence may end inside another
            for number, start, until in self.away:
                if number == client and start <= time < until:
                    time = until
        return time


@dataclass(frozen=True)
class Asynchronous:
    r"""A federation without rounds: clients start and send whenever they are ready, in virtual time.

    ``concurrency`` clients train at once. As soon as ``buffer`` messages have arrived the server fuses them, and free
    clients start from the new global posterior without waiting for slow ones. An epoch of the Trainer is one such
    fusion. The first fusion waits for seven messages if as many clients train at once, since among fewer the server
    cannot find one that lies (``Safeguards(max_influence=None)`` does not wait). The method decides how a late message
    counts: a site replaces its old values exactly, and an average weighs by staleness (``late=``). Other methods are
    refused. With ``buffer`` and ``concurrency`` equal, and delays of 0, it is the federation by rounds, to the bit.
    Raises FederationError if an argument is out of range.

    Args:
        concurrency: clients that train at once, drawn from those that are free. None: all.
        buffer: messages that are fused at once. None: half as many as train at once, at least one.
        delays: how long clients take: a :class:`Delays`.
        late: how averages take late messages: :class:`~lightning_fedbayes.methods.FedBuff` or
            :class:`~lightning_fedbayes.methods.FedAsync`.
        max_staleness: a message is refused if its client began more than this many versions of the global posterior
            ago, and the server stops waiting for it. None: every message counts.
        replay: log of a federation over Flower. Clients start and messages arrive as it says, and the posterior is the
            same, bit for bit. Give its ``late``. The rest is in the log.

    When to use it: to see what stragglers, absences and staleness do to a federation before it runs over a network, and
    in :class:`~lightning_fedbayes.transport.flower.FusionStrategy`, so as not to wait for slow clients. Its delays are
    real, and ``concurrency=None`` means all connected clients. Source: Nguyen et al. 2022 (FedBuff), for concurrency
    and buffer.
    """

    concurrency: int | None = None
    buffer: int | None = None
    delays: Delays = field(default_factory=Delays)
    late: Late = field(default_factory=FedBuff)
    max_staleness: int | None = None
    replay: str | Path | None = None

    def __post_init__(self) -> None:
        if self.replay is not None:
            errors.check_path("replay", self.replay)
            if replace(self, replay=None, late=FedBuff()) != Asynchronous():
                raise FederationError("replay= says who starts and whose messages arrive: give late= alone beside it")
        if self.buffer is not None:
            errors.check_at_least("buffer", self.buffer, 1)
        errors.check_kind("delays", self.delays, Delays, "give fb.Delays(...)")
        errors.check_kind("late", self.late, Late, "give fb.methods.FedBuff() or fb.methods.FedAsync()")
        if self.max_staleness is not None:
            errors.check_at_least("max_staleness", self.max_staleness, 0)
        if self.concurrency is not None:
            errors.check_at_least("concurrency", self.concurrency, 1)
            if self.buffer is not None and self.buffer > self.concurrency:
                why = "no more messages can arrive than clients train at once; take a smaller buffer"
                raise FederationError(f"buffer={self.buffer} with concurrency={self.concurrency}: {why}")

    def together(self, clients: int) -> tuple[int, int]:
        """Return concurrency and buffer in a federation of so many clients."""
        concurrency = clients if self.concurrency is None else self.concurrency
        return concurrency, max(1, concurrency // 2) if self.buffer is None else self.buffer

    def is_too_late(self, started: int, round: int) -> bool:
        """Return True if the message of a client that began in round ``started`` is refused in ``round``."""
        return self.max_staleness is not None and round - started > self.max_staleness


class Arrival(NamedTuple):
    """Message that arrives: its time and client, and the round (version of the global posterior) that it began in."""

    time: float
    client: int
    started: int


class Turn(NamedTuple):
    """Course of a federation between two fusions, with ``clients`` clients at the end (0: all).

    Of the ``starts``, ascending, those that never answer are left out. ``arrivals`` come in their order, with the
    ``refused``, which are too late. Messages ``waiting`` at the virtual ``time`` of the end have the next one first.
    """

    starts: tuple[int, ...]
    arrivals: tuple[Arrival, ...]
    refused: frozenset[int]
    waiting: tuple[Arrival, ...]
    time: float
    clients: int = 0

    def figures(self, round: int) -> dict[str, float]:
        """Return virtual time, the staleness of what counts, and what is under way at the end, for the history."""
        late = [round - each.started for each in self.arrivals if each.client not in self.refused]
        return {
            "schedule/time": self.time,
            "schedule/staleness": sum(late) / max(1, len(late)),
            "schedule/largest_staleness": float(max(late, default=0)),
            "schedule/under_way": float(len(self.waiting)),
            "schedule/oldest_under_way": float(max((round + 1 - each.started for each in self.waiting), default=0)),
        }


ENDED = Turn((), (), frozenset(), (), math.inf)
"""Turn after the last one of a log, with which no round can begin."""


def recorded(fusions: Sequence[Fusion], clients: int | None = None) -> list[Turn]:
    """Return the turns of a log of at most so many ``clients``, without clients that begin and are never heard."""
    starts = [set[int]() for _ in fusions]
    for fusion in fusions:
        for client, version in fusion.arrived:
            starts[version].add(client)
    most = max((client for each in starts for client in each), default=0)
    if clients is not None and most >= clients:
        raise FederationError(f"replay= has a client {most}, but there are {clients} clients, from 0")
    turns = []
    for number, (begin, fusion) in enumerate(zip(starts, fusions)):
        arrivals = tuple(Arrival(float(i), *each) for i, each in enumerate(fusion.arrived))
        turns.append(Turn(tuple(sorted(begin)), arrivals, frozenset(), (), float(number), fusion.clients))
    return turns


class Timeline:
    """Course of a federation without rounds, by its schedule, the clients' sizes and the seed.

    A fusion counts ``min_clients`` messages or more, the ``first`` one so many. At most ``most`` clients train at once.
    """

    def __init__(
        self,
        schedule: Asynchronous,
        sizes: Sequence[int],
        seed: int,
        min_clients: int = 1,
        first: int = 0,
        most: int | None = None,
    ) -> None:
        clients = len(sizes)
        self._recorded = None if schedule.replay is None else recorded(read_arrivals(Path(schedule.replay)), clients)
        together, buffer = schedule.together(clients)
        named = {*schedule.delays.slow, *schedule.delays.trace, *(client for client, *_ in schedule.delays.away)}
        if together > clients or buffer > clients:
            name = "concurrency" if together > clients else "buffer"
            raise FederationError(f"{name}={getattr(schedule, name)}, but there are {clients} clients: give no more")
        if buffer < min_clients and self._recorded is None:
            why = "every fusion of schedule= would have too few messages; take a larger buffer"
            raise FederationError(f"min_clients={min_clients} with a buffer of {buffer}: {why}")
        if wrong := [client for client in named if client >= clients]:
            raise FederationError(f"delays= names client {wrong[0]}, but there are {clients} clients, from 0")
        self.schedule = schedule
        self.concurrency = min(together, most or together)
        self.buffer = min(buffer, self.concurrency)
        self._first = max(self.buffer, first) if first <= self.concurrency else self.buffer
        self._sizes, self._mean, self._seed = sizes, sum(sizes) / clients, seed
        self._begin()

    def _begin(self) -> None:
        self._round, self._last, self._time = 0, None, 0.0
        self._under_way: list[Arrival] = []  # a heap
        self._busy: dict[int, int] = {}  # client that trains or sends → the version that it started from
        self._jobs = [0] * len(self._sizes)

    def turn(self, round: int) -> Turn:
        """Return turn ``round``, from 0. Raise FederationError if no message is under way and no client can start."""
        if self._recorded is not None:
            return self._recorded[round] if round < len(self._recorded) else ENDED
        if round < self._round - 1:
            self._begin()
        while self._last is None or self._round <= round:
            self._last = self._next(self._round)
            self._round += 1
        return self._last

    def _next(self, round: int) -> Turn:
        heard = set[int]()
        starts, arrivals, refused = self._fill(round, heard), list[Arrival](), set[int]()
        while True:
            if not self._under_way or self._under_way[0].time > self._time:  # those that come at once are heard at once
                starts |= self._fill(round, heard | refused)
            if not self._under_way or math.isinf(self._under_way[0].time):
                what = f"after {round} rounds of schedule= no message is under way any more, and no client can start"
                remedy = "Give max_staleness=, a larger concurrency, or fewer rounds"
                raise FederationError(f"{what}: {len(self._busy)} clients never come back. {remedy}")
            arrival = heapq.heappop(self._under_way)
            self._time = max(self._time, arrival.time)
            self._busy.pop(arrival.client)
            arrivals.append(arrival)
            if self.schedule.is_too_late(arrival.started, round):
                refused.add(arrival.client)
                continue
            heard.add(arrival.client)
            if len(heard) == (self.buffer if round else self._first):
                break
        never = {each.client for each in self._under_way if math.isinf(each.time)}
        waiting = tuple(sorted(self._under_way))
        return Turn(tuple(sorted(starts - never)), tuple(arrivals), frozenset(refused), waiting, self._time)

    def _fill(self, round: int, heard: set[int]) -> set[int]:
        """Let free clients start, drawn as a cohort is. Those ``heard`` wait: the posterior is still the same."""
        waited_for = sum(not self.schedule.is_too_late(started, round) for started in self._busy.values())
        free = self.concurrency - waited_for
        delays, chosen = self.schedule.delays, set[int]()
        order = range(len(self._sizes))
        if free > 0 and self.concurrency < len(self._sizes):
            order = torch.randperm(len(self._sizes), generator=generator(self._seed, "cohort", round)).tolist()
        while free > 0:
            ready = [c for c in order if c not in self._busy and c not in heard]
            here = [client for client in ready if delays.back(client, self._time) == self._time]
            for client in here[:free]:
                size = self._sizes[client] / self._mean
                spent = delays.duration(client, self._jobs[client], size, self._seed)
                heapq.heappush(self._under_way, Arrival(delays.back(client, self._time + spent), client, round))
                self._busy[client] = round
                self._jobs[client] += 1
                chosen.add(client)
            if self._under_way or not ready or here:
                return chosen
            self._time = min(delays.back(client, self._time) for client in ready)  # nobody is there: wait for the first
            if math.isinf(self._time):
                return chosen
        return chosen
