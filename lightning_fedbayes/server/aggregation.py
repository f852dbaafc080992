"""Aggregation of one round: client updates in, the fused posterior and its diagnostics out."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, check_kind
from lightning_fedbayes.core.exchange import ALONE, Collective, Reduction, Statistics, merge_statistics
from lightning_fedbayes.core.messages import ClientUpdate, check_mapping
from lightning_fedbayes.core.posterior import MOST_AT_ONCE, PIECE, GaussianPosterior, is_zero
from lightning_fedbayes.fusion import FusionAccumulator, FusionRule, RuleState, SumRule
from lightning_fedbayes.fusion.accumulator import check_finite, check_structure, fuse_distributed
from lightning_fedbayes.fusion.averages import add_disagreement
from lightning_fedbayes.fusion.rule import add
from lightning_fedbayes.methods.method import PREFIX, Method, Shared, joined, split
from lightning_fedbayes.server import weighting as weighing
from lightning_fedbayes.server.guard import (
    FEWEST,
    MOST_MEASURED,
    MOST_MOVE,
    REMEDY,
    Guard,
    Limits,
    TensorsGuard,
    changed,
)
from lightning_fedbayes.server.site_guard import SiteGuard
from lightning_fedbayes.server.sums_guard import SumsGuard
from lightning_fedbayes.server.weighting import PER_CLIENT, ClientFacts, client_weights


class Disagreement:
    """Running mean of the clients' means, and the disagreement Σω‖μ_k − μ‖² as one number, by West's recursion.

    It ``borrows`` the mean from the rule's sums where they contain it, but not where other processes have clients, or
    where the sums may cease to contain it.
    """

    def __init__(self, borrows: bool) -> None:
        self._borrows = borrows
        self._weights: list[float] = []  # of each piece, as all lists here
        self._means: list[Tensor] = []
        self._within: list[Tensor] = []

    def add(self, place: int, mean: Tensor, weight: float, known: tuple[Tensor, Tensor] | None) -> None:
        """Add a client's piece number ``place``. See :data:`~lightning_fedbayes.fusion.accumulator.Watch`."""
        if place == len(self._weights):
            self._weights.append(weight)
            self._within.append(mean.new_zeros(()))
            if not self._borrows or known is None:
                self._means.append(mean.clone())
            return
        before, after = self._weights[place], self._weights[place] + weight
        self._weights[place] = after
        if self._means:
            step = mean - self._means[place]
            self._means[place].add_(step, alpha=weight / after)
            spread = before * weight / after
        else:  # the distance to the mean with this client is shorter by before / after
            assert known is not None
            step = torch.sub(mean, known[0], alpha=1 / float(known[1]))
            spread = weight * after / before
        self._within[place].add_(torch.dot(step, step), alpha=spread)

    def statistics(self, with_mean: bool) -> Statistics:
        """Return weight and disagreement of these clients, and their mean where other processes have others."""
        if not self._weights:
            return {}
        within = torch.stack(self._within).sum()
        sums = {"weight": within.new_tensor(self._weights[0]), "within": within}
        return {**sums, "mean": torch.cat(self._means)} if with_mean else sums


def merge_disagreement(statistics: Statistics, other: Statistics) -> None:
    """Merge the disagreement of another process's clients into ``statistics``, in place."""
    add_disagreement(statistics, other["mean"], other["weight"])
    add(statistics, "within", other["within"])


