"""The server of a federation: it begins a round, admits the clients' updates, and fuses them."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from lightning_fedbayes.core.errors import FederationError, FusionError, check_at_least, check_kind, listed, sendable
from lightning_fedbayes.core.exchange import ALONE, Collective
from lightning_fedbayes.core.messages import (
    EPSILONS,
    SCALE,
    ClientFailure,
    ClientOutcome,
    ClientUpdate,
    bytes_of,
    check_mapping,
)
from lightning_fedbayes.core.posterior import PIECE, GaussianPosterior, check_posterior
from lightning_fedbayes.fusion import FusionRule, RuleState
from lightning_fedbayes.fusion.accumulator import check_finite
from lightning_fedbayes.fusion.auto import AutoFusion, candidates
from lightning_fedbayes.methods import Late, Method, Shared, get_method
from lightning_fedbayes.methods.method import joined, split
from lightning_fedbayes.server.aggregation import Admitted, Aggregate, Aggregation, guard_of, mean_variance
from lightning_fedbayes.server.guard import FEWEST, USUAL, Guard, Safeguards, probabilistic_names
from lightning_fedbayes.server.plan import RoundPlan
from lightning_fedbayes.server.versions import Versions, check_network, check_state, moved
from lightning_fedbayes.server.weighting import CohortWeights, check_weighting

HELD_OUT_LOSS = "held_out_loss/"
"""Prefix of the figures of a round that hold a candidate's loss on held-out data."""
Scorer = Callable[[Aggregate, "Sequence[Any]"], float]
"""Loss of a candidate on held-out data, of (its result, the notes of all processes)."""


@dataclass(frozen=True)
class RoundResult:
    """Result of a round, numbered from 0.

    Args:
        posterior, buffers: the global model after it: the fused one, or the old one if the round failed.
        aggregate: everything that the fusion gave. None if the round failed.
        refusal: the reason why the rule could not fuse the updates. None if it could, or if there were too few.
        outcomes: one per client that sent an update or a failure.
        figures: diagnostics, counts, time and traffic, name → value: the round's row of the history, in which
            "round" counts from 1.
        notes: the note of each process (see :meth:`Server.finish`).
        bounded: client → how many examples it says and counts as, where these differ for the first time.
    """

    round: int
    posterior: GaussianPosterior
    buffers: Mapping[str, Tensor]
    aggregate: Aggregate | None
    refusal: FusionError | None
    outcomes: tuple[ClientOutcome, ...]
    figures: dict[str, float]
    notes: tuple[Any, ...] = ()
    bounded: Mapping[int, str] = field(default_factory=dict)

    @property
    def success(self) -> bool:
        """True if the updates were fused."""
        return self.aggregate is not None

    @property
    def weights(self) -> dict[int, float]:
        """Client → its share of the fusion: its weight, or the reliability that the rule infers."""
        return {} if self.aggregate is None else self.aggregate.weights

    @property
    def excluded(self) -> dict[int, str]:
        """Client → why the rule left it out of the fusion."""
        return {} if self.aggregate is None else self.aggregate.excluded


