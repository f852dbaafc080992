r"""Guard of a round: no single client moves the global posterior much further than the others do.

The sizes of a client's update against the round's global posterior :math:`N(\mu_o, \sigma_o^2)` are, for each tensor:

* shift :math:`\|\mu - \mu_o\|`, by which averages move;
* pull :math:`\|(\mu - \mu_o)\,\sigma_o^2 / \sigma^2\|`, by which products of densities move;
* sureness :math:`\max \sigma_o^2 / \sigma^2` and vagueness :math:`\max \sigma^2 / \sigma_o^2` over the entries.

A size is too large if it exceeds a multiple of the clients' weighted median. Where a round has few clients, no tensor
may be longer than a multiple of the second longest whole update, in this round or in those before. The guard streams.

Without rounds few messages are compared with the last ones of all other clients, and all messages of a client together
have two limits, and one more whenever the median client has been heard, of lengths, and of logarithms of factors. After
L times of the median client, client k has the part :math:`u_k = \min(1, 2 + L - s_k) \ge 0` of its limit left, with
:math:`s_k \leftarrow \max(s_k, L) + u_k \times \text{length} / \text{limit}`: what it has missed it cannot make up for.
A client that was not heard for 1 / (1 − DECAY) rounds' worth of messages is forgotten, so that the others go on.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, check_at_least, check_number, listed
from lightning_fedbayes.core.messages import ClientUpdate
from lightning_fedbayes.core.posterior import PIECE, GaussianPosterior, flatten, is_dense, is_zero
from lightning_fedbayes.fusion.accumulator import check_structure
from lightning_fedbayes.methods.method import joined, split
from lightning_fedbayes.server.answers import DECAY, FEWEST, KINDS, entries_of, opposed_of, remembered


@dataclass(frozen=True)
class Safeguards:
    """Bounds of a server: when a round counts, and how much one client may do in it.

    Raises FederationError if an argument is out of range.

    Args:
        min_clients: quorum: a round with fewer valid updates fails and leaves the global posterior as it was. A round
            that the rule cannot fuse fails, too.
        max_failed_rounds: after this many failed rounds in a row the run stops with an error; without rounds, after as
            many messages as they have clients.
        max_influence: a client's update, tensor by tensor, counts as at most this multiple of the median client's, in
            its length and in how sure or vague it is. The guard clips what is beyond and refuses impossible variances.
            Of sites it bounds the whole site, and its change; without rounds, all messages in the time of the median
            client's one. With weighting="train_size" its number of examples counts as at most this multiple, too. None:
            no guard. See "Clients that cannot be trusted" in the documentation.
    """

    min_clients: int = 1
    max_failed_rounds: int = 3
    max_influence: float | None = 2.0

    def __post_init__(self) -> None:
        check_at_least("min_clients", self.min_clients, 1)
        check_at_least("max_failed_rounds", self.max_failed_rounds, 1)
        if self.max_influence is not None:
            why = "a client may count as this multiple of the median client; None turns the guard off"
            check_number("max_influence", self.max_influence, "[1, inf)", why=why)


USUAL = Safeguards()
MOST_CHANGE = 1e12
"""Factor by which a variance may change in one round, for σ a million. Honest clients have reached 2.6e8 (initial σ
1e-4, Adam at rate 0.1, 20 local epochs)."""
FEW = 2.0
"""Factor by which the bound is wider with fewer clients."""
RANKED = 3
"""Least number of clients for which the second largest size bounds the largest."""
MOST_MOVE = 1e15
"""Multiple of one plus the largest global mean that the root mean square of a tensor's moves may reach in a round."""
REMEDY = "training, or turn the guard off by safeguards=fb.Safeguards(max_influence=None)"
"""End of messages about updates that are refused."""
OPPOSES = f"client {{}}: it answers the model as if it sent the opposite of its result. Check its {REMEDY}"
Heard = dict[str, dict[int, Tensor]]  # kind → client → answer
MOST_MEASURED = 2**16
"""Entries of all clients that are measured at once: more would not stay in the cache."""