@dataclass(frozen=True)
class Aggregate:
    """Result of the aggregation of a round.

    Args:
        posterior, buffers: the new global posterior, and buffers by name, in their dtypes.
        weights: client → normalised weight ω, or, if ``inferred``, the reliability that the rule infers.
        metrics: diagnostics of the fusion, name → value.
        excluded: client → why the rule left it out.
        state: the rule's state for the next round.
        outlying: clients that stand out and count only in part, see :mod:`lightning_fedbayes.server.guard`.
        refused: client → why its update does not count at all.
        counted: client → what it has to keep in place of what it sent, so that both ends keep the same.
    """

    posterior: GaussianPosterior
    buffers: dict[str, Tensor]
    weights: dict[int, float]
    metrics: dict[str, float]
    inferred: bool
    excluded: dict[int, str]
    state: RuleState
    outlying: tuple[int, ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict)
    counted: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Admitted:
    """Clients that one process has admitted, as far as the other processes must know them before the fusion.

    Args:
        clients: their numbers, in the order in which they came.
        weights, facts: weights that are not normalised. Where the weighting compares clients, facts in their place.
        error: the reason why a weight cannot be computed.
        sizes: see :class:`~lightning_fedbayes.server.guard.Guard`, shape (clients, kinds, tensors). None without one.
        refused: client → why its update does not count.
        held: clients that are not added yet.
    """

    clients: tuple[int, ...]
    weights: tuple[float, ...] = ()
    facts: tuple[ClientFacts, ...] = ()
    error: FusionError | None = None
    sizes: Tensor | None = None
    refused: Mapping[int, str] = field(default_factory=dict)
    held: frozenset[int] = frozenset()

    def without(self, clients: Collection[int]) -> "Admitted":
        """Return what is admitted without these clients."""
        rows = [row for row, client in enumerate(self.clients) if client not in clients]
        columns = {"clients": self.clients, "weights": self.weights, "facts": self.facts}
        kept = {name: tuple(each[row] for row in rows) if each else () for name, each in columns.items()}
        sizes = None if self.sizes is None else self.sizes[rows]
        return replace(self, sizes=sizes, held=self.held.difference(clients), **kept)


