r"""Guard of a round of sites: no client's site is much larger than the others', and none moves the means much more.

With the global posterior :math:`N(m, 1/\Lambda)`, the sizes of a message are, for every tensor and for all together,

* move :math:`\|(\theta_k - m) \Lambda^{1/2}\|`, in standard deviations;
* gradient :math:`\|g_k \Lambda^{-1/2}\|` and precision :math:`\|\Lambda_k / \Lambda\|_1` of its whole site.

A size is bounded by b, ``max_influence``, times the median of the round's clients, or, where they are few, of earlier
rounds, which fade. The median is of sizes over the root of the client's examples, since usual sizes are noise. The size
of one tensor may be :data:`FEW` times as large, and so may precisions, which honest unlike clients have. The bound of a
client with more examples than the median one grows with their number, since what is unlike others adds up. Of a move or
a gradient that is s times as large as its bound, :math:`1 / s^3` counts: an honest client that is somewhat beyond
arrives some rounds later, and one that pushes on against the others, so that their gradients grow, hardly counts. A
precision beyond its bound is scaled back to it, and is at least 0. Deterministic parameters have width 1.

A client that sends the opposite of its result is found by its direction, not its size: control variates correct local
training, so that every honest client moves down the gradient c of all data, whatever its data are. In round r let
:math:`a_k` be the cosine of a client's move and :math:`-c / \Lambda`, in standard deviations, m the median over K
clients, d the way that the median client goes down, m times its move, and s how far from m the furthest of K is by
chance: of K normal numbers of which half are as near as half of the :math:`a_k`. From its third message on a client is
left out, and half of its site is dropped in every round, as long as

.. math:: \sum_r d_r a_{kr} < \frac{\sum_r d_r m_r}{2 b} \quad\text{and}\quad
          \sum_r d_r (m_r - a_{kr}) > b \sum_r |d_r| s_r

that is, it goes less than a part of the others' way, and is further behind than by chance. Where moves are noise d is
small, and the sums do not change.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.messages import ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.methods.method import joined, split
from lightning_fedbayes.methods.sites import MEMORY, gaussian_names
from lightning_fedbayes.server.guard import DECAY, FEW, FEWEST, MOST_MOVE, Guard, Limits, changed

Counted = Callable[[int], Mapping[str, Tensor]]
BEYOND = 3
"""Power of bound over size by which a move or a gradient counts that is beyond."""
SETTLED = 2
"""First messages of a client that are not compared: it trains without a control variate, then with its first."""
AGAINST = 4
"""Row of the sizes that has the cosine of a client's move and the gradient of all data."""


@dataclass(frozen=True)
class SiteLimits(Limits):
    """The largest sizes that are allowed: more to a client of many examples, none to one that opposes the others."""

    examples_of: Mapping[int, float]
    opposes: Callable[[int], bool]

    def of(self, clients: Mapping[int, float]) -> Tensor:
        """Return the limits of clients, client → weight, shape (clients, 5, tensors + 1)."""
        credits = [max(1.0, self.examples_of[client] / self.weight) for client in clients]
        factors = torch.tensor(credits, dtype=torch.float64)
        limits = self.sizes * torch.stack([*[factors] * 3, *[torch.ones_like(factors)] * 2], 1)[:, :, None]
        limits[torch.tensor([self.opposes(client) for client in clients], dtype=torch.bool), AGAINST] = -torch.inf
        return limits


