r"""Guard of a round of sites: no client's *site* is much larger than the others', and none changes much more.

With the global posterior of precision :math:`\lambda` and mean m, the sizes of a site :math:`(\Lambda_k, \eta_k)` are,
for every tensor,

* shift :math:`\|(\eta_k - \Lambda_k m) / \sqrt{\lambda}\|`, how far it moves the mean, in standard deviations;
* precision :math:`\|\Lambda_k / \lambda\|`;
* lack :math:`\max(-\Lambda_k)`, over the most that a client may take away from the prior's precision;

and those of its change in the round are shift and precision likewise. A site beyond its bound is scaled back to it. Of
a change that is s times as large as its bound, :math:`1 / s^3` counts: an honest client that is somewhat beyond arrives
some rounds later, and at the same posterior, while one that pushes on for ever is hardly heard, and neither is an
honest one that is far beyond. Of deterministic parameters the dual variable has shifts; where there is none, the update
has.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.messages import ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.fusion.rule import FusionRule, RuleState
from lightning_fedbayes.fusion.sites import TOLERANCE, Natural, Sites
from lightning_fedbayes.server.guard import FEWEST, MOST_MEASURED, MOST_MOVE, Guard, Limits

Tensors = Mapping[str, Tensor]

BEYOND = 3
"""Power of bound over size by which a change counts that is beyond."""
SETTLED = 0.02
"""Change, as part of the largest site, that counts whole however small the others' are: otherwise a client that is the
last one on its way is held up for ever by those that have arrived."""
SETTLED_LATE = 0.05
"""The same without rounds, where clients are not at the same point of their way: by 0.02 honest ones were held up for
ever, and by more one that flips its updates takes more (digits, 60 fusions, a liar three times as fast as the others:
accuracy 0.953, 0.933 and 0.881 by 0.02, 0.05 and 0.2; 0.967 without it)."""
LEAST_LEFT = 1e-3
"""Part of the global precision that is left whatever a site takes away; honest clients leave 250 times as much."""


@dataclass(frozen=True)
class SiteLimits(Limits):
    """The largest sizes that are allowed: a client of many examples may have a larger site.

    Args:
        sizes, weight: see :class:`~lightning_fedbayes.server.guard.Limits`.
        is_new: returns True for a client whose lengths are not bounded: it has no site yet, and too few others do.
        passes_of: how often the others have been heard since a client began, on average, at least 1. Its change may be
            as many times as large as theirs: one that is seldom heard has further to go.
        begins_of: returns the part of a whole site by which a client may change in any case, while it is new.
    """

    is_new: Callable[[int], bool]
    passes_of: Callable[[int], float]
    begins_of: Callable[[int], float]

    def of(self, clients: Mapping[int, float]) -> Tensor:
        """Return the limits of clients, client → weight, shape (clients, 5, tensors)."""
        limits = self.sizes * _credits(clients.values(), self.weight)
        passes, begins = (
            torch.tensor([of(client) for client in clients], dtype=torch.float64)[:, None, None]
            for of in (self.passes_of, self.begins_of)
        )
        limits[:, :2] = (limits[:, :2] * passes).maximum(limits[:, 2:4] * begins)
        limits[torch.tensor([self.is_new(client) for client in clients], dtype=torch.bool), :4] = torch.inf
        return limits


class SiteGuard(Guard):
    """Measures what the server would have counted of each client after the round, and holds back what is too large.

    Kinds of sizes: shift and precision of the change, shift and precision of the site, and its lack. A client's number
    of examples is believed: its site may be as much larger than the median one as they are more.

    Args:
        rule: of the round.
        previous: the global posterior that the clients started from.
        state: the rule's, after the rounds before.
        probabilistic: names of the tensors to which the network gives a variance.
        max_influence: multiple of the median size that is allowed, at least 1.
        share: of one client among all, 1 / K.
        counted_of: returns what has been counted of a client in the rounds before: "precision", "shift" and "dual", as
            far as there are such; empty for none.
        memory, part: see :class:`~lightning_fedbayes.server.guard.Guard`. Where a fusion hears a part of the clients,
            "known" are the sizes and "weights" the weights of all "clients" that were heard before, as often as "heard"
            says: few are compared with them.
        passes_of: see :class:`SiteLimits`.
    """

    num_lengths: ClassVar[int] = 4
    fewest_ranked: ClassVar[int] = FEWEST  # sites of few clients differ as much as their data do

    def __init__(
        self, rule: Sites, previous: GaussianPosterior, state: RuleState, probabilistic: Collection[str],
        max_influence: float, share: float, counted_of: Callable[[int], Tensors],
        memory: Mapping[str, Tensor] = MappingProxyType({}),
        part: float = 1.0, passes_of: Callable[[int], float] = lambda client: 1.0,
    ) -> None:
        super().__init__(previous, probabilistic, max_influence, memory, share == 1, part)
        self.rule = rule
        self._passes_of = passes_of
        self._counted_of = counted_of
        self._least = rule.least_site(share)
        self._has_site = [name in probabilistic for name in previous.names]
        self._parts_of = {
            has_site: [n for n, own in zip(self._lengths, self._has_site) if own is has_site]
            for has_site in (True, False)
        }
        flat = rule.base(previous, state).flatten()
        precision, shift = (self._sites(each) for each in rule.natural(*flat))
        self._base: Natural = precision, shift
        self._start = self._rest(flat[0])
        known = precision > 0
        self._centre = torch.where(known, shift / precision, 0.0)
        self._inverse = torch.where(known, 1 / precision, 0.0)
        self._width = self._inverse.sqrt()

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def sizes_of(self, updates: Sequence[ClientUpdate], *, by_pieces: bool = False) -> Tensor:
        """Return the sizes of the clients' sites as they would be, shape (clients, 5, tensors)."""
        at_once = max(1, MOST_MEASURED // max(1, sum(self._lengths)))
        groups = (updates[start : start + at_once] for start in range(0, len(updates), at_once))
        return torch.cat([self._sizes_of(group) for group in groups]).cpu()

    def _sizes_of(self, updates: Sequence[ClientUpdate]) -> Tensor:
        """Return the sizes of a group of clients."""
        pairs = [(self._proposed(update), self._counted_of(update.client)) for update in updates]
        sites = rest = iter(())
        if self._parts_of[True]:
            after, before = (
                [torch.stack([each.get(name, self._none) for each in group]) for name in ("precision", "shift")]
                for group in zip(*pairs)
            )
            changes = [new - old for new, old in zip(after, before)]
            lack = -after[0] - TOLERANCE * self._base[0]  # a change that travels in single precision is not exact
            values = (*self._moves(*changes), *self._moves(*after), lack)
            sites = zip(*(value.split(self._parts_of[True], 1) for value in values))
        if self._parts_of[False]:
            moved = [self._moved(update, *pair) for update, pair in zip(updates, pairs)]
            rest = zip(*(torch.stack(each).split(self._parts_of[False], 1) for each in zip(*moved)))
        found = []
        for length, has_site in zip(self._lengths, self._has_site):
            parts = next(sites if has_site else rest)
            if not length:
                continue
            sizes = [part.norm(dim=1) for part in parts[:4]]
            nothing = torch.zeros_like(sizes[0])
            lack = parts[4].amax(1) / -self._least if has_site else nothing
            sizes = [*sizes, lack] if has_site else [sizes[0], nothing, sizes[1], nothing, nothing]
            found.append(torch.stack(sizes, 1))
        return torch.stack(found, 2)

    @property
    def _none(self) -> Tensor:
        return torch.zeros_like(self._centre)

    def _moves(self, precision: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Return how a site, or a change of it, moves the mean and the precision, as parts of the global widths."""
        return (shift - precision * self._centre) * self._width, precision * self._inverse

    def _moved(self, update: ClientUpdate, proposed: Tensors, old: Tensors) -> tuple[Tensor, Tensor]:
        """Return how a client changes its dual variable, and the variable; without one its update, and nothing."""
        if "dual" not in proposed:
            change = self._start - self._rest(update.posterior.flatten()[0])
            return change, torch.zeros_like(change)
        dual = proposed["dual"]
        return (dual - old["dual"] if "dual" in old else dual), dual

    def absurd(self, updates: Sequence[ClientUpdate], sizes: Tensor) -> Tensor:
        """See :meth:`Guard.absurd`; sizes are in units of widths, which may be tiny."""
        largest = torch.stack([update.posterior.flatten()[0].abs().amax() for update in updates])
        return largest.cpu() > MOST_MOVE * (1 + self._largest)

    def limits(self, sizes: Tensor, weights: Sequence[float], clients: Sequence[int] = ()) -> Limits:
        """Return the largest sizes that are allowed, for a client of the median number of examples."""
        if len(sizes) < FEWEST and "known" in self.memory:
            others = [row for row, client in enumerate(self.memory["clients"].tolist()) if client not in clients]
            sizes = torch.cat([sizes, self.memory["known"][others]])
            weights = [*weights, *self.memory["weights"][others].tolist()]
        weight = statistics.median(weights)
        limits = super().limits(sizes / _credits(weights, weight), [1.0] * len(weights)).sizes
        limits[:2] = limits[:2].maximum((SETTLED if self.part == 1 else SETTLED_LATE) * limits[2:4])
        limits[4] = 1 + TOLERANCE
        few = len(sizes) < FEWEST
        is_new = lambda client: few and not self._counted_of(client)  # noqa: E731
        return SiteLimits(limits, weight, is_new, self._passes_of, self._begins_of)

    def _begins_of(self, client: int) -> float:
        """Return 2⁻ⁿ for a client that was heard n times, in a federation without rounds: others may have settled."""
        if self.part == 1:
            return 0.0
        return 0.5 ** self._heard.get(client, 0)

    @property
    def _heard(self) -> dict[int, int]:
        if "heard" not in self.memory:
            return {}
        return dict(zip(self.memory["clients"].tolist(), self.memory["heard"].tolist()))

    def remember(self, sizes: Tensor, weights: Sequence[float], clients: Sequence[int]) -> None:
        """See :meth:`Guard.remember`; a change over several passes counts as one of one pass."""
        super().remember(sizes / _credits(weights, statistics.median(weights)), weights, clients)
        if self.part == 1:
            return
        passes, own = (torch.tensor(each, dtype=torch.float64) for each in ([*map(self._passes_of, clients)], weights))
        sizes = torch.cat([sizes[:, :2] / passes[:, None, None], sizes[:, 2:]], 1)
        heard = torch.tensor([self._heard.get(client, 0) + 1 for client in clients])
        found = {"clients": torch.tensor(clients), "known": sizes, "weights": own, "heard": heard}
        if "known" in self.memory:
            rest = [row for row, client in enumerate(self.memory["clients"].tolist()) if client not in clients]
            found = {name: torch.cat([self.memory[name][rest], each]) for name, each in found.items()}
        self.memory |= found

    # -- bounds --------------------------------------------------------------------------------------------------------

    def clip(self, update: ClientUpdate, limits: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a client would have sent for what is counted of it, and note the latter.

        Args:
            update: of the client.
            limits, sizes: of this client, shape (5, tensors).
        """
        proposed, old = self._proposed(update), self._counted_of(update.client)
        mean, variance = update.posterior.flatten()
        mean, variance = mean.clone(), variance.clone() if self._parts_of[True] else variance
        kept = torch.where(sizes > limits, limits / sizes, 1.0)
        aims = torch.where(sizes > limits, limits * kept ** (BEYOND - 1), limits)[:2]
        moved, certain = (row.repeat_interleave(self._numels.long()).to(mean.device) for row in kept[2:4])
        if self._parts_of[True]:
            precision = (self._sites(certain) * proposed["precision"]).clamp_min_(self._least)
            change = precision - old.get("precision", self._none)
            shift = self._sites(moved) * (proposed["shift"] - proposed["precision"] * self._centre)
            shift -= old.get("shift", self._none) - old.get("precision", self._none) * self._centre
            shift *= self._factors(shift * self._width, aims[0], True)
            change *= self._factors(change * self._inverse, aims[1], True)
            left = (self._base[0] + change).maximum(LEAST_LEFT * self._base[0])
            self._put(mean, (self._base[1] + change * self._centre + shift) / left, True)
            self._put(variance, 1 / left, True)
        if self._parts_of[False]:
            change, dual = self._moved(update, proposed, old)
            change = change - (1 - self._rest(moved)) * dual
            change *= self._factors(change, aims[0], False) / (self.rule.pull or 1.0)
            self._put(mean, self._start - change, False)
        self.counted[update.client] = self._site_of(mean, variance, old)
        return mean, variance

    def _factors(self, values: Tensor, aims: Tensor, has_site: bool) -> Tensor:
        """Return the factor of every entry by which each tensor's part of ``values`` is at most as long as its aim."""
        owners = [own for own, length in zip(self._has_site, self._lengths) if length]
        own = aims[torch.tensor(owners) == has_site].to(values.device)
        parts = [part for part in values.split(self._parts_of[has_site]) if len(part)]
        norms = torch.stack([part.norm() for part in parts])
        factors = torch.where(norms > own, own / norms, 1.0)
        return factors.repeat_interleave(torch.tensor([len(part) for part in parts], device=values.device))

    def carried(self, state: RuleState, weights: Mapping[int, float]) -> RuleState:
        """Return the rule's state for these weights: a dual variable counts by its client's present one."""
        before = state.get("weights", {})
        changed = {client: weight for client, weight in weights.items() if before.get(client, weight) != weight}
        if not changed:
            return state
        dual = state["dual"].clone()
        own = self._rest(dual)
        for client, weight in changed.items():
            own = own + (weight - before[client]) * self._counted_of(client)["dual"].to(own)
        self._put(dual, own, False)
        return {**state, "dual": dual, "weights": {**before, **changed}}

    # -- what is counted -----------------------------------------------------------------------------------------------

    def _proposed(self, update: ClientUpdate) -> Tensors:
        """Return what would be counted of a client if it were not too large."""
        if update.kept is not None:
            return update.kept
        if update.client not in self.counted:
            flat = update.posterior.flatten()
            self.counted[update.client] = self._site_of(*flat, self._counted_of(update.client))
        return self.counted[update.client]

    def _site_of(self, mean: Tensor, variance: Tensor, old: Tensors) -> dict[str, Tensor]:
        """Return what is counted of a client that sends this posterior, bit by bit what the client works out."""
        found = {}
        if self._parts_of[True]:
            sent = self.rule.natural(self._sites(mean), self._sites(variance))
            for name, base, value in zip(("precision", "shift"), self._base, sent):
                found[name] = value - base + old[name] if name in old else value - base
        if self._parts_of[False] and self.rule.pull is not None:
            found["dual"] = self.rule.pull * (self._start - self._rest(mean))
            if "dual" in old:
                found["dual"] += old["dual"]
        return found

    # -- parts of flat vectors -----------------------------------------------------------------------------------------

    def _sites(self, flat: Tensor) -> Tensor:
        """Return the entries of a flat vector that have sites."""
        return self._part(flat, True)

    def _rest(self, flat: Tensor) -> Tensor:
        """Return the deterministic entries of a flat vector."""
        return self._part(flat, False)

    def _part(self, flat: Tensor, has_site: bool) -> Tensor:
        parts = self._split(flat, has_site)
        return flat if len(parts) == len(self._lengths) else torch.cat(parts) if parts else flat[:0]

    def _put(self, flat: Tensor, values: Tensor, has_site: bool) -> None:
        """Write the entries of a flat vector that have sites, or the others."""
        for part, new in zip(self._split(flat, has_site), values.split(self._parts_of[has_site])):
            part.copy_(new)

    def _split(self, flat: Tensor, has_site: bool) -> list[Tensor]:
        return [part for part, own in zip(flat.split(self._lengths), self._has_site) if own is has_site]


def guard_of(
    rule: FusionRule, previous: GaussianPosterior, state: RuleState, probabilistic: Collection[str],
    max_influence: float, share: float, counted_of: Callable[[int], Tensors], memory: Tensors, part: float,
    passes_of: Callable[[int], float],
) -> Guard:
    """Return the guard of a round by a rule; for the arguments see :class:`SiteGuard`."""
    if isinstance(rule, Sites):
        return SiteGuard(
            rule, previous, state, probabilistic, max_influence, share, counted_of, memory, part, passes_of
        )
    return Guard(previous, probabilistic, max_influence, memory, share == 1, part)


def _credits(weights: Iterable[float], typical: float) -> Tensor:
    """Return how much larger a site may be than that of a client of ``typical`` weight, shape (clients, 1, 1)."""
    values = [max(1.0, weight / typical) if typical > 0 else 1.0 for weight in weights]
    return torch.tensor(values, dtype=torch.float64)[:, None, None]