class Server:
    """Holds the global posterior, and makes a new one of the clients' updates in every round.

    ::

        server = Server(posterior, fusion="reverse_kl_barycenter")
        for round in range(10):
            server.begin(RoundPlan(round, cohort=(0, 1, 2)))
            for client in (0, 1, 2):
                server.admit(ClientUpdate(client, num_examples, posterior_of(client)))
            result = server.finish()

    Several threads may call :meth:`admit`. It takes in one update at a time. Sums are added up in the order of arrival,
    on which their last digits depend.

    The server does not train. Its caller trains the clients of the cohort from ``server.posterior`` and brings their
    updates. A rule that draws random numbers draws from torch's global generator: seed it before :meth:`finish`. Raises
    FusionError or FederationError if an argument cannot be used.

    Args:
        posterior, buffers: the global model to start from: posterior, and buffers (BatchNorm's statistics) by name.
        fusion: name of a method or fusion rule, a :class:`~lightning_fedbayes.Method`, a rule object, or an
            :class:`~lightning_fedbayes.fusion.AutoFusion`.
        weighting: see :class:`~lightning_fedbayes.FederatedBayes`.
        safeguards: quorum, rounds that may fail in a row before :meth:`finish` raises, and the bound on one client.
        collective: the processes that share the clients of a round. Each has a server, and all hold the same posterior.
        counted_of: returns what has been counted of a client's site, where the caller keeps it. Empty if there is
            none. None: the server keeps all of them.
        late: how averages take messages about an older global model. None: all are about the present one.

    Attributes:
        posterior, buffers: the global model after the last round. The buffers hold the method's tensors, too, under
            names that begin with "method/".
        method: the federated method. Its hooks for clients take what :meth:`begin` returns.
        rounds, failed_rounds: the number of the round after the last finished one, and of failed rounds in a row.
        history: one dict of figures per finished round, in order. Its "round" counts from 1.
        accepted: client → the round, from 1, in which it trained its last update that counted. Missing before.
        rule_states: the state of each rule after the rounds so far, by its name.
        sites: client → what has been counted of its site or control variate, by the names that it keeps. Empty without
            sites, without a ``max_influence``, and where the caller keeps them.
        untold: clients that have to keep what :attr:`sites` holds, because something else was counted than they sent,
            or they were late, or have lost their sites. A client leaves when its next update counts in full.
        versions: brings late messages to the present global model. None without ``late``.
    """

    def __init__(
        self,
        posterior: GaussianPosterior,
        buffers: Mapping[str, Tensor] | None = None,
        *,
        fusion: str | FusionRule | AutoFusion | Method = "reverse_kl_barycenter",
        weighting: str | CohortWeights = "train_size",
        safeguards: Safeguards = USUAL,
        collective: Collective = ALONE,
        counted_of: Callable[[int], Mapping[str, Tensor]] | None = None,
        late: Late | None = None,
    ) -> None:
        check_posterior(posterior, "posterior")
        check_mapping("buffers", {} if buffers is None else buffers, Tensor)
        check_weighting(weighting)
        check_kind("safeguards", safeguards, Safeguards, "give fb.Safeguards(...)")
        self.posterior = posterior
        self.method = get_method(fusion)
        check_kind("late", late, Late | None, "give fb.methods.FedBuff() or fb.methods.FedAsync()")
        self.versions = None if late is None else Versions(self.method, late, posterior)
        self.buffers: Mapping[str, Tensor] = joined({} if buffers is None else buffers, self.method.init(posterior))
        self.rules = candidates(self.method.rule)
        self.weighting, self.safeguards, self.collective = weighting, safeguards, collective
        self.rounds, self.failed_rounds = 0, 0
        self.history: list[dict[str, float]] = []
        self.accepted: dict[int, int] = {}
        self.sites: dict[int, Mapping[str, Tensor]] = {}
        self.untold: set[int] = set()
        self._memory: Mapping[str, Tensor] = {}
        self._counted_of = counted_of
        self.rule_states: dict[str, RuleState] = {name: rule.init() for name, rule in self.rules.items()}
        self._probabilistic = probabilistic_names(posterior)
        self._plan: RoundPlan | None = None
        self._shared = Shared(posterior)
        self._aggregations: dict[str, Aggregation] = {}
        self._hearing: Guard | None = None  # the guard, if it bounds numbers of examples
        self._watches, self._part = False, 1.0  # whether answers are compared; share of all clients in a fusion
        self._bounded: set[int] = set()
        self._outcomes: dict[int, ClientOutcome] = {}
        self._started: dict[int, int] = {}
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    # -- a round -------------------------------------------------------------------------------------------------------

    def begin(self, plan: RoundPlan) -> Shared:
        """Begin the round of ``plan``, and forget an unfinished one. Return what clients need for :attr:`method`."""
        check_kind("plan", plan, RoundPlan, "give a RoundPlan(round, cohort)")
        self._plan = plan
        own, tensors = split(self.buffers)
        share, is_new, method = plan.share, not self.accepted, self.method
        self._shared = Shared(self.posterior, tensors, share, is_new)
        if self.versions is not None:
            self.versions.begun[plan.round] = self._shared
        self._outcomes, self._started = {}, {}
        self._start, self._bytes_before = time.perf_counter(), self.collective.bytes_sent
        sent = {name: tensors[name] for name in method.sent or tensors} if method.sends else {}
        previous, bound, guard = self.posterior, self.safeguards.max_influence, None
        self._part = 1.0 if self.versions is None else len(plan.cohort) * share  # of a round's clients
        if method.sends_means:
            previous = GaussianPosterior.point_mass(previous.mean)
        if previous.num_parameters <= PIECE or not previous.is_point_mass:  # else it is not needed as one vector
            previous = previous.flattened()
        if bound is not None:
            if is_new:
                self.sites, self.untold = {}, set()
            counted_of = self._counted_of or (lambda client: self.sites.get(client, {}))
            options = bound, self._memory, share == 1, self._part
            of_round = previous, self._probabilistic, counted_of, self._counted_of is None
            guard = guard_of(method, self._shared, sent, *of_round, options)
        self._hearing = None if method.adds or method.totals else guard
        self._watches = self._hearing is not None and not method.own_starts and share * FEWEST <= 1
        own = {name: value for name, value in own.items() if not name.startswith(SCALE)}  # clients do not change it
        expected = joined(own, sent)
        options = self.collective, guard, method.adds, partial(method.doubt, self._shared) if sent else None
        self._aggregations = {
            name: Aggregation(rule, self.weighting, previous, expected, self.rule_states[name], *options)
            for name, rule in self.rules.items()
        }
        self.hear({})
        return self._shared

    def hear(self, examples: Mapping[int, int]) -> None:
        """Take the numbers of ``examples`` that the round's clients say they have, before their first update.

        With weighting="train_size" none counts as more than ``max_influence`` times their median. Otherwise the server
        compares with what clients said last. Raise FederationError once an update is admitted.
        """
        check_kind("examples", examples, Mapping, "give a dict, client → number of examples")
        if self._plan is None or self._outcomes:
            raise FederationError("hear takes numbers of examples between begin and the first admit of a round")
        if self._hearing is not None:
            self._hearing.hear(examples)
            for each in self._aggregations.values():
                if self.weighting == "train_size" and each.rule.uses_weights:
                    each.most_weight = self._hearing.most_examples

    @property
    def is_new(self) -> bool:
        """True until a round has been fused by this method."""
        return not self.accepted

    def admit(self, update: ClientUpdate | ClientFailure, started: int | None = None) -> ClientOutcome:
        """Take in a client's update. One that cannot be used is left out of the round.

        It cannot be used if its names, shapes or buffers differ from the global model's, if a value is not finite, or
        if its client is not in the cohort or has sent one already. ``outcome.error`` says why. The tensors are read
        here: they may be overwritten afterwards. A message may be late: it was ``started`` in an earlier round.
        """
        check_kind("update", update, ClientUpdate | ClientFailure, "give a ClientUpdate or a ClientFailure")
        check_at_least("started", 0 if started is None else started, 0)
        with self._lock:
            if self._plan is None:
                raise FederationError("no round has begun: call begin(RoundPlan(round, cohort)) before admit")
            client, size, error = update.client, 0, None
            if client not in self._plan.members or client in self._outcomes:
                known = "has been heard in this round" if client in self._outcomes else "is not in the cohort"
                refusal = FusionError(f"client {client} {known}; a client of the cohort sends one update in a round")
                return ClientOutcome(client, refusal, update.seconds, update.num_examples)
            if isinstance(update, ClientFailure):
                outcome = ClientOutcome(client, update.error, update.seconds, update.num_examples)
            else:
                sent, before = update, self._shared
                try:
                    if self.versions is not None and started is not None:
                        before = self.versions.begun.get(started, before)
                        update = self.versions.taken(update, started, self._shared, self._plan.round, self.buffers)
                        self._started[client] = started
                    if self._hearing is not None and self._watches:
                        self._hearing.watch(sent, before.posterior)
                    for aggregation in self._aggregations.values():
                        aggregation.add(update)
                    size = sent.num_bytes
                except FusionError as refusal:
                    error = refusal
                outcome = ClientOutcome(client, error, update.seconds, update.num_examples, size, update.metrics)
            self._outcomes[client] = outcome
            return outcome

    def finish(self, score: Scorer | None = None, note: Any = None) -> RoundResult:
        """Fuse the round's updates. Keep the old posterior if there are too few or the rule cannot fuse them.

        Processes that share the clients exchange the outcomes of their clients here, with a ``note`` to the others,
        then what the fusion needs. An ``AutoFusion`` needs the ``score``: the loss of a candidate on held-out data.
        Raise FederationError, in the state after the round, if as many in a row as ``safeguards`` allow have failed.
        """
        if self._plan is None:
            raise FederationError("no round has begun: call begin(RoundPlan(round, cohort)) before finish")
        own = list(self._outcomes.values())
        if self.collective.size > 1:
            own = [replace(each, error=each.error and sendable(each.error)) for each in own]
        admitted = {name: aggregation.admitted() for name, aggregation in self._aggregations.items()}
        outcomes, everyone, notes, answers, refused, count = [], [], [], [], {}, 0
        mine = own, admitted, note, {} if self._hearing is None else self._hearing.heard
        for heard, known, said, answered in [mine] if self.collective.size == 1 else self.collective.all_gather(mine):
            outcomes += heard
            everyone.append(known)
            notes.append(said)
            answers.append(answered)
            count += len(next(iter(known.values())).clients)
            for each in known.values():
                refused.update(each.refused)  # updates that turn out not to count, now that all are known
        if self.collective.size > 1:
            outcomes.sort(key=lambda outcome: outcome.client)
        aggregate, refusal, losses, opposed = None, None, {}, {}
        if self._hearing is not None and self._watches:
            found, num = self._hearing.compare(answers), len(self._plan.cohort)
            opposed = found if all(each.waits(num) for each in self._aggregations.values()) else {}
        if count >= self.safeguards.min_clients:
            try:
                fused, losses = self._aggregate(everyone, opposed, score, notes)
                aggregate = self._moved(fused)
            except FusionError as error:
                refusal = error
        refused |= opposed if aggregate is None else aggregate.refused
        if refused:
            errors = {client: FusionError(why) for client, why in refused.items()}
            outcomes = [replace(each, error=each.error or errors.get(each.client)) for each in outcomes]
        valid = [outcome for outcome in outcomes if outcome.error is None]
        most = min(each.most_weight for each in self._aggregations.values())
        claims = {c.client: c.num_examples for c in valid if c.num_examples > most and c.client not in self._bounded}
        self._bounded |= claims.keys()
        if self._hearing is not None and aggregate is not None:
            self._hearing.hear({each.client: each.num_examples for each in valid}, is_last=True)
        if aggregate is not None or opposed:
            guard = next(iter(self._aggregations.values())).guard
            self._memory = {} if guard is None else guard.memory
        if aggregate is not None:
            if self._counted_of is None:
                self.sites |= aggregate.counted
                late = {client for client, started in self._started.items() if started < self._plan.round}
                told = late.union(aggregate.outlying) & self.sites.keys()
                self.untold = (self.untold - aggregate.counted.keys()) | told
            fused = aggregate.posterior
            self.posterior = fused.marked(True) if self.posterior.linearised else fused
            self.buffers = {**self.buffers, **aggregate.buffers}
        self.rounds = self._plan.round + 1
        self.failed_rounds = 0 if aggregate is not None else self.failed_rounds + 1
        if aggregate is not None:
            self.accepted |= {each.client: 1 + self._started.get(each.client, self._plan.round) for each in valid}
        figures = {
            "round": float(self.rounds),
            **({} if aggregate is None else aggregate.metrics),
            **{f"{HELD_OUT_LOSS}{name}": loss for name, loss in losses.items()},
            **self._figures(outcomes, valid, 0 if aggregate is None else len(aggregate.excluded)),
        }
        self.history.append(figures)
        round, self._plan, self._aggregations = self._plan.round, None, {}
        if self.failed_rounds * self._part >= self.safeguards.max_failed_rounds:
            raise self.failure(refusal, outcomes)
        bounded = {client: f"says {number:,}, counts as {most:,g}" for client, number in claims.items()}
        return RoundResult(
            round, self.posterior, self.buffers, aggregate, refusal, tuple(outcomes), figures, tuple(notes), bounded
        )

    def _aggregate(
        self, admitted: Sequence[Mapping[str, Admitted]], opposed: Mapping[int, str], score: Scorer | None, notes: Any
    ) -> tuple[Aggregate, dict[str, float]]:
        """Return the rule's result, or the one of least held-out loss, and all losses. Raise FusionError for none."""
        results: dict[str, Aggregate] = {}
        losses: dict[str, float] = {}
        states = dict(self.rule_states)
        reason = "no candidate has a finite loss on the validation data"
        for name, aggregation in self._aggregations.items():
            try:
                results[name] = aggregation.finish([each[name] for each in admitted], opposed)
            except FusionError as error:
                if len(self.rules) == 1:
                    raise
                reason = str(error)
                continue
            states[name] = results[name].state
            if len(self.rules) > 1:
                assert score is not None, "an AutoFusion needs finish(score=...)"
                losses[name] = score(results[name], notes)
        best = next(iter(results), "")
        if len(self.rules) > 1:
            losses = self.collective.broadcast(losses)
            finite = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
            if not finite:
                raise FusionError(f"fusion='auto': none of {listed(self.rules)} can be used: {reason}")
            best = min(finite, key=lambda name: finite[name])
        self.rule_states = states
        return results[best], losses

    def _moved(self, aggregate: Aggregate) -> Aggregate:
        """Return the round's result as the method makes it of the rule's and of the tensors that clients sent."""
        buffers, averages = split(aggregate.buffers)
        heard = self._shared.share * sum(weight > 0 for weight in aggregate.weights.values())
        posterior, tensors = self.method.fuse(self._shared, aggregate.posterior, averages, heard)
        if posterior is not aggregate.posterior:
            check_finite(posterior, "the fused posterior")
        figures = {**aggregate.metrics, **({} if posterior is aggregate.posterior else mean_variance(posterior))}
        figures |= self.method.figures(self._shared, posterior, tensors)
        return replace(aggregate, posterior=posterior, buffers=joined(buffers, tensors), metrics=figures)

    def _figures(
        self, outcomes: Sequence[ClientOutcome], valid: Sequence[ClientOutcome], excluded: int
    ) -> dict[str, float]:
        told = {name: self._shared.tensors[name] for name in self.method.told or self._shared.tensors}
        figures = {
            "valid_clients": float(len(valid)),
            "failed_clients": float(len(outcomes) - len(valid)),
            "excluded_clients": float(excluded),
            "failed_rounds": float(self.failed_rounds),
            "seconds": time.perf_counter() - self._start,
            "megabytes_down": (self.posterior.num_bytes + bytes_of(told)) * len(outcomes) / 1e6,
            "megabytes_up": sum(outcome.num_bytes for outcome in valid) / 1e6,
        }
        if self.collective.size > 1:
            figures["megabytes_between_processes"] = (self.collective.bytes_sent - self._bytes_before) / 1e6
        trained = [each for each in valid if math.isfinite(each.metrics.get("train_loss", math.nan))]
        for name in ("train_loss", "added_loss"):
            if any(name in each.metrics for each in trained):
                total = sum(each.metrics.get(name, 0.0) * each.num_examples for each in trained)
                figures[name] = total / sum(each.num_examples for each in trained)
        for name in EPSILONS:  # over Flower, where each client keeps its account
            spent = [each.metrics[name] for each in outcomes if name in each.metrics]
            figures |= {name: max(spent)} if spent else {}
        return figures

    def failure(self, refusal: FusionError | None, outcomes: Sequence[ClientOutcome]) -> FederationError:
        """Return the error that ends a run after failed rounds, with the reason of the last one."""
        failed = [outcome.error for outcome in outcomes if outcome.error is not None]
        cause = refusal or (failed[0] if failed else FusionError("no client has sent an update"))
        too_few = f"had fewer than min_clients={self.safeguards.min_clients} valid updates"
        rounds = f"{self.failed_rounds} round{'s' if self.failed_rounds > 1 else ''} in a row"
        what = f"{rounds} {'could not be fused' if refusal else too_few}; the global posterior of the last good round"
        said = "The rule says" if refusal else "The first failure of this round was"
        error = FederationError(f"{what} is kept. {said} {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last finished round: tensors, numbers, strings, and dicts and lists of them."""
        return {
            "rounds": self.rounds,
            "posterior": self.posterior.state_dict(),
            "buffers": dict(self.buffers),
            "failed_rounds": self.failed_rounds,
            "history": list(self.history),
            "accepted": dict(self.accepted),
            "rule_states": dict(self.rule_states),
            "sites": {client: dict(kept) for client, kept in self.sites.items()},
            "untold": sorted(self.untold),
            "guard": dict(self._memory),
            "begun": {} if self.versions is None else self.versions.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave. A rule that the stored federation did not have starts new.

        Raise FederationError, FusionError or PosteriorError if a part is wrong, or it is of another network.
        """
        check_state(state)
        device = next(iter(self.posterior.mean.values())).device
        stored = GaussianPosterior.from_state_dict(state["posterior"]).to(device)
        check_network(stored, self.posterior)
        known = {name: kept for name, kept in state["rule_states"].items() if name in self.rules}
        for name, kept in known.items():
            self.rules[name].check_state(kept, sum(value.numel() for value in stored.mean.values()))
        known, sites = moved((known, dict(state["sites"])), device)
        self.posterior = stored.marked(stored.linearised or self.posterior.linearised)
        own, tensors = split({name: value.to(device) for name, value in state["buffers"].items()})
        first = split(self.buffers)[1]
        self.buffers = joined(own, tensors if tensors.keys() == first.keys() else first)
        self.failed_rounds = state["failed_rounds"]
        self.rounds = state["rounds"]
        self.history = list(state["history"])
        self.accepted = dict(state["accepted"])
        self.sites = sites
        self.untold = set(state["untold"])
        self._memory = dict(state["guard"])
        if self.versions is not None:
            self.versions.load_state_dict(state["begun"], device)
        self.rule_states = {**self.rule_states, **known}
