"""Aggregation of one round: client updates in, the fused posterior and its diagnostics out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, check_kind
from lightning_fedbayes.core.exchange import ALONE, Collective, Reduction, merge_statistics
from lightning_fedbayes.core.exchange.reduction import Statistics
from lightning_fedbayes.core.messages import ClientUpdate, check_mapping
from lightning_fedbayes.core.posterior import MOST_AT_ONCE, PIECE, GaussianPosterior, is_zero
from lightning_fedbayes.fusion import FusionAccumulator, FusionRule, RuleState, SumRule
from lightning_fedbayes.fusion.accumulator import check_finite, check_structure, fuse_distributed
from lightning_fedbayes.methods.method import PREFIX
from lightning_fedbayes.server.buffers import BufferAverage
from lightning_fedbayes.server.disagreement import Disagreement, merge_disagreement
from lightning_fedbayes.server.guard import FEWEST, MOST_MEASURED, MOST_MOVE, Guard, Limits, changed
from lightning_fedbayes.server.weighting import (
    PER_CLIENT,
    ClientFacts,
    CohortWeights,
    client_weights,
    effective_clients,
    normalised,
)


@dataclass(frozen=True)
class Aggregate:
    """Result of the aggregation of a round.

    Args:
        posterior: the new global posterior.
        buffers: the new global buffers, name → tensor of the buffer's dtype.
        weights: client → normalised weight ω, or the reliability that the rule infers.
        metrics: diagnostics of the fusion, name → value.
        inferred: True if the weights are reliabilities that the rule has inferred.
        excluded: client → why the rule left it out.
        state: the rule's state for the next round.
        outlying: clients whose updates stand out, so that they count only in part, see
            :mod:`lightning_fedbayes.server.guard`.
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
        weights: their weights, not normalised; empty where the weighting compares clients.
        facts: the clients' facts for such a weighting; otherwise empty.
        error: the reason why a weight cannot be computed.
        sizes: the sizes of their updates, see :mod:`lightning_fedbayes.server.guard`, shape (clients, kinds, tensors);
            None where nothing guards the round.
        refused: client → why its update does not count.
        held: those of the clients that are not added yet.
    """

    clients: tuple[int, ...]
    weights: tuple[float, ...] = ()
    facts: tuple[ClientFacts, ...] = ()
    error: FusionError | None = None
    sizes: Tensor | None = None
    refused: Mapping[int, str] = field(default_factory=dict)
    held: frozenset[int] = frozenset()


class Aggregation:
    """Collects the updates of a round and fuses them.

    With a sum-type rule and weights that look at one client at a time nothing is kept but sums.

    Args:
        rule: the fusion rule.
        weighting: a name, or a function of all clients' facts (see :mod:`lightning_fedbayes.server.weighting`).
        previous: the global posterior that the clients started from.
        buffers: the global buffers that the clients started from; None takes the first client's as the model of all.
        state: the rule's state after earlier rounds; None for the initial one.
        collective: the processes, each of which adds clients of its own; with several, ``buffers`` must be given.
        guard: refuses impossible variances and, unless the rule is robust by itself, bounds what one client can do;
            None: neither.
        adds: what clients send beside, under names that begin with "method/", is added up, not averaged.
    """

    def __init__(
        self,
        rule: FusionRule,
        weighting: str | CohortWeights,
        previous: GaussianPosterior,
        buffers: Mapping[str, Tensor] | None = None,
        state: RuleState | None = None,
        collective: Collective = ALONE,
        guard: Guard | None = None,
        adds: bool = False,
    ) -> None:
        check_kind("rule", rule, FusionRule, "give a rule object, such as get_rule('conflation')", error=FusionError)
        check_kind("previous", previous, GaussianPosterior, "give the global posterior", error=FusionError)
        check_mapping("buffers", {} if buffers is None else buffers, Tensor)
        self.rule = rule
        self.guard = guard
        self._adds = adds
        self.state = rule.init() if state is None else state
        self.weighting = weighting
        self.previous = previous
        self.collective = collective
        self._streams = isinstance(rule, SumRule) and isinstance(weighting, str) and weighting in PER_CLIENT
        self._accumulator = FusionAccumulator(rule, previous, relative=collective.size == 1)
        self._clips = guard is not None and not rule.resists
        points = previous.is_point_mass if guard is None else guard.is_deterministic
        self._by_pieces = points and previous.num_parameters > PIECE  # no client is copied into one vector
        waiting = 2 * FEWEST * previous.num_parameters
        self._is_small = waiting <= MOST_AT_ONCE and not self._by_pieces
        self._group = max(2 * FEWEST, MOST_MEASURED // max(1, previous.num_parameters)) if self._is_small else FEWEST
        self._held: list[ClientUpdate] = []
        self._unmeasured = 0  # of those held, the last ones
        self._weights: dict[int, float] = {}
        self._rows: dict[int, int] = {}  # client that is measured → its row in the sizes
        self._parts: list[Tensor] = []  # of the sizes, shape (clients, 4, tensors) each
        self._limits: Limits | None = None
        self._refused: dict[int, str] = {}
        self._num_judged, self._judge_at = 0, FEWEST  # clients that the limits know; that they are to know next
        self._buffers = BufferAverage(buffers, collective.size > 1, PREFIX if adds else None)
        borrows = self._by_pieces and guard is not None and collective.size == 1
        self._disagreement = Disagreement(borrows)

    def __len__(self) -> int:
        """Number of clients that this process has admitted."""
        return len(self._weights) if self._streams else len(self._held)

    def add(self, update: ClientUpdate) -> None:
        """Admit one client's update.

        Raises:
            FusionError: names or shapes are not those of the global model, a value is not finite, or a variance is not
                possible. The round is as it was before.
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
        if self.guard is not None:
            self.guard.check(posterior, who)
        if self._streams:
            weigh = PER_CLIENT[str(self.weighting)] if self.rule.uses_weights else None  # ω, not normalised
            self._weights[update.client] = 1.0 if weigh is None else weigh(ClientFacts.of(update, self.previous))
        if self._streams and not self._clips:
            self._fuse([(update, posterior, self._weights[update.client])])
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
        self._buffers.admit(update.buffers)

    def _judge(self) -> None:
        """Measure the clients that came since the last call, and add those that need no longer wait.

        The limits are set anew at 7 clients of this process (small networks: 14 or more), 14, 28, … A client that
        passes is then at most ``max_influence`` times as large as an honest one, as long as less than half of the
        clients so far are bad. Without outliers the sums are added up in the order of arrival.
        """
        assert self.guard is not None
        if self._unmeasured:
            recent = self._held[len(self._held) - self._unmeasured :]
            sizes = self.guard.sizes_of(recent, by_pieces=self._by_pieces)
            recent, sizes = self._without_absurd(recent, sizes)
            self._parts.append(sizes)
            self._rows.update((update.client, row) for row, update in enumerate(recent, start=len(self._rows)))
            self._unmeasured = 0
            if self._streams and self._limits is not None:
                self._release(sizes)
        if self._streams and len(self._rows) >= self._judge_at:
            self._num_judged, self._judge_at = len(self._rows), 2 * len(self._rows)
            self._limits = self.guard.limits(self._sizes, list(self._weights.values()))
            self._release(self._sizes[[self._rows[update.client] for update in self._held]])

    def _without_absurd(self, recent: list[ClientUpdate], sizes: Tensor) -> tuple[list[ClientUpdate], Tensor]:
        """Return the clients that were held last and their sizes, without those whose updates do not count at all."""
        assert self.guard is not None
        absurd = self.guard.absurd(recent, sizes)
        if not bool(absurd.any()):
            return recent, sizes
        refused = [update.client for update, is_absurd in zip(recent, absurd.tolist(), strict=True) if is_absurd]
        for client in refused:
            self._refused[client] = (
                f"client {client}: it moves the means by more than a factor of {MOST_MOVE:g}: check its training, or "
                "turn the guard off by safeguards=fb.Safeguards(max_influence=None)"
            )
            self._weights.pop(client, None)
        recent = [update for update in recent if update.client not in self._refused]
        self._held = [update for update in self._held if update.client not in self._refused]
        return recent, sizes[~absurd]

    @property
    def _sizes(self) -> Tensor:
        """The sizes of all clients that are measured."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        return self._parts[0]

    def _release(self, sizes: Tensor) -> None:
        """Add those of the last clients that wait, whose ``sizes`` are given, that are within the limits."""
        assert self._limits is not None
        first = len(self._held) - len(sizes)  # those before have been found to be beyond
        recent, self._held = self._held[first:], self._held[:first]
        beyond = sizes > self._limits.of({update.client: self._weights[update.client] for update in recent})
        ready = []
        for update, suspect in zip(recent, beyond.flatten(1).any(1).tolist(), strict=True):
            if suspect:
                # memory of its own: until now it was a row of a stack of many clients
                own = update.posterior.owned() if self._is_small else update.posterior
                self._held.append(changed(update, posterior=own, buffers=dict(update.buffers)))
            else:
                ready.append((update, update.posterior, self._weights[update.client]))
        self._fuse(ready)

    def admitted(self) -> Admitted:
        """Return what the other processes must know of this one's clients before :meth:`finish`."""
        if self._clips:
            self._judge()
        known: dict[str, Any] = {
            "sizes": self._sizes if self._rows else None,
            "refused": self._refused,
            "held": frozenset(update.client for update in self._held),
        }
        if self._streams:
            return Admitted(tuple(self._weights), tuple(self._weights.values()), **known)
        clients = tuple(update.client for update in self._held)
        if not self.rule.uses_weights:
            return Admitted(clients, (1.0,) * len(clients), **known)
        facts = [ClientFacts.of(update, self.previous) for update in self._held]
        if isinstance(self.weighting, str) and self.weighting in PER_CLIENT:
            one = PER_CLIENT[self.weighting]
            try:
                return Admitted(clients, tuple(one(fact) for fact in facts), **known)
            except FusionError as error:
                return Admitted(clients, error=error)
        if self.collective.size > 1:
            before = self.previous.to("cpu")
            facts = [replace(fact, posterior=fact.posterior.to("cpu"), previous=before) for fact in facts]
        return Admitted(clients, facts=tuple(facts), **known)

    def finish(self, everyone: Sequence[Admitted] | None = None) -> Aggregate:
        """Fuse the clients of all processes; the result is the same in each.

        Args:
            everyone: the :meth:`admitted` clients of each process; None: they are exchanged now.

        Raises:
            FusionError: the weights cannot be used, or the rule cannot fuse these posteriors.
        """
        everyone = self.collective.all_gather(self.admitted()) if everyone is None else everyone
        weights = dict(sorted(self._weights_of(everyone).items()))
        outlying = self._fuse_held(weights, everyone)
        several = self.collective.size > 1
        total = sum(weights.values()) if several else self._accumulator.total
        self._accumulator.check_not_empty(total)
        state, shares = self.state, shares_of(weights, {})
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
            shares = shares_of(weights, fused.reliability)
            apart, buffers = self._merge(shares)
        check_finite(fused.posterior, "the fused posterior")
        refused = {client: why for each in everyone for client, why in each.refused.items()}
        counted = [] if self.guard is None else [self.guard.counted]
        counted = self.collective.all_gather(counted[0]) if counted and self._adds else counted
        apart_within = float(apart.get("disagreement", 0.0)) + float(apart["within"])
        return Aggregate(
            fused.posterior,
            buffers=self._buffers.averages(buffers, sum(weights.values()) if self._streams else 1.0),
            weights=shares,
            metrics={
                "effective_clients": effective_clients(list(shares.values())),
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

    def _fuse_held(self, weights: dict[int, float], everyone: Sequence[Admitted]) -> tuple[int, ...]:
        """Add the clients that had to wait until all were known, in the order of arrival, clipped where needed.

        Returns: the clients of all processes that stand out; ``weights`` has what they weigh then.
        """
        outlying: tuple[int, ...] = ()
        bounds: dict[int, Tensor] = {}
        measured = [each.sizes for each in everyone if each.sizes is not None]
        if self._clips and measured:
            assert self.guard is not None
            sizes = torch.cat(measured)
            clients = [client for each in everyone for client in each.clients]
            ordered = [weights[client] for client in clients]
            waited = bool(self._held) or self.collective.size > 1
            if self._limits is None or (waited and self._num_judged < len(clients)):
                self._limits = self.guard.limits(sizes, ordered, clients)
            limits = self._limits.of(dict(zip(clients, ordered, strict=True)))
            if waited:
                held = frozenset[int]().union(*(each.held for each in everyone))
                beyond = (sizes > limits).flatten(1).any(1).tolist()
                rows = [row for row, client in enumerate(clients) if beyond[row] and client in held]
                bounds = {clients[row]: limits[row] for row in rows}
                outlying = tuple(sorted(bounds))
                for row in rows:
                    weights[clients[row]] *= self.guard.part_of(limits[row], sizes[row])
            self.guard.remember(torch.minimum(sizes, limits), ordered, clients)
        ready = []
        for update in self._held:
            weight, suspect, posterior = weights[update.client], update.client in bounds, update.posterior
            if suspect:
                assert self.guard is not None
                sizes = self._sizes[self._rows[update.client]]
                update = self.guard.clipped(update, bounds[update.client], sizes)
                posterior = update.posterior  # the vectors are enough for sums
                posterior = posterior if isinstance(self.rule, SumRule) else posterior.owned()
            ready.append((update, posterior, weight))
            if suspect or len(ready) == FEWEST:  # few clipped vectors are held at once
                self._fuse(ready)
                ready = []
        self._fuse(ready)
        return outlying

    def _merge(self, shares: Mapping[int, float], *others: Reduction) -> list[Statistics]:
        """Merge what all processes know of the clients' disagreement, their buffers, and ``others``."""
        for update in () if self._streams else self._held:
            self._buffers.add(update.buffers, shares[update.client])
        own = self._disagreement.statistics(self.collective.size > 1)
        apart = Reduction(own, self.previous.num_parameters, merge_disagreement, totals_only=True)
        merged = merge_statistics([apart, self._buffers.reduction(), *others], self.collective)
        if self.collective.size > 1:
            device = self.previous.flatten()[0].device
            merged[2:] = [{name: value.to(device) for name, value in sums.items()} for sums in merged[2:]]
        return merged

    def _weights_of(self, everyone: Sequence[Admitted]) -> dict[int, float]:
        """Return the weights of all clients; normalised where updates were held back until all were known."""
        for each in everyone:
            if each.error is not None:
                raise each.error
        clients = [client for each in everyone for client in each.clients]
        values = [weight for each in everyone for weight in each.weights]
        facts = sorted((fact for each in everyone for fact in each.facts), key=lambda fact: fact.client)
        if facts:
            return dict(zip([fact.client for fact in facts], client_weights(self.weighting, facts), strict=True))
        if values and not self._streams and self.rule.uses_weights:
            values = normalised(values, self.weighting, len(clients))
        return dict(zip(clients, values, strict=True))

    def _fuse(self, clients: Sequence[tuple[ClientUpdate, GaussianPosterior, float]]) -> None:
        """Add admitted clients to all running sums: of each its update, its posterior as the guard left it, its weight.

        A large network with variances is summed up client by client, so that one flat vector is held at a time.
        """
        if not self._by_pieces and not self._is_small and len(clients) > 1:  # one flat vector at a time
            for each in clients:
                self._fuse([each])
            return
        if not self._by_pieces:
            clients = [(update, posterior.flattened(), weight) for update, posterior, weight in clients]
        self._accumulator.add_checked(
            [(update.client, posterior, weight) for update, posterior, weight in clients], self._disagreement.add
        )
        for update, _, weight in clients:
            self._weights[update.client] = weight
            if self._streams:
                self._buffers.add(update.buffers, weight)


def mean_variance(posterior: GaussianPosterior) -> dict[str, float]:
    """Return the mean variance of the Gaussian parameters as it is logged; nothing of a point mass."""
    variances = [value.detach().flatten() for value in posterior.variance.values() if not is_zero(value)]
    return {"posterior_variance": float(torch.cat([each.double() for each in variances]).mean())} if variances else {}


def shares_of(weights: Mapping[int, float], reliability: Mapping[int, float]) -> dict[int, float]:
    """Return each client's share of the fusion: its normalised weight, or its reliability if the rule infers one."""
    if reliability:
        return {client: reliability.get(client, 0.0) for client in weights}
    total = sum(weights.values())
    return {client: weight / total for client, weight in weights.items()}
