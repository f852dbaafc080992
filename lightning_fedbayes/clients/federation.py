"""Rounds of a federation in one process or in its share of several: an engine trains, a server fuses."""

import gc
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_fedbayes.clients.engine import Engine, Results
from lightning_fedbayes.clients.evaluation import held_out_loss, kept_attributes, own_hook
from lightning_fedbayes.clients.settings import FederationSettings, Sending
from lightning_fedbayes.clients.states import ClientState, InFlight
from lightning_fedbayes.core.errors import FederationError, FusionError, is_whole, listed, nearest, shown
from lightning_fedbayes.core.exchange import ALONE, Collective
from lightning_fedbayes.core.messages import ClientFailure, ClientOutcome, ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.seeding import derive_seed, seed_everything
from lightning_fedbayes.fusion.auto import AutoFusion
from lightning_fedbayes.methods.method import joined, split
from lightning_fedbayes.server import RoundResult, Scorer, Server
from lightning_fedbayes.server.aggregation import Aggregate
from lightning_fedbayes.server.plan import STRIDE, RoundPlan, share_of
from lightning_fedbayes.server.schedule import ENDED

Stage = Literal["between", "training", "fused"]
MOST_HELD = 2**24
"""Bytes of clients' posteriors in earlier federations from which on a new one collects those that are over.

A Trainer, its module and its callbacks refer to each other, and Python collects such by number, not by bytes.
"""
HELD: "WeakKeyDictionary[Federation, int]" = WeakKeyDictionary()


@dataclass(frozen=True)
class ProcessNote:
    """Note of one process to the others: results of its clients (None if it is the only one), posteriors, ``extra``."""

    trained: Results | None
    sent: Mapping[int, GaussianPosterior]
    extra: Any