def probabilistic_names(posterior: GaussianPosterior) -> frozenset[str]:
    """Return the names of the tensors that have a variance."""
    return frozenset(name for name, value in posterior.variance.items() if not is_zero(value) and bool(value.any()))


@dataclass(frozen=True)
class Limits:
    """The largest ``sizes`` of an update that are allowed to a client of mean ``weight``, shape (4, tensors)."""

    sizes: Tensor
    weight: float

    def of(self, clients: Mapping[int, float]) -> Tensor:
        """Return limits, shape (clients, kinds, tensors). Size times weight counts: a light client may be larger."""
        factors = [max(1.0, self.weight / weight) if weight > 0 else math.inf for weight in clients.values()]
        limits = self.sizes * torch.tensor(factors, dtype=torch.float64)[:, None, None]
        return limits.nan_to_num_(nan=math.inf, posinf=math.inf)


class Guard:
    """Measures updates against the global posterior of a round, refuses impossible variances and clips sizes.

    ``heard`` are answers of this round, see :mod:`~lightning_fedbayes.server.answers`: kind → client → answer.
    ``probabilistic`` names the tensors to which the network gives a variance. ``memory`` is the round before's: its
    "sizes" are usual lengths of whole updates, (kinds of lengths,). ``is_alone``: there is a single client. ``part`` is
    the share of all clients in a fusion without rounds. ``counted`` is what a client has to keep. ``most_examples`` is
    what a client counts as at most.
    """

    num_lengths: ClassVar[int] = 2
    """Number of kinds of sizes that are lengths. They come first."""
    tells: bool = False
    """True if clients keep what is :attr:`counted` of them."""
    adding: ClassVar[tuple[slice, slice]] = slice(2), slice(2, 4)
    """Kinds of sizes that add up from message to message, and kinds that multiply."""
    leaves_out: ClassVar[bool] = False
    """True if clients beyond the limits are left out. Otherwise they count within them."""

    def __init__(
        self,
        previous: GaussianPosterior,
        probabilistic: Collection[str],
        max_influence: float,
        memory: Mapping[str, Tensor] = MappingProxyType({}),
        is_alone: bool = False,
        part: float = 1.0,
    ) -> None:
        self.previous, self.probabilistic = previous, probabilistic
        self.max_influence, self.part = max_influence, part
        self.counted: dict[int, dict[str, Tensor]] = {}
        self.most_examples = math.inf
        self._deterministic = [name for name in previous.names if name not in probabilistic]
        self._lengths = [value.numel() for value in previous.mean.values()]
        self._numels = torch.tensor([n for n in self._lengths if n], dtype=torch.float64)
        past = memory.get("sizes")
        self.memory = dict(memory) if past is None or len(past) == self.num_lengths else {}  # of the same guard
        clients, paces = (self.memory.get(name, torch.empty(0)).tolist() for name in ("clients", "paces"))
        self._paces: dict[int, list[float]] = dict(zip(clients, paces))  # times heard, lengths used, rounds since then
        times = sorted(each[0] for each in paces)
        self._laps = times[len(times) // 2] if times else 0.0  # the faster one of the middle
        self._left = {k: min(1.0, max(1e-3, 2 + self._laps - far)) for k, (_, far, _) in self._paces.items()}
        self.heard: Heard = {KINDS[0]: {}}
        self._opposed = opposed_of(self.memory) if f"{KINDS[0]} known" in self.memory else set[int]()
        self._model = GaussianPosterior({}, {}), torch.empty(0)
        self.is_alone = is_alone
        self.is_deterministic = previous.is_point_mass
        if self.is_deterministic:
            return
        self._mean, variance = previous.flatten()
        known = variance > 0
        if self._deterministic:
            random = [torch.full((n,), name in probabilistic) for name, n in zip(previous.names, self._lengths)]
            known &= torch.cat(random).to(variance.device)
        self.is_deterministic = not bool(known.any())
        self._unknown = None if bool(known.all()) else ~known
        self._variance = torch.where(known, variance, 1.0)

    @cached_property
    def _mean(self) -> Tensor:
        """The means of a deterministic network as one vector, which a large one seldom needs."""
        return self.previous.flatten()[0]

    def hear(self, said: Mapping[int, int], is_last: bool = False) -> None:
        """Bound numbers of examples by the lower median of what the round's clients have ``said``, client → number.

        Without rounds, or of few clients, by that of what all have said last. Fewer than :data:`FEWEST` have no bound.
        The last numbers of a round are noted for later ones.
        """
        now = torch.tensor(sorted(said), dtype=torch.int64)
        claims = torch.tensor([said[client] for client in sorted(said)], dtype=torch.float64)
        known = self.memory.get("claimants", now[:0])
        silent = torch.searchsorted(now, known) == torch.searchsorted(now, known, right=True)
        before = self.memory.get("claims", claims[:0])[silent]
        everyone = torch.cat([before, claims])
        numbers = claims if self.part == 1 and len(said) >= FEWEST else everyone
        median = float(numbers.median()) if len(numbers) >= FEWEST else 0.0
        self.most_examples = self.max_influence * median if median > 0 else math.inf
        self.memory |= {"claimants": torch.cat([known[silent], now]), "claims": everyone} if is_last else {}

    def watch(self, sent: ClientUpdate, started: GaussianPosterior) -> None:
        """Note how a client answers the model that it ``started`` from. Raise FusionError if it opposes the others."""
        client, names = sent.client, started.names
        check_structure(sent.posterior, started, f"client {client}")
        if self._model[0] is not started:
            self._model = started, entries_of(started.mean, names)
        move = entries_of(sent.posterior.mean, names) - self._model[1]
        self.heard[KINDS[0]][client] = torch.stack([move, self._model[1]]).float()
        if client in self._opposed:
            raise FusionError(OPPOSES.format(client))

    def compare(self, answers: Sequence[Heard]) -> dict[int, str]:
        """Note the answers that each process has :attr:`heard`. Return who opposes the others by them: client → why."""
        for kind in self.heard:
            heard = {client: pair for each in answers for client, pair in each[kind].items()}
            self.memory |= remembered(kind, self.memory, heard, self.max_influence) if heard else {}
        return {client: OPPOSES.format(client) for client in opposed_of(self.memory) - self._opposed}

    def check(self, posterior: GaussianPosterior, who: str) -> None:
        """Raise FusionError for variances of client ``who`` that cannot come from training.

        Such are one where the network has none, a 0 where it has one, and a change by more than :data:`MOST_CHANGE`.
        """
        for name in self._deterministic if not posterior.is_point_mass else ():
            value = posterior.variance[name]
            if not is_zero(value) and bool(value.any()):
                what = f"'{name}' has a variance (maximum {float(value.max()):.3g}), but it is deterministic in the"
                raise FusionError(f"{who}: {what} global model; all clients must train the same network")
        if self.is_deterministic:
            return
        _, variance = posterior.flatten()
        ratio = self._ratio(variance)
        least, most = ratio.aminmax()
        if float(least) * MOST_CHANGE >= 1 and float(most) <= MOST_CHANGE:
            return
        parts = zip(self.previous.names, *(each.split(self._lengths) for each in (ratio, variance, self._variance)))
        for name, change, sent, before in parts:
            far = (change * MOST_CHANGE < 1) | (change > MOST_CHANGE)
            if bool(far.any()):
                was = f"{float(sent[far][0]):.3g}, where the global posterior has {float(before[far][0]):.3g}"
                most = f"it may change by a factor of {MOST_CHANGE:g} in a round. Check the client's {REMEDY}"
                raise FusionError(f"{who}: a variance of '{name}' is {was}; {most}")

    def sizes_of(self, updates: Sequence[ClientUpdate], *, by_pieces: bool = False) -> Tensor:
        """Return :meth:`sizes` of ``updates``. ``by_pieces`` without copying any client of a deterministic network."""
        if by_pieces:
            return self.shifts([update.posterior for update in updates])
        return self.sizes([update.posterior.flatten() for update in updates])

    def absurd(self, updates: Sequence[ClientUpdate], sizes: Tensor) -> Tensor:
        """Return which of the ``updates``, of these ``sizes``, cannot come from training, shape (clients,)."""
        return (sizes[:, 0] > self._most_move * self._numels.sqrt()).any(1)

    @cached_property
    def _most_move(self) -> float:
        """The largest root mean square of a tensor's moves."""
        largest = (float(value.abs().max()) for value in self.previous.mean.values() if value.numel())
        return MOST_MOVE * (1 + max(largest, default=0.0))

    def sizes(self, clients: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return shift, pull, sureness and vagueness by client and tensor, in float64 on the CPU, of flat moments."""
        at_once = max(1, MOST_MEASURED // max(1, sum(self._lengths)))
        found = []
        for start in range(0, len(clients), at_once):
            several = at_once > 1 and len(clients) > start + 1  # a single one is not copied
            rows = [torch.stack(each) if several else each[0][None] for each in zip(*clients[start : start + at_once])]
            if self.is_deterministic:  # tensor by tensor: a vector of all differences would not stay in the cache
                pairs = zip(self._parts(rows[0]), self._parts(self._mean[None]))
                shift = torch.stack([torch.linalg.vector_norm(part - before, dim=1) for part, before in pairs], 1)
                found.append(torch.stack([shift, shift, torch.ones_like(shift), torch.ones_like(shift)], 1))
                continue
            difference = rows[0] - self._mean
            shift = self._norms(difference)
            ratio = self._ratio(rows[1])
            parts = self._parts(ratio)
            least, most = (torch.stack([extreme(part, 1) for part in parts], 1) for extreme in (torch.amin, torch.amax))
            found.append(torch.stack([shift, self._norms(difference.div_(ratio)), 1 / least, most], 1))
        return torch.cat(found).cpu()

    def shifts(self, clients: Sequence[GaussianPosterior]) -> Tensor:
        """Return :meth:`sizes` of clients of a deterministic network, block by block, without copying any client."""
        lengths = []
        for name, value in self.previous.mean.items():
            parts = [each.mean[name].detach().reshape(-1).split(PIECE) for each in (self.previous, *clients)]
            dtype = torch.promote_types(value.dtype, torch.float32)  # a difference is exact to half a unit there
            squares = []
            for before, *blocks in zip(*parts) if value.numel() else ():
                steps = [flatten([block.to(dtype) - before.to(dtype)], torch.float64) for block in blocks]
                squares.append(torch.stack([torch.dot(step, step) for step in steps]))
            if squares:
                lengths.append(sum(squares[1:], squares[0]).sqrt())
        shift = torch.stack(lengths, 1)
        return torch.stack([shift, shift, torch.ones_like(shift), torch.ones_like(shift)], 1).cpu()

    def limits(self, sizes: Tensor, weights: Sequence[float], clients: Sequence[int] = ()) -> Limits:
        r"""Return the largest sizes that are allowed: ``max_influence`` times the weighted medians over the clients.

        Lengths of a tensor of n entries may be :math:`1 + 2 / \sqrt n` times as large, since short vectors scatter. A
        tensor that most clients do not move may move as far per entry as the whole network. Of fewer than
        :data:`FEWEST` clients only each tensor's lengths are bounded: by :data:`FEW` times ``max_influence`` times the
        second longest whole update of three or more, or the usual one, if longer. Sizes: (clients, 4, tensors).
        """
        weight = sum(weights) / len(weights)
        compared = self._with_others(sizes, clients)[0] if self.part != 1 and len(sizes) < FEWEST else sizes
        if len(compared) > len(sizes):
            sizes, weights = compared, [1.0] * len(compared)
        if len(sizes) < FEWEST:
            limits = torch.full_like(sizes[0], math.inf)
            usual = self._usual(sizes) if len(sizes) >= RANKED else limits.new_zeros(self.num_lengths)
            usual = torch.maximum(usual, self.memory.get("sizes", usual))
            bounds = torch.where((usual > 0) & (not self.is_alone), FEW * self.max_influence * usual, math.inf)
            limits[: self.num_lengths] = bounds[:, None]
            return Limits(limits, weight)
        medians = weighted_median(sizes, weights)
        shifts = medians[: self.num_lengths]
        if not bool(shifts.all()):
            norms = torch.linalg.vector_norm(sizes[:, : self.num_lengths], dim=2)
            whole = weighted_median(norms, weights)[:, None]
            typical = torch.where(whole > 0, whole * (self._numels / self._numels.sum()).sqrt(), math.inf)
            torch.where(shifts > 0, shifts, typical, out=shifts)
        shifts *= 1 + 2 / self._numels.sqrt()
        return Limits(self.max_influence * medians, weight)

    def left_of(self, limits: Tensor, clients: Iterable[int]) -> Tensor:
        """Return what is left of the limits of clients, shape (clients, kinds, tensors), without rounds."""
        left = torch.tensor([self._left.get(client, 1.0) for client in clients], dtype=torch.float64)
        limits[:, self.adding[0]] *= left[:, None, None]
        limits[:, self.adding[1]] **= left[:, None, None]
        return limits

    def remember(self, sizes: Tensor, limits: Tensor, clients: Sequence[int]) -> None:
        """Remember the sizes of a round's clients, as they count, as usual for later rounds of few clients."""
        usual = self._usual(sizes if self.part == 1 else self._remember_clients(sizes, limits, clients))
        self.memory["sizes"] = torch.maximum(usual, DECAY**self.part * self.memory.get("sizes", usual))

    def _remember_clients(self, sizes: Tensor, limits: Tensor, clients: Sequence[int]) -> Tensor:
        """Remember, without rounds, how often and how far clients went. Return sizes with the last ones of others."""
        compared, names = self._with_others(sizes, clients)
        amounts = [(sizes / limits)[:, self.adding[0]], (sizes.log() / limits.log())[:, self.adding[1]]]
        used = torch.cat(amounts, 1).nan_to_num(0.0).clamp(0, 1).flatten(1).amax(1).tolist()
        paces = {client: [times, far, age + self.part] for client, (times, far, age) in self._paces.items()}
        for client, part in zip(clients, used, strict=True):
            times, far, _ = paces.get(client, [0.0] * 3)
            far = max(far, self._laps) + part * self._left.get(client, 1.0)
            paces[client] = [max(times + 1, self._laps), far, 0.0]
        rows = torch.tensor([paces[client] for client in names], dtype=torch.float64)
        recent = rows[:, 2] * (1 - DECAY) < 1
        self.memory.update(known=compared[recent], clients=torch.tensor(names)[recent], paces=rows[recent])
        return compared

    def _with_others(self, sizes: Tensor, clients: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Return sizes and clients with the last sizes of others, as far as they are known."""
        known, names = self.memory.get("known", sizes[:0]), self.memory.get("clients", torch.empty(0)).tolist()
        heard, is_same = set(clients), known.shape[1:] == sizes.shape[1:]  # else the network has gained parameters
        others = [row for row, client in enumerate(names) if is_same and client not in heard]
        return torch.cat([sizes, *(known[row][None] for row in others)]), [*clients, *(names[row] for row in others)]

    def _usual(self, sizes: Tensor) -> Tensor:
        """Return the second largest lengths of whole updates over the clients. The largest where there are too few."""
        whole = torch.linalg.vector_norm(sizes[:, : self.num_lengths], dim=2)
        return whole.topk(2, dim=0).values[1] if len(sizes) >= RANKED else whole.amax(0)

    def why(self, limits: Tensor, sizes: Tensor) -> str:
        """Return why a client is left out. Arguments as for :meth:`clip`."""
        return "it stands out"

    def part_of(self, limits: Tensor, sizes: Tensor) -> float:
        """Return the part of its weight that a client keeps. Arguments as for :meth:`clip`."""
        return 1.0

    def clipped(self, update: ClientUpdate, limits: Tensor, sizes: Tensor) -> ClientUpdate:
        """Return the part of a client's update that counts, within its limits. Arguments as for :meth:`clip`."""
        return changed(update, posterior=update.posterior.flattened(self.clip(update, limits, sizes)))

    def clip(self, update: ClientUpdate, limits: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance, (P,), float64, with sizes within a client's limits, variances first."""
        mean, variance = update.posterior.flatten()
        limits, sizes = limits.to(mean.device), sizes.to(mean.device)
        lengths = self._numels.to(mean.device, torch.int64)
        if bool((sizes[2:] > limits[2:]).any()):
            ratio = self._ratio(variance)
            least, most = (each.repeat_interleave(lengths) for each in (1 / limits[2], limits[3]))
            bounded = torch.minimum(torch.maximum(ratio, least), most)
            variance = torch.where(bounded == ratio, variance, self._variance * bounded)
            sizes = self.sizes([(mean, variance)])[0].to(mean.device)
        kept = torch.where(sizes > limits, limits / sizes, 1.0)[:2].amin(0).repeat_interleave(lengths)
        return torch.where(kept < 1, self._mean + kept * (mean - self._mean), mean), variance

    def _ratio(self, variance: Tensor) -> Tensor:
        """Return σ² / σ_o², a new vector. 1 where the network or the global posterior has no variance."""
        ratio = variance / self._variance
        return ratio if self._unknown is None else ratio.masked_fill_(self._unknown, 1.0)

    def _norms(self, rows: Tensor) -> Tensor:
        """Return the norms of each tensor's part of ``rows``, shape (clients, P) → (clients, tensors)."""
        return torch.stack([torch.linalg.vector_norm(part, dim=1) for part in self._parts(rows)], 1)

    def _parts(self, rows: Tensor) -> list[Tensor]:
        """Return each tensor's part of ``rows``, shape (clients, P). Empty tensors have none."""
        return [part for part in rows.split(self._lengths, 1) if part.shape[1]]


class TensorsGuard(Guard):
    """A guard that also bounds what a method sends with the posterior, as moves from 0, each tensor by its own median.

    ``sent`` is its form, by name, and ``per_example`` names what grows with a client's number of examples. If clients
    send changes of what they keep, ``counted_of`` gives what has been counted of a client, by the names that it keeps.
    What is bounded is then the sum, and the client keeps what is counted.
    """

    def __init__(
        self,
        *options: Any,
        sent: Mapping[str, Tensor],
        per_example: Collection[str],
        counted_of: Callable[[int], Mapping[str, Tensor]] | None = None,
    ) -> None:
        super().__init__(*options)
        self._counted_of = counted_of
        self.tells = counted_of is not None
        self._names = [name for name, value in sent.items() if value.numel()]
        self._per_example = torch.tensor([name in per_example for name in self._names])
        zero = GaussianPosterior.point_mass({name: torch.zeros_like(sent[name]) for name in self._names})
        past = {"sizes": self.memory["beside"]} if "beside" in self.memory else {}
        self._beside = Guard(zero, (), self.max_influence, past, *options[4:])
        own = {name: value.shape for name, value in self.previous.mean.items()}
        self._moved = [name for name, value in split(dict(sent))[1].items() if own.get(name) == value.shape]
        if self._moved and not self.tells:  # changes of what is kept are no answers to the model
            self.heard[KINDS[1]] = {}

    def watch(self, sent: ClientUpdate, started: GaussianPosterior) -> None:
        beside = {n: t for n, t in split(sent.buffers)[1].items() if is_dense(t) and t.is_floating_point()}
        fits = (name in beside and beside[name].shape == started.mean[name].shape for name in self._moved)
        if KINDS[1] in self.heard and all(fits):
            pair = entries_of(beside, self._moved), entries_of(started.mean, self._moved)
            self.heard[KINDS[1]][sent.client] = torch.stack(pair).float()
        super().watch(sent, started)

    def sizes_of(self, updates: Sequence[ClientUpdate], *, by_pieces: bool = False) -> Tensor:
        parts = [GaussianPosterior.point_mass(self._whole(each)) for each in updates]
        numbers = [min(max(1, each.num_examples), self.most_examples) for each in updates]
        examples = torch.tensor(numbers, dtype=torch.float64)
        beside = self._beside.shifts(parts)
        beside[:, :2] /= torch.where(self._per_example, examples[:, None, None], 1.0)
        return torch.cat([super().sizes_of(updates, by_pieces=by_pieces), beside], 2)

    def absurd(self, updates: Sequence[ClientUpdate], sizes: Tensor) -> Tensor:
        own, beside = self._split(sizes)
        return super().absurd(updates, own) | self._beside.absurd(updates, beside)

    def limits(self, sizes: Tensor, weights: Sequence[float], clients: Sequence[int] = ()) -> Limits:
        own, beside = self._split(sizes)
        found = [super().limits(own, weights, clients), self._beside.limits(beside, weights, clients)]
        return Limits(torch.cat([each.sizes for each in found], 1), found[0].weight)

    def remember(self, sizes: Tensor, limits: Tensor, clients: Sequence[int]) -> None:
        (own, beside), (limits, others) = self._split(sizes), self._split(limits)
        super().remember(own, limits, clients)
        self._beside.remember(beside, others, clients)
        self.memory["beside"] = self._beside.memory["sizes"]

    def clipped(self, update: ClientUpdate, limits: Tensor, sizes: Tensor) -> ClientUpdate:
        (own_limits, limits), (own, sizes) = self._split(limits), self._split(sizes)
        kept = torch.where(sizes > limits, limits / sizes, 1.0)[0].tolist()
        old, whole = self._old(update.client), self._whole(update)
        within = {name: whole[name] * part for name, part in zip(self._names, kept, strict=True)}
        if self.tells:
            self.counted[update.client] = split(within)[1]
        within |= {name: within[name] - old[name].to(whole[name]) for name in within.keys() & old.keys()}
        return super().clipped(changed(update, buffers={**update.buffers, **within}), own_limits, own)

    def _old(self, client: int) -> Mapping[str, Tensor]:
        """Return what has been counted of a client, by the names that travel."""
        return {} if self._counted_of is None else joined({}, self._counted_of(client))

    def _whole(self, update: ClientUpdate) -> dict[str, Tensor]:
        """Return what is bounded of a client, and note it as what the client keeps if nothing is clipped."""
        old, sent = self._old(update.client), {name: update.buffers[name] for name in self._names}
        whole = {name: value + old[name].to(value) if name in old else value for name, value in sent.items()}
        if self.tells:
            self.counted[update.client] = split(whole)[1]
        return whole

    def _split(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sizes of the posterior's tensors, and of the others."""
        width = len(self._numels)
        return sizes[..., :width], sizes[..., width:]


def told_bounded(bounded: Mapping[Any, str]) -> str:
    """Return a line about clients that count as fewer examples than they say: client → both numbers."""
    who = listed(f"client {client} {text}" for client, text in bounded.items())
    what = "a number of examples counts as at most max_influence times the median client's"
    trust = "weighting=lambda facts: [each.num_examples for each in facts], or fb.Safeguards(max_influence=None)"
    return f"{what}: {who}. To believe all numbers: {trust}"


def changed(update: ClientUpdate, **parts: Any) -> ClientUpdate:
    """Return a checked update with other parts of the same structure, without checking it again."""
    copy = object.__new__(ClientUpdate)
    vars(copy).update(vars(update), **parts)
    return copy


def weighted_median(values: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the lower weighted median over the first dimension.

    >>> weighted_median(torch.tensor([5.0, 1.0, 9.0]), [1, 1, 1])
    tensor(5.)
    >>> weighted_median(torch.tensor([5.0, 1.0, 9.0]), [1, 1, 2])
    tensor(5.)
    """
    shares = torch.as_tensor(weights, dtype=torch.float64)
    shares = shares / shares.sum() if float(shares.sum()) > 0 else torch.full_like(shares, 1 / len(shares))
    ordered, order = values.sort(0)
    below = (shares[order].cumsum(0) < 0.5 - 1e-12).sum(0, keepdim=True)
    return ordered.gather(0, below).squeeze(0)