class Aggregation:
    """Collects the updates of a round and fuses them.

    With a sum-type rule and weights that look at one client at a time it keeps sums only. Under a guard clients wait
    until enough are known to compare with, 7 (of small networks 14 or more), or until the end of the round.

    Args:
        rule, weighting: see :class:`~lightning_fedbayes.Server`.
        previous: the global posterior that the clients started from.
        buffers: the global buffers that the clients started from. None takes the first client's as the model of all.
        state: the rule's state after earlier rounds. None for the initial one.
        collective: the processes, each of which adds its clients. With several, ``buffers`` must be given.
        guard: refuses impossible variances and, unless the rule is robust by itself, bounds what one client can do.
            None: neither.
        adds: tensors of a method, under names that begin with "method/", are added up, not averaged.
        doubt: see :meth:`~lightning_fedbayes.Method.doubt`, of the round.
    """

    def __init__(
        self,
        rule: FusionRule,
        weighting: str | weighing.CohortWeights,
        previous: GaussianPosterior,
        buffers: Mapping[str, Tensor] | None = None,
        state: RuleState | None = None,
        collective: Collective = ALONE,
        guard: Guard | None = None,
        adds: bool = False,
        doubt: Callable[[GaussianPosterior, Mapping[str, Tensor]], str | None] | None = None,
    ) -> None:
        check_kind("rule", rule, FusionRule, "give a rule object, such as get_rule('conflation')", error=FusionError)
        check_kind("previous", previous, GaussianPosterior, "give the global posterior", error=FusionError)
        check_mapping("buffers", {} if buffers is None else buffers, Tensor)
        self.rule, self.guard = rule, guard
        self._adds, self._doubt = adds, doubt
        self.state = rule.init() if state is None else state
        self.weighting, self.previous, self.collective = weighting, previous, collective
        self._streams = isinstance(rule, SumRule) and isinstance(weighting, str) and weighting in PER_CLIENT
        self._accumulator = FusionAccumulator(rule, previous, relative=collective.size == 1)
        self._clips = guard is not None and not rule.resists
        points = previous.is_point_mass if guard is None else guard.is_deterministic
        self._by_pieces = points and previous.num_parameters > PIECE  # no client is copied into one vector
        self._is_small = 2 * FEWEST * previous.num_parameters <= MOST_AT_ONCE and not self._by_pieces
        self._group = max(2 * FEWEST, MOST_MEASURED // max(1, previous.num_parameters)) if self._is_small else FEWEST
        self.most_weight = math.inf  # of a client, not normalised
        self._held: list[ClientUpdate] = []
        self._unmeasured = 0  # of those held, the last ones
        self._weights: dict[int, float] = {}
        self._rows: dict[int, int] = {}  # client that is measured → its row in the sizes
        self._parts: list[Tensor] = []  # of the sizes, shape (clients, 4, tensors) each
        self._limits: Limits | None = None
        self._refused: dict[int, str] = {}
        self._num_judged, self._judge_at = 0, FEWEST  # clients that the limits know; that they are to know next
        self._buffers = weighing.BufferAverage(buffers, collective.size > 1, PREFIX if adds else None)
        self._disagreement = Disagreement(self._by_pieces and guard is not None and collective.size == 1)

    def __len__(self) -> int:
        return len(self._weights) if self._streams else len(self._held)

    def add(self, update: ClientUpdate) -> None:
        """Admit one client's update.

        Raise FusionError if names or shapes differ from the global model's, a value is not finite, or a variance is not
        possible. The round does not change.
        """
        check_kind("update", update, ClientUpdate, "give a ClientUpdate", error=FusionError)
        who = f"client {update.client}"
        check_structure(update.posterior, self.previous, who)
        if update.posterior.names != self.previous.names:
            update = replace(update, posterior=update.posterior.ordered(self.previous.names))
        posterior = update.posterior
        if not self._by_pieces:
            posterior = posterior.flattened()
        check_finite(posterior, who)
        self._buffers.check(update.buffers, who)
        doubt = None if self._doubt is None else self._doubt(update.posterior, split(update.buffers)[1])
        if doubt is not None:
            raise FusionError(f"{who}: {doubt}")
        if self.guard is not None:
            self.guard.check(posterior, who)
        if self._streams:
            weigh = PER_CLIENT[str(self.weighting)] if self.rule.uses_weights else None  # ω, not normalised
            weight = 1.0 if weigh is None else weigh(ClientFacts.of(update, self.previous))
            self._weights[update.client] = min(weight, self.most_weight)
        if self._streams and not self._clips:
            self._add_to_sums([(update, posterior, self._weights[update.client])])
        else:
            posterior = posterior if self._streams else posterior.clone()
            buffers = {name: value.clone() for name, value in update.buffers.items()}
            self._held.append(changed(update, posterior=posterior, buffers=buffers))
            self._unmeasured += 1
        is_large = not self._is_small
        at_once = is_large and (self._limits is not None or not self._by_pieces)
        if self._streams and self._unmeasured == (1 if at_once else self._group):
            self._judge()
        if self._streams and is_large and self._held and self._held[-1].client == update.client:
            self._held[-1] = replace(self._held[-1], posterior=update.posterior.clone())  # half of the memory
        if self._buffers.before is None:
            self._buffers.before = dict(update.buffers)

    def _judge(self, ends: bool = False) -> None:
        """Measure clients that came since the last call, and add those within limits, set at 7 clients, 14, 28, …

        None is added if the round ``ends`` before any has been: more may be known of them then.
        """
        assert self.guard is not None
        if self._unmeasured:
            recent = self._held[len(self._held) - self._unmeasured :]
            sizes = self.guard.sizes_of(recent, by_pieces=self._by_pieces)
            absurd = self.guard.absurd(recent, sizes)
            if bool(absurd.any()):
                for update, is_absurd in zip(recent, absurd.tolist(), strict=True):
                    if is_absurd:
                        why = f"it moves the means by more than a factor of {MOST_MOVE:g}: check its {REMEDY}"
                        self._refused[update.client] = f"client {update.client}: {why}"
                        self._weights.pop(update.client, None)
                recent = [update for update in recent if update.client not in self._refused]
                self._held = [update for update in self._held if update.client not in self._refused]
                sizes = sizes[~absurd]
            self._parts.append(sizes)
            self._rows.update((update.client, row) for row, update in enumerate(recent, start=len(self._rows)))
            self._unmeasured = 0
            if self._streams and self._limits is not None:
                self._release(sizes)
        if self._streams and len(self._rows) >= self._judge_at and (self._limits is not None or not ends):
            self._num_judged, self._judge_at = len(self._rows), 2 * len(self._rows)
            self._limits = self.guard.limits(self._sizes(), list(self._weights.values()))
            self._release(self._sizes()[[self._rows[update.client] for update in self._held]])

    def _sizes(self) -> Tensor:
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        return self._parts[0]

    def _release(self, sizes: Tensor) -> None:
        """Add the last waiting clients, which have these ``sizes``, if they are within the limits."""
        assert self._limits is not None
        assert self.guard is not None
        first = len(self._held) - len(sizes)  # those before have been found to be beyond
        recent, self._held = self._held[first:], self._held[:first]
        weights = {update.client: self._weights[update.client] for update in recent}
        limits = self._limits.of(weights)
        beyond = sizes > (limits if self.guard.part == 1 else self.guard.left_of(limits, weights))
        ready = []
        for update, suspect in zip(recent, beyond.flatten(1).any(1).tolist(), strict=True):
            if suspect:
                # its memory so far is a row of a stack of many clients
                posterior = update.posterior.owned() if self._is_small else update.posterior
                self._held.append(changed(update, posterior=posterior, buffers=dict(update.buffers)))
            else:
                ready.append((update, update.posterior, self._weights[update.client]))
        self._add_to_sums(ready)

    def admitted(self) -> Admitted:
        """Return what other processes must know of all clients. Those that wait are measured."""
        if self._clips:
            self._judge(ends=True)
        held = tuple(update.client for update in self._held)
        sizes = self._sizes() if self._rows else None
        known: dict[str, Any] = {"sizes": sizes, "refused": self._refused, "held": frozenset(held)}
        if self._streams:
            return Admitted(tuple(self._weights), tuple(self._weights.values()), **known)
        if not self.rule.uses_weights:
            return Admitted(held, (1.0,) * len(held), **known)
        facts = [ClientFacts.of(update, self.previous) for update in self._held]
        if isinstance(self.weighting, str) and self.weighting in PER_CLIENT:
            one = PER_CLIENT[self.weighting]
            try:
                return Admitted(held, tuple(min(one(fact), self.most_weight) for fact in facts), **known)
            except FusionError as error:
                return Admitted(held, error=error)
        if self.collective.size > 1:
            before = self.previous.to("cpu")
            facts = [replace(fact, posterior=fact.posterior.to("cpu"), previous=before) for fact in facts]
        return Admitted(held, facts=tuple(facts), **known)

    def waits(self, num_clients: int) -> bool:
        """True if none of a round's ``num_clients`` is added before all are known."""
        return not self._streams or (self._clips and num_clients < self._group)

    def finish(
        self, everyone: Sequence[Admitted] | None = None, refused: Mapping[int, str] = MappingProxyType({})
    ) -> Aggregate:
        """Fuse the clients of all processes, ``everyone`` admitted. None: they are exchanged now. All get the same.

        Leave out those that are ``refused``, client → why, if the aggregation :meth:`waits`. Raise FusionError if the
        weights cannot be used, or the rule cannot fuse these posteriors.
        """
        several = self.collective.size > 1
        if everyone is None:
            everyone = self.collective.all_gather(self.admitted())
        if refused:
            everyone = [each.without(refused) for each in everyone]
            self._refused |= refused
            self._held = [update for update in self._held if update.client not in refused]
            self._weights = {client: weight for client, weight in self._weights.items() if client not in refused}
        weights = dict(sorted(self._weights_of(everyone).items()))
        outlying = self._add_held(weights, everyone)
        of_all = sum(weights.values())
        total = of_all if several else self._accumulator.total
        self._accumulator.check_not_empty(total)
        shares = {client: weight / of_all for client, weight in weights.items()}
        state = self.state
        if isinstance(self.rule, SumRule) and not several:
            fused = self._accumulator.result(state, weights)
            apart, buffers = self._merge(shares)
        elif isinstance(self.rule, SumRule):
            sums = Reduction(self._accumulator.statistics, self.previous.num_parameters, self.rule.merge)
            apart, buffers, merged = self._merge(shares, sums)
            fused = self._accumulator.finish(merged, state, weights)
        else:
            cohort = self._accumulator.cohort(total)
            fused = fuse_distributed(self.rule, cohort, self._accumulator.like, state, self.collective)
            if fused.reliability:
                shares = {client: fused.reliability.get(client, 0.0) for client in weights}
            apart, buffers = self._merge(shares)
        check_finite(fused.posterior, "the fused posterior")
        refused = self._refused | {client: why for each in everyone for client, why in each.refused.items()}
        counted = [] if self.guard is None else [self.guard.counted]
        if self.guard is not None and self.guard.tells:
            counted = self.collective.all_gather(counted[0])
        parts = torch.tensor(list(shares.values()), dtype=torch.float64)
        apart_within = float(apart.get("disagreement", 0.0)) + float(apart["within"])
        return Aggregate(
            fused.posterior,
            buffers=self._buffers.averages(buffers, of_all if self._streams else 1.0),
            weights=shares,
            metrics={
                "effective_clients": float(parts.sum().square() / parts.square().sum()),  # Kish's number
                "disagreement": apart_within / float(apart["weight"]) / max(1, self.previous.num_parameters),
                **mean_variance(fused.posterior),
                **fused.figures,
                **({"outlying_clients": float(len(outlying))} if self._clips else {}),
            },
            inferred=bool(fused.reliability),
            excluded=fused.excluded,
            state=fused.state,
            outlying=outlying,
            refused=refused,
            counted={client: kept for each in counted for client, kept in each.items() if client not in refused},
        )

    def _add_held(self, weights: dict[int, float], everyone: Sequence[Admitted]) -> tuple[int, ...]:
        """Add clients that had to wait, clipped and with less weight where needed. Return those that stand out."""
        bounds: dict[int, Tensor] = {}
        clients, held, measured = [], set[int](), []
        for each in everyone:
            clients += each.clients
            held |= each.held
            if each.sizes is not None:
                measured.append(each.sizes)
        if self._clips and clients:
            assert self.guard is not None
            sizes, ordered = torch.cat(measured), [weights[client] for client in clients]
            waited = bool(self._held) or self.collective.size > 1
            if self._limits is None or (waited and self._num_judged < len(clients)):
                self._limits = self.guard.limits(sizes, ordered, clients)
            limits = self._limits.of(dict(zip(clients, ordered, strict=True)))
            limits = limits if self.guard.part == 1 else self.guard.left_of(limits, clients)
            if waited:
                beyond = (sizes > limits).flatten(1).any(1).tolist()
                for row, client in enumerate(clients):
                    if beyond[row] and client in held:
                        bounds[client] = limits[row]
                        if self.guard.leaves_out:
                            self._refused[client] = f"client {client}: {self.guard.why(limits[row], sizes[row])}"
                            self._weights.pop(client, None)
                            del weights[client]
                            continue
                        weights[client] *= self.guard.part_of(limits[row], sizes[row])
            self.guard.remember(torch.minimum(sizes, limits), limits, clients)
            self._held = [update for update in self._held if update.client not in self._refused]
        ready = []
        for update in self._held:
            weight, suspect, posterior = weights[update.client], update.client in bounds, update.posterior
            if suspect:
                assert self.guard is not None
                update = self.guard.clipped(update, bounds[update.client], self._sizes()[self._rows[update.client]])
                posterior = update.posterior  # the vectors are enough for sums
                posterior = posterior if isinstance(self.rule, SumRule) else posterior.owned()
            ready.append((update, posterior, weight))
            if suspect or len(ready) == FEWEST:  # few clipped vectors are held at once
                self._add_to_sums(ready)
                ready = []
        self._add_to_sums(ready)
        return tuple(sorted(bounds))

    def _merge(self, shares: Mapping[int, float], *others: Reduction) -> list[Statistics]:
        """Merge what all processes know of the clients' disagreement, their buffers, and ``others``."""
        for update in () if self._streams else self._held:
            self._buffers.add(update.buffers, shares[update.client])
        within = self._disagreement.statistics(self.collective.size > 1)
        apart = Reduction(within, self.previous.num_parameters, merge_disagreement, totals_only=True)
        parts = [apart, self._buffers.reduction(), *others]
        if self.collective.size == 1:
            return [each.own for each in parts]
        merged = merge_statistics(parts, self.collective)
        device = self.previous.flatten()[0].device
        return merged[:2] + [{name: value.to(device) for name, value in sums.items()} for sums in merged[2:]]

    def _weights_of(self, everyone: Sequence[Admitted]) -> dict[int, float]:
        """Return the weights of all clients. Normalised where updates were held back until all were known."""
        clients, values, facts = [], [], []
        for each in everyone:
            if each.error is not None:
                raise each.error
            clients += each.clients
            values += each.weights
            facts += each.facts
        if facts:
            facts.sort(key=lambda fact: fact.client)
            return dict(zip([fact.client for fact in facts], client_weights(self.weighting, facts), strict=True))
        if values and not self._streams and self.rule.uses_weights:
            values = weighing.normalised(values, self.weighting, len(clients))
        return dict(zip(clients, values, strict=True))

    def _add_to_sums(self, clients: Sequence[tuple[ClientUpdate, GaussianPosterior, float]]) -> None:
        """Add clients to all running sums: of each its update, its posterior as the guard left it, its weight."""
        if not self._by_pieces and not self._is_small and len(clients) > 1:  # hold one large flat vector at a time
            for each in clients:
                self._add_to_sums([each])
            return
        added = []
        for update, posterior, weight in clients:
            added.append((update.client, posterior if self._by_pieces else posterior.flattened(), weight))
        self._accumulator.add_checked(added, self._disagreement.add)
        for update, _, weight in clients:
            self._weights[update.client] = weight
            if self._streams:
                self._buffers.add(update.buffers, weight)


def guard_of(
    method: Method,
    shared: Shared,
    sent: Mapping[str, Tensor],
    previous: GaussianPosterior,
    probabilistic: Collection[str],
    counted_of: Callable[[int], Mapping[str, Tensor]],
    keeps: bool,
    options: tuple[Any, ...],
) -> Guard:
    """Return the guard of a round, by what its clients send. ``options`` are the bound and what follows of a guard."""
    bound, *others = options
    if method.totals:
        return SumsGuard(shared.posterior, bound, counted_of, keeps, *others)
    if method.adds:
        return SiteGuard(shared.posterior, method.slope(shared), bound, counted_of, *others)
    if not sent:
        return Guard(previous, probabilistic, *options)
    names = joined({}, {name: sent[name] for name in method.per_example})
    before = counted_of if method.sends_changes else None
    own = previous, probabilistic, *options
    return TensorsGuard(*own, sent=joined({}, sent), per_example=names, counted_of=before)


def mean_variance(posterior: GaussianPosterior) -> dict[str, float]:
    """Return the mean variance of the Gaussian parameters as it is logged. An empty dict for a point mass."""
    variances = [value.detach().double().flatten() for value in posterior.variance.values() if not is_zero(value)]
    return {"posterior_variance": float(torch.cat(variances).mean())} if variances else {}