class Federation:
    """Drives an engine and a server through the rounds of a federation.

    A round: :meth:`begin`. The loop trains the clients through ``engine``, and passes what ``engine.end_batch`` returns
    to :meth:`receive`, which brings it to ``Server.admit``. When :attr:`is_complete`, :meth:`finish` (under a schedule
    after :meth:`land`) lets ``Server.finish`` fuse, and loads the result by ``ResidentModel.load_posterior``.

    Args:
        settings, engine: of the federation. The engine trains the clients and holds the resident network.
        collective: the processes that share the clients of a round.
        held_out: returns the batches that an ``AutoFusion`` scores its candidates with.

    Attributes:
        server: holds the global posterior, the history and the rule's state.
        stage: "between" rounds, "training" clients, or "fused": the round is done, even if it failed, but the epoch is
            not.
        plan, round: of the last round that was begun, None and −1 before it. ``share`` is this process's part.
        result: of the last round that :meth:`finish` has ended. None before, and after an error.
        in_flight: messages under way, where there is a schedule. Empty between rounds.
    """

    def __init__(
        self,
        settings: FederationSettings,
        engine: Engine,
        collective: Collective = ALONE,
        held_out: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        model = engine.model
        self.settings, self.engine, self.held_out = settings, engine, held_out
        start = model.read_posterior().clone(), model.federated_buffers
        if sum(HELD.values()) > MOST_HELD:
            gc.collect()
        HELD[self] = start[0].num_bytes * len(engine.names)
        options = {**settings.server_options(), "counted_of": lambda client: engine.states.of(client).kept}
        self.server = Server(*start, collective=collective, **options)
        self.stage: Stage = "between"
        self.plan: RoundPlan | None = None
        self.round = -1
        self.share = RoundPlan(-1, ())
        self.result: RoundResult | None = None
        self._is_shared = engine.log.is_shared = engine.states.is_shared = collective.size > 1
        self._received = 0
        self._falsify: Callable[[ClientUpdate | None], Iterable[ClientUpdate | ClientFailure]] | None = None
        self._not_kept: dict[str, Exception] = {}
        self._sent: dict[int, GaussianPosterior] = {}
        self.in_flight = InFlight()
        self._secret: str = collective.all_gather(secrets.token_hex(32))[0]  # of the noise of privacy
        engine.show_states()

    def begin(self, plan: RoundPlan) -> None:
        """Begin the round of ``plan``: the clients start from the global posterior.

        It is the module's present one: changes that hooks made between rounds take effect. Raise FederationError if the
        log of a replayed federation has ended, or parameters that were frozen train now, and the rule remembers rounds
        without them.
        """
        if plan.turn is ENDED:
            raise FederationError(f"replay= ends after {plan.round} fusions: give so many rounds at most")
        if self.engine.model.frozen and self.engine.model.join():  # what was frozen trains now
            if any(self.server.rule_states.values()) or split(self.server.buffers)[1]:
                raise FederationError(
                    f"parameters that were frozen train from round {self.round + 2} on, and "
                    f"fusion='{self.server.method.name}' remembers the rounds before: let them require gradients "
                    "when the fit begins and freeze them in on_train_epoch_start, or take a rule without a memory"
                )
            self.server.posterior = self.engine.model.read_posterior().clone()
        self.take_over()
        collective, module = self.server.collective, self.engine.model.module
        self.plan, self.round = plan, plan.round
        self.share = share_of(plan, collective.rank, collective.size)
        self.stage = "training"
        self.engine.begin_method(self.server.begin(plan.heard))
        self.server.hear({client: self.engine.sizes[client] for client in plan.heard.cohort})
        if self._is_shared:
            self._wait_for_states()
        advice = self.server.method.advice(self.server.posterior, plan.round, plan.clients)
        if advice is not None and self.settings.posterior is None:
            rank_zero_info(advice)
        if self.settings.adversaries is not None:
            names, seed = tuple(self.engine.names), self.settings.seed
            self._falsify = self.settings.adversaries(Sending(plan.senders, self.server.posterior, names, seed))
        self._received, self._not_kept, self._sent = 0, {}, {}
        self._keeps_clients = bool(getattr(module, "needs_client_posteriors", False))
        self.engine.begin_round(self.share)

    def take_over(self) -> None:
        """Make the module's present parameters and buffers the global model, if a hook has changed them."""
        model = self.engine.model
        if self.engine.shows_states:
            self._take_over_states()
        if model.has_changed():
            model.remember_global()
            self.server.posterior = model.read_posterior().clone()
            self.server.buffers = joined(model.federated_buffers, split(self.server.buffers)[1])

    def _take_over_states(self) -> None:
        """Let clients, and those with messages under way, keep the optimizers' states as hooks have changed them."""
        change = self.engine.take_over_states()
        if change is not None:
            self.in_flight.change(change)
            if self._is_shared:
                self._wait_for_states()

    def receive(self, results: Iterable[ClientUpdate | ClientFailure]) -> list[ClientOutcome]:
        """Bring the clients' updates, as privacy and adversaries change them, to the server, or on their way."""
        outcomes: list[ClientOutcome] = []
        if results == ():  # most batches end no client
            return outcomes
        with self.engine.threads():
            for result in results:
                self._received += 1
                if result.client >= STRIDE:  # the result of a further problem stays with the client
                    self.engine.log.forget(result.client)
                    if isinstance(result, ClientFailure):
                        self.engine.forget(result.client)
                        self._not_kept[self.engine.names[result.client]] = result.error
                    continue
                sent: list[ClientUpdate | ClientFailure] = [result]
                if isinstance(result, ClientUpdate):
                    try:
                        if self.settings.privacy is not None:
                            result = self.settings.privacy.send(result, self.server.posterior, self._secret, self.round)
                        sent = [result] if self._falsify is None else list(self._falsify(result))
                    except FusionError as refusal:
                        sent = [ClientFailure(result.client, refusal, result.num_examples, result.seconds)]
                self._leave(sent, outcomes)
            if self.is_complete:
                if self._not_kept:
                    which = f"{listed(self._not_kept)}; the first: {next(iter(self._not_kept.values()))}"
                    text = "Clients whose own networks stay as they were, because their training failed"
                    rank_zero_warn(f"{text}: {which}")
                if self._falsify is not None:
                    self._leave(self._falsify(None), outcomes)
        return outcomes

    def _leave(self, messages: Iterable[ClientUpdate | ClientFailure], outcomes: list[ClientOutcome]) -> None:
        """Bring messages to the server, and add their ``outcomes``. Under a schedule send them on their way."""
        for message in messages:
            if self.settings.schedule is None:
                outcomes.append(self._admit(message))
                continue
            if isinstance(message, ClientUpdate):
                message = message.clone()
            self.in_flight.send(message, self.round, self.engine.states.withdraw(message.client))

    def land(self) -> list[ClientOutcome]:
        """Bring the messages that arrive before the next fusion to the server, under a schedule."""
        assert self.plan is not None
        assert self.plan.turn is not None
        turn, outcomes = self.plan.turn, []
        order = {client: place for place, client in enumerate(self.in_flight.sent)}
        with self.engine.threads():
            for arrival in sorted(turn.arrivals, key=lambda each: (each.time, order[each.client])):
                message, started, state = self.in_flight.sent.pop(arrival.client)
                if arrival.client in turn.refused:
                    late = FusionError(
                        f"client {message.client}: its message comes {self.round - started} versions of the global "
                        "posterior late, more than max_staleness allows"
                    )
                    message = ClientFailure(message.client, late, message.num_examples, message.seconds)
                elif state is not None:
                    self.engine.states.keep(message.client, state)
                outcomes.append(self._admit(message, started))
        return outcomes

    @property
    def is_complete(self) -> bool:
        """True when all clients of the round that this process trains have been received."""
        return self.stage == "training" and self._received == len(self.share.cohort)

    def _admit(self, result: ClientUpdate | ClientFailure, started: int | None = None) -> ClientOutcome:
        """Let the server take an update in. The client keeps its old state if the update does not count."""
        outcome = self.server.admit(result, started)
        if outcome.error is not None:
            self.engine.forget(outcome.client)
        elif isinstance(result, ClientUpdate) and self._keeps_clients:
            self._sent[result.client] = result.posterior.clone()
        return outcome

    def finish(self, note: Any = None) -> RoundResult:
        """Let the server finish the round, load the global model, and tell other processes ``note``.

        Raise FederationError if too many rounds in a row have failed. The module holds the last good global model.
        """
        seed_everything(derive_seed(self.settings.seed, "fusion", self.round))  # random rules draw alike everywhere
        self.result = None
        auto = self.server.method.auto
        told = ProcessNote(None, self._sent, note)
        if self._is_shared:
            sent = {client: posterior.to("cpu") for client, posterior in self._sent.items()}
            course = self.engine.context.course
            longest = None if course is None else course.longest
            told = ProcessNote((self.engine.log.collected(), self.engine.states.trained(), longest), sent, note)
        try:
            with self.engine.threads() if auto is None else self._scoring(auto) as score:
                result = self.server.finish(score, told)
        except FederationError:
            self._end(success=False)
            raise
        if self._is_shared:
            self.engine.take_trained([each.trained for each in result.notes])
        if result.aggregate is not None:
            for client, kept in result.aggregate.counted.items():
                self.engine.states.amend(client, kept)
            for client in result.aggregate.refused:
                self.engine.forget(client)
            self._load(result.aggregate, result.notes, getattr(self.engine.model.module, "on_round_end", None))
        self._end(success=result.aggregate is not None)
        if self.server.versions is not None and self.plan is not None and self.plan.turn is not None:
            schedule, known = self.settings.schedule, {each.started for each in self.in_flight.sent.values()}
            known = {r for r in known if schedule is None or not schedule.is_too_late(r, self.round + 1)}
            self.server.versions.forget(known)
            result.figures.update(self.plan.turn.figures(self.round))
        self.result = result
        return result

    def _end(self, *, success: bool) -> None:
        """End the round at the clients. Without success the module goes back to the old global model."""
        if not success:
            self.engine.model.load_global()
        self._sent = {}
        self.engine.end_round(success=success)
        if self._is_shared:
            self._wait_for_states()
        self.stage = "fused"

    def _wait_for_states(self) -> None:
        """Wait until one process has written to disk what the others will read."""
        if self.engine.states.store is not None:
            self.server.collective.all_gather(None)

    def _load(self, aggregate: Aggregate, notes: Sequence[ProcessNote], hook: Callable[..., None] | None) -> None:
        """Make ``aggregate`` the global model, and call the ``hook``, if any, with it and the clients' updates."""
        with self.engine.threads():
            self.engine.model.load_posterior(aggregate.posterior, split(aggregate.buffers)[0])
        if hook is not None:
            device = next(iter(aggregate.posterior.mean.values())).device
            sent = {client: posterior for note in notes for client, posterior in sorted(note.sent.items())}
            count = [c for c in sent if aggregate.weights.get(c, 0.0) > 0 and c not in aggregate.excluded]
            received = [sent[client].to(device) if self._is_shared else sent[client] for client in count]
            whole = self.engine.model.whole
            hook(whole(aggregate.posterior), [whole(each) for each in received])

    @contextmanager
    def _scoring(self, auto: AutoFusion) -> Iterator[Scorer]:
        """Inside, ``auto`` scores its candidates. Afterwards the module holds the old global model."""
        model, batches = self.engine.model, []

        def score(candidate: Aggregate, notes: Sequence[ProcessNote]) -> float:
            module = model.module
            assert isinstance(module, L.LightningModule)
            if not batches:
                batches.extend(self.held_out())
            self._load(candidate, notes, own_hook(module))
            return held_out_loss(module, batches, auto.score, self.settings.seed, self.round)

        with model.unchanged(), kept_attributes(model.module, "global_round"):
            yield score

    def check_trained(self) -> None:
        """Raise FederationError if every round so far has failed."""
        server, last = self.server, self.result
        if last is not None and server.failed_rounds == len(server.history):
            raise server.failure(last.refusal, last.outcomes)

    def personal(self, client: int | str, weight: float) -> GaussianPosterior:
        """Return a client's posterior: see :meth:`~lightning_fedbayes.FederatedBayes.posterior_of`."""
        if not self.settings.is_personal(self.engine.model.module):
            raise FederationError("clients keep no posterior of their own: pass FederatedBayes(keep=['posterior'])")
        names = self.engine.names
        number = names.index(client) if client in names else client
        if not is_whole(number) or not 0 <= int(number) < len(names):
            remedy = nearest(str(client), names)
            raise FederationError(f"client={shown(client)}: give a number below {len(names)} or a name; {remedy}")
        state = self._personal(int(number))
        return self.engine.model.with_local(state.personal(self.server.posterior, weight), state.local)

    def _personal(self, client: int) -> ClientState:
        """Return the state of a client's last problem, which has its personal posterior."""
        return self.engine.states.of(client + (self.server.method.problems - 1) * STRIDE)

    @contextmanager
    def holding(self, client: int) -> Iterator[GaussianPosterior]:
        """Inside, the module predicts by the posterior that a client has trained last. Afterwards by the global one.

        Raises FederationError if the module does not hold the global model.
        """
        model, module = self.engine.model, self.engine.model.module
        if model.has_changed():
            why = "personal posteriors are those of the last round"
            raise FederationError(f"the module holds another model than the federation's global one: {why}")
        state = self._personal(client)
        with model.unchanged(), kept_attributes(module, "global_round"):
            own = state.personal(self.server.posterior, 1.0)
            model.load_client(state.local)
            model.view.load(own)
            hook = getattr(module, "on_round_end", None)
            if hook is not None:
                hook(model.whole(own), [model.whole(own)])
            yield own

    def note_likelihood(self, of_process: tuple[float, int]) -> None:
        r"""Add to the figures of the last round of sites an estimate of the pooled ELBO, nats per training example.

        .. math:: E_q \log p(y \mid x, \theta) - KL(q \| p) / n

        The mean is over held-out examples in place of the n examples of the clients, which the server does not have.
        The estimate is highest at the posterior of the pooled data, as far as the two samples agree. ``of_process`` is
        the sum of the first term over the examples that this process has scored, and their number.
        """
        server, prior = self.server, self.server.method.counted(self.server.posterior)
        if prior is None:
            return
        sums, counts = zip(*server.collective.all_gather(of_process))
        if sum(counts):
            divergence = float(server.posterior.kl(prior))
            server.history[-1]["sites/elbo"] = sum(sums) / sum(counts) - divergence / sum(self.engine.sizes)

    def abandon(self) -> None:
        """Forget an unfinished round: the module goes back to the global posterior that it started from."""
        self.engine.end_round(success=False)
        self.engine.model.load_global()
        self.in_flight.sent = {k: each for k, each in self.in_flight.sent.items() if each.started != self.round}
        self.stage = "between"

    def state_dict(self) -> dict[str, Any]:
        """Return the federation at the end of the last finished round."""
        if self.stage != "training":
            self._take_over_states()
        states, course = self.engine.states.state_dict(), self.engine.context.course
        kept = {"clients": states, "in_flight": self.in_flight.state_dict(), "secret": self._secret}
        return {**self.server.state_dict(), **kept, "steps": 0 if course is None else course.done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave. The module's checkpoint restores its parameters."""
        missing = {"clients", "in_flight", "secret", "steps"} - state.keys()
        if missing:
            what = f"the checkpoint has no {listed(sorted(missing))}: another version of lightning_fedbayes wrote it"
            raise FederationError(f"{what}; resume with that version, or begin anew")
        self.server.load_state_dict(state)
        self.engine.model.join(self.server.posterior.names)
        self.engine.model.load_variances(self.server.posterior)
        self.engine.states.load_state_dict(state["clients"])
        self._secret = state["secret"]
        self.in_flight.load_state_dict(state["in_flight"], self.engine.context.device)
        self.engine.show_states()
        if self.engine.context.course is not None:
            self.engine.context.course.done = state["steps"]
        method, server = self.server.method, self.server
        if method.keeps and not server.is_new:
            lost = sorted(server.accepted.keys() - self.engine.states.clients())
            if lost:
                raise FederationError(
                    f"the checkpoint has no state of {listed(self.engine.names[client] for client in lost)}, and each "
                    f"keeps {method.keeps}: resume from a whole checkpoint, or begin again"
                )