class SiteGuard(Guard):
    """Measures what the server would count of each client after the round, and bounds it.

    Kinds of sizes: move, gradient, precision, and, in every column, the number of examples, which is not checked, and
    the cosine of the move and the gradient of all data, ``slope`` c, (P,), 0 at first. ``options`` of :class:`Guard`.
    """

    num_lengths: ClassVar[int] = 3
    tells = True
    adding: ClassVar[tuple[slice, slice]] = slice(1), slice(0)

    def __init__(
        self, posterior: GaussianPosterior, slope: Tensor, bound: float, counted_of: Counted, *options: Any
    ) -> None:
        super().__init__(GaussianPosterior.point_mass(posterior.mean), (), bound, *options)
        names = gaussian_names(posterior)
        mean, variance = posterior.flatten()
        self._counted_of = counted_of
        self._start = mean
        self._width = torch.where(variance > 0, variance, 1.0).sqrt()
        self._own = [value.numel() for name, value in posterior.mean.items() if name in names]
        self._is_own = [name in names for name, value in posterior.mean.items() if value.numel()]
        parts = zip(posterior.names, variance.split(self._lengths))
        self._variance = torch.cat([variance[:0], *(part for name, part in parts if name in names)])
        self._examples: dict[int, float] = {}
        self._slope = torch.nn.functional.normalize(slope.to(mean.device) * self._width, dim=0)
        self._against: dict[int, float] = {}
        agreed = self.memory.get("agreed", torch.empty(0, 5)).tolist()
        self._agreed: dict[float, list[float]] = {client: sums for client, *sums in agreed}

    def sizes_of(self, updates: Sequence[ClientUpdate], *, by_pieces: bool = False) -> Tensor:
        """Return the sizes of the clients' messages, shape (clients, 5, tensors + 1). The last column is of all."""
        return torch.stack([self._sizes_of(update) for update in updates]).cpu()

    def _sizes_of(self, update: ClientUpdate) -> Tensor:
        site = self._site(update)
        self._examples[update.client] = examples = float(update.num_examples)
        move = (update.posterior.flatten()[0] - self._start).div_(self._width)
        parts = (site["precision"] * self._variance).split(self._own)
        precision = iter([torch.linalg.vector_norm(part, 1) for part in parts if len(part)])
        lengths = torch.cat([self._norms(each[None]) for each in (move, site["gradient"] * self._width)])
        sums = torch.stack([next(precision) if own else move.new_zeros(()) for own in self._is_own])
        rows = [torch.cat([each, each.norm()[None]]) for each in lengths]
        against = float(move @ self._slope / move.norm().clamp_min(1e-12))
        self._against[update.client] = against
        numbers = (torch.full_like(rows[0], number) for number in (examples, against))
        return torch.stack([*rows, torch.cat([sums, sums.sum()[None]]), *numbers])

    def absurd(self, updates: Sequence[ClientUpdate], sizes: Tensor) -> Tensor:
        """See :meth:`Guard.absurd`. A site is of one client, and of as many examples as its message."""
        largest = torch.stack([update.posterior.flatten()[0].abs().amax() for update in updates]).cpu()
        sites = [self._site(update) for update in updates]
        told = torch.tensor([[float(site["clients"]), float(site["examples"])] for site in sites])
        true = torch.tensor([[1.0, float(update.num_examples)] for update in updates])
        wrong = ~((told - true).abs() <= 1e-6 * true).all(1) | (largest > self._most_move)
        return wrong | (sizes[:, 1:3] > MOST_MOVE).flatten(1).any(1)

    def _site(self, update: ClientUpdate) -> dict[str, Tensor]:
        """Return what is counted of a client within its limits."""
        if update.client not in self.counted:
            old, sent = self._counted_of(update.client), split(update.buffers)[1]
            self.counted[update.client] = {
                name: value + old[name].to(value.device) if name in old else value.double()
                for name, value in sent.items()
            }
        return self.counted[update.client]

    def limits(self, sizes: Tensor, weights: Sequence[float], clients: Sequence[int] = ()) -> Limits:
        """Return the largest sizes that are allowed, for a client of the median number of examples.

        Few clients are compared with earlier rounds of more, or without rounds with others' last sizes, if any.
        """
        examples = sizes[:, 3, 0].tolist()
        self._examples |= dict(zip(clients, examples))
        self._against |= dict(zip(clients, sizes[:, AGAINST, 0].tolist()))
        usual_agreement = _agreement(sizes[:, 0, -1], -sizes[:, AGAINST, 0])
        compared = self._with_others(sizes, clients)[0] if self.part != 1 and len(sizes) < FEWEST else sizes
        before = self.memory.get("sizes", torch.zeros_like(sizes[0, :3]))
        usual = _median(compared) if len(compared) >= FEWEST else before
        share = (self._numels / self._numels.sum())[None]
        parts = torch.cat([share.sqrt(), share.sqrt(), share])
        limits = torch.cat([FEW * usual[:, :-1].maximum(parts * usual[:, -1:]), usual[:, -1:]], 1)
        limits[2] *= FEW
        limits[:, :-1] *= 1 + 2 / self._numels.sqrt()  # those of short vectors scatter
        bounds = torch.where((limits > 0) & (not self.is_alone), self.max_influence * limits, torch.inf)

        def opposes(client: int) -> bool:  # it has gone another way than the others, in the rounds so far
            agreed, expected, spread, _ = self._sums(client, usual_agreement)
            return FEW * self.max_influence * agreed < expected and expected - agreed > self.max_influence * spread

        bounds = torch.cat([bounds, torch.full_like(bounds[:2], torch.inf)])
        against = (lambda client: False) if self.is_alone else opposes
        return SiteLimits(bounds, statistics.median(examples), self._examples, against)

    def _sums(self, client: int, usual: Sequence[float]) -> list[float]:
        r"""Return :math:`\sum d a_k, \sum d m, \sum |d| s` of a client, with this round of :func:`_agreement`."""
        way, median, spread = usual
        *before, messages = self._agreed.get(client, [0.0] * 4)
        terms = (-way * self._against[client], way * median, abs(way) * spread)
        return [*(old + new * (messages >= SETTLED) for old, new in zip(before, terms)), messages + 1]

    def remember(self, sizes: Tensor, limits: Tensor, clients: Sequence[int]) -> None:
        before = self.memory.get("sizes")
        compared = sizes if self.part == 1 else self._remember_clients(sizes, limits, clients)
        cosines = torch.tensor([self._against[client] for client in clients], dtype=torch.float64)
        usual = _agreement(sizes[:, 0, -1], -cosines)
        agreed = self._agreed | {client: self._sums(client, usual) for client in clients}
        rows = [[client, *agreed[client]] for client in sorted(agreed)]
        self.memory["agreed"] = torch.tensor(rows, dtype=torch.float64)
        if len(compared) >= FEWEST:
            usual = _median(compared)
            self.memory["sizes"] = usual if before is None else usual.maximum(DECAY**self.part * before)

    def _kept(self, limits: Tensor, sizes: Tensor) -> Tensor:
        """Return bound over size where a size is beyond, else 1. 0 for a client that is against the others."""
        kept = torch.where(sizes > limits, limits / sizes, 1.0) * (sizes <= limits)[AGAINST]
        return kept.minimum(kept[:, -1:])

    def part_of(self, limits: Tensor, sizes: Tensor) -> float:
        """See :meth:`Guard.part_of`: the weight counts as the move does. Not without rounds: others may be missing."""
        return float(self._kept(limits, sizes)[0, -1]) ** BEYOND if self.part == 1 else 1.0

    def clipped(self, update: ClientUpdate, limits: Tensor, sizes: Tensor) -> ClientUpdate:
        """See :meth:`Guard.clipped`. Note what is counted of the client, which has to keep the same."""
        site, old = self._site(update), self._counted_of(update.client)
        kept, whole = self._kept(limits, sizes), self.part_of(limits, sizes)
        kept = torch.cat([kept[:2, :-1] ** BEYOND, kept[2:, :-1] * kept[1, -1] ** BEYOND])
        device = self._start.device
        move, gradient = (row.repeat_interleave(self._numels.long()).to(device) for row in kept[:2])
        move = move / whole if whole else move
        numels = self._numels.long()[torch.tensor(self._is_own, dtype=torch.bool)]
        precision = kept[2][torch.tensor(self._is_own, dtype=torch.bool)].repeat_interleave(numels).to(device)
        wanted = {**site, "gradient": site["gradient"] * gradient}
        wanted["precision"] = site["precision"].clamp_min(0) * precision
        if bool((sizes > limits)[AGAINST].any()):
            wanted["examples"] = torch.zeros_like(site["examples"])
            for name in ("gradient", "precision"):
                wanted[name] = MEMORY * old[name].to(device) if name in old else torch.zeros_like(wanted[name])
        changes, counted = {}, {}
        for name, new in wanted.items():
            start = old[name].to(device) if name in old else torch.zeros_like(new)
            changes[name] = (new - start).float()
            counted[name] = start + changes[name].double()
        self.counted[update.client] = counted
        mean = update.posterior.flatten()[0]
        posterior = update.posterior.unflatten(self._start + move * (mean - self._start), None)
        own, _ = split(update.buffers)
        return changed(update, posterior=posterior, buffers=joined(own, changes))


def _median(sizes: Tensor) -> Tensor:
    """Return the median sizes of clients of the median number of examples, shape (3, tensors + 1)."""
    shares = sizes[:, 3, 0] / sizes[:, 3, 0].quantile(0.5)
    return (sizes / shares.sqrt()[:, None, None])[:, :3].median(0).values


def _agreement(moves: Tensor, cosines: Tensor) -> list[float]:
    """Return way, median cosine and how far the furthest of as many would be. Zeros of fewer than :data:`FEWEST`."""
    median = cosines.quantile(0.5)
    deviation = 1.4826 * (cosines - median).abs().quantile(0.5)
    found = torch.stack([median * moves.quantile(0.5), median, deviation * math.sqrt(2 * math.log(len(moves)))])
    return found.tolist() if len(moves) >= FEWEST else [0.0] * 3
