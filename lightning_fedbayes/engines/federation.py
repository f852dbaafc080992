"""A running federation: rounds of one engine's clients on a server that fuses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import lightning as L

from lightning_fedbayes.adversaries import Attack, assign
from lightning_fedbayes.engines.adversaries import RoundAdversaries, held_back
from lightning_fedbayes.engines.client import Client, ClientFailure
from lightning_fedbayes.engines.engine import Engine
from lightning_fedbayes.engines.loader import sendable
from lightning_fedbayes.engines.plan import RoundPlan, share_of
from lightning_fedbayes.engines.round import ClientUpdate, RoundFusion, RoundResult
from lightning_fedbayes.engines.scoring import held_out_loss, kept_attributes
from lightning_fedbayes.engines.selection import AutoFusion, RoundSelection
from lightning_fedbayes.engines.server import Server
from lightning_fedbayes.errors import FederationError, FusionError
from lightning_fedbayes.fusion import FusionRule, Memory
from lightning_fedbayes.layers import set_prior
from lightning_fedbayes.posterior import GaussianPosterior
from lightning_fedbayes.processes import ALONE, Processes
from lightning_fedbayes.seeding import derive_seed, seed_everything
from lightning_fedbayes.weighting import check_probabilistic

Stage = Literal["between", "training", "fused"]
Protect = Callable[[ClientUpdate, GaussianPosterior, int, int], ClientUpdate]

HELD_OUT_LOSS = "held_out_loss/"
"""What the figures of a round call a candidate's loss, before its name."""


@dataclass(frozen=True)
class ClientOutcome:
    """What became of a client in a round.

    Args:
        client: its number.
        error: why it is left out, None if it counts.
        seconds: how long it took; the clients' equal share where several train at once.
        num_examples: its number of training examples.
        num_bytes: size of what it sent, 0 if it failed.
        metrics: what it measured while training, name → value.
    """

    client: int
    error: Exception | None
    seconds: float
    num_examples: int
    num_bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessReport:
    """What a process tells the others at the end of its clients' training.

    Args:
        outcomes: what became of its clients.
        trained: what they have logged and keep, see :meth:`Engine.trained
            <lightning_fedbayes.engines.engine.Engine.trained>`.
        sent: client → its posterior, where the module wants to see it.
        count: how many clients it has admitted to the fusion.
        admitted: what the fusion has to know of them.
        note: whatever else the others are to know.
    """

    outcomes: Sequence[ClientOutcome]
    trained: Any
    sent: Mapping[int, GaussianPosterior]
    count: int
    admitted: Any
    note: Any


class Federation:
    """The global posterior and the rounds that make it.

    Args:
        server: how rounds are run.
        engine: trains the clients; it holds the resident network.
        attacks: what some clients send in place of their updates.
        held_out: makes the batches that an :class:`~lightning_fedbayes.engines.selection.AutoFusion` scores with.
        processes: that share the clients of a round; what follows is the same in all of them.
        protect: what a client sends in place of its update, of (update, global posterior before, seed, round), such as
            :meth:`UpdatePrivacy.send <lightning_fedbayes.privacy.UpdatePrivacy.send>`; None: the update itself.

    Attributes:
        posterior: the global posterior after the last round.
        history: one dict of figures per finished round, in order.
        failed_rounds: rounds in a row that had too few valid updates, or that the rule could not fuse.
        rounds_done: number of the round after the last finished one.
        stage: "between" rounds, "training" clients, or "fused": the round is done, but the Trainer's epoch is not.
        plan: the plan of the last round that was begun.
        share: the part of it that this process trains.
        outcomes: what became of the clients of the round: of this process's, and when it is over of all.
        weights: client → its part in the last fusion.
        judged: whether the fusion rule has inferred those.
        excluded: client → why the fusion rule left it out of the last fusion.
        refusal: why the last round could not be fused, None if it could.
        memory: what the fusion rule remembers.
    """

    def __init__(
        self, server: Server, engine: Engine, attacks: Sequence[Attack] = (),
        held_out: Callable[[], Iterable[Any]] = tuple, processes: Processes = ALONE,
        protect: Protect | None = None,
    ) -> None:
        self.server = server
        self.engine = engine
        self.attacks = tuple(attacks)
        self.held_out = held_out
        self.processes = processes
        engine.log.is_shared = processes.count > 1
        self.protect = protect
        self.posterior = engine.model.read_posterior().clone()
        check_probabilistic(server.weighting, self.posterior)
        self.history: list[dict[str, float]] = []
        self.failed_rounds = 0
        self.rounds_done = 0
        self.stage: Stage = "between"
        self.plan: RoundPlan | None = None
        self.share = RoundPlan(-1, (), (0,))
        self.weights: dict[int, float] = {}
        self.judged = False
        self.excluded: dict[int, str] = {}
        self.refusal: FusionError | None = None
        self.memory: Memory = {} if isinstance(server.rule, AutoFusion) else server.rule.init()
        self.outcomes: list[ClientOutcome] = []

    @property
    def round(self) -> int:
        """The round that is under way, or was last, from 0; −1 before the first."""
        return -1 if self.plan is None else self.plan.round

    def begin_round(self, plan: RoundPlan) -> None:
        """Send the global posterior to the clients of ``plan``."""
        self.plan = plan
        self.share = share_of(plan, self.processes.rank, self.processes.count)
        self.stage = "training"
        self.outcomes = []
        self._start, self._bytes_before = time.perf_counter(), self.processes.bytes_sent
        if self.server.prior == "global":
            set_prior(self.engine.model.module, self.posterior, exclude=self.engine.model.local_names)
        self._fusion = self._new_fusion()
        attackers = assign(self.attacks, self.engine.names, self.engine.seed)
        self._adversaries = RoundAdversaries(attackers, plan, self.posterior, self.engine.seed)
        self._waiting: list[tuple[ClientUpdate, float]] = []
        self._sent: dict[int, GaussianPosterior] = {}
        self._keeps_clients = bool(getattr(self.engine.model.module, "needs_client_posteriors", False))
        self.engine.begin_round(self.share)

    def begin_batch(self, batch_idx: int) -> Sequence[Client]:
        """Called before every batch. Returns the clients whose first batch it is."""
        if not self.share.cohort:
            return ()
        clients = self.engine.begin_batch(batch_idx)
        if clients:
            self._clients_start = time.perf_counter()
        return clients

    def end_batch(self, batch_idx: int, outputs: Any) -> Sequence[ClientOutcome]:
        """Called after every batch. Returns what became of the clients whose last batch it was.

        Those of adversaries who wait for the honest clients come with the round's last.
        """
        if not self.share.cohort:
            return ()
        results = self.engine.end_batch(batch_idx, outputs)
        if not results:
            return ()
        with self.engine.threads():
            return self._take(results)

    def _take(self, results: Sequence[ClientUpdate | ClientFailure]) -> Sequence[ClientOutcome]:
        """Admit what clients send, or hold it back where an adversary waits for the others."""
        seconds = (time.perf_counter() - self._clients_start) / len(results)
        outcomes = []
        for result in results:
            if isinstance(result, ClientUpdate) and self._adversaries.waits(result.client):
                self._waiting.append((held_back(result), seconds))
            else:
                outcomes.append(self._admit(result, seconds))
        if len(self.outcomes) + len(outcomes) + len(self._waiting) == self._num_clients:
            outcomes += [self._admit(*held) for held in self._waiting]
            self._waiting = []
        self.outcomes += outcomes
        return outcomes

    def _admit(self, result: ClientUpdate | ClientFailure, seconds: float) -> ClientOutcome:
        """Add one client's update to the round, if it can be used."""
        size = self.engine.sizes[result.client]
        if isinstance(result, ClientFailure):
            outcome = ClientOutcome(result.client, result.error, seconds, size)
        else:
            error = None
            try:
                if self.protect is not None:
                    result = self.protect(result, self.posterior, self.engine.seed, self.round)
                result = self._adversaries.send(result)
                self._fusion.add(result)
                if self._keeps_clients:
                    self._sent[result.client] = result.posterior.clone()
                self._adversaries.observe(result)
            except FusionError as refusal:
                error = refusal
            outcome = ClientOutcome(result.client, error, seconds, size, result.num_bytes, result.metrics)
        if outcome.error is not None:
            self.engine.forget(result.client)
        return outcome

    @property
    def round_is_complete(self) -> bool:
        """Whether all clients of the round that this process trains have had their last batch."""
        return self.stage == "training" and len(self.outcomes) == self._num_clients

    @property
    def _num_clients(self) -> int:
        """Number of clients of the round that this process trains."""
        return len(self.share.cohort)

    def end_round(self, note: Any = None) -> list[Any]:
        """Fuse the round's updates, or keep the old posterior if there are too few or the rule cannot fuse them.

        Processes meet here: once to tell each other what became of their clients, and to fuse.

        Args:
            note: whatever else this process has to tell the others.

        Returns: the notes of all processes.

        Raises:
            FederationError: too many rounds in a row came to nothing.
        """
        assert self.plan is not None
        metrics: dict[str, float] = {}
        self.weights, self.judged, self.excluded, self.refusal = {}, False, {}, None
        reports = self.processes.gather(self._report(note))
        self._take_reports(reports)
        seed_everything(derive_seed(self.engine.seed, "fusion", self.round))  # what draws in a fusion draws alike
        success = sum(report.count for report in reports) >= self.server.min_clients
        if success:
            try:
                result, metrics = self._fuse([report.admitted for report in reports])
            except FusionError as refusal:
                self.refusal, success = refusal, False
            else:
                self.posterior, self.weights = result.posterior, result.weights
                self.judged, self.excluded, self.memory = result.judged, result.excluded, result.memory
                self._load(result)
        if not success:
            self.engine.model.load_global()
        self._sent = {}
        self.engine.end_round(success=success)
        self.failed_rounds = 0 if success else self.failed_rounds + 1
        self.stage = "fused"
        self.rounds_done = self.plan.round + 1
        self.history.append({"round": float(self.plan.round), **metrics, **self._figures()})
        if self.failed_rounds >= self.server.max_failed_rounds:
            raise self._too_many_failures()
        return [report.note for report in reports]

    def _report(self, note: Any) -> ProcessReport:
        """What this process tells the others of its clients."""
        count, admitted = len(self._fusion), self._fusion.admitted()
        if self.processes.count == 1:
            return ProcessReport(self.outcomes, None, self._sent, count, admitted, note)
        outcomes = [replace(each, error=each.error and sendable(each.error)) for each in self.outcomes]
        sent = {client: posterior.to("cpu") for client, posterior in self._sent.items()}
        return ProcessReport(outcomes, self.engine.trained(), sent, count, admitted, note)

    def _take_reports(self, reports: Sequence[ProcessReport]) -> None:
        """Know of the clients of all processes what is known of this one's."""
        if self.processes.count == 1:
            return
        self.outcomes = sorted((each for report in reports for each in report.outcomes), key=lambda each: each.client)
        self.engine.take_trained([report.trained for report in reports])
        device = next(iter(self.posterior.mean.values())).device
        self._sent = {
            client: posterior.to(device) for report in reports for client, posterior in sorted(report.sent.items())
        }

    def _too_many_failures(self) -> FederationError:
        """What stops a run whose rounds come to nothing, with the reason of the last one."""
        failed = [outcome.error for outcome in self.outcomes if outcome.error is not None]
        cause = self.refusal or failed[0]
        too_few = f"had fewer than min_clients={self.server.min_clients} valid updates"
        what = "could not be fused" if self.refusal else too_few
        error = FederationError(
            f"{self.failed_rounds} rounds in a row {what}; the global posterior of the last good round is kept. "
            f"{'The rule says' if self.refusal else 'The first failure of this round was'} "
            f"{type(cause).__name__}: {cause}"
        )
        error.__cause__ = cause
        return error

    def _new_fusion(self) -> RoundFusion | RoundSelection:
        """What collects the updates of a round."""
        rule, buffers = self.server.rule, self.engine.model.federated_buffers

        def fusion(rule: FusionRule, memory: Memory | None) -> RoundFusion:
            return RoundFusion(rule, self.server.weighting, self.posterior, buffers, memory, self.processes)

        if isinstance(rule, AutoFusion):
            return RoundSelection(rule, fusion, self.memory)
        return fusion(rule, self.memory)

    def _fuse(self, admitted: Sequence[Any]) -> tuple[RoundResult, dict[str, float]]:
        """The result of the round and its figures, from what each process has admitted."""
        if isinstance(self._fusion, RoundFusion):
            with self.engine.threads():
                result = self._fusion.finish(admitted)
            return result, result.metrics
        module, auto = self.engine.model.module, self._fusion.auto
        assert isinstance(module, L.LightningModule)
        batches = list(self.held_out())

        def loss(result: RoundResult) -> float:
            self._load(result)
            return held_out_loss(module, batches, auto.score, self.engine.seed, self.round)

        with self.engine.model.unchanged(), kept_attributes(module, "global_round"):
            result, losses = self._fusion.finish(loss, admitted)
        return result, {**result.metrics, **{f"{HELD_OUT_LOSS}{name}": value for name, value in losses.items()}}

    def _load(self, result: RoundResult) -> None:
        """Make ``result`` the global model, and tell the module, if it has a hook ``on_round_end``."""
        with self.engine.threads():
            self.engine.model.load_posterior(result.posterior, result.buffers)
        hook = getattr(self.engine.model.module, "on_round_end", None)
        if hook is not None:
            count = [c for c in self._sent if result.weights.get(c, 0.0) > 0 and c not in result.excluded]
            hook(result.posterior, [self._sent[client] for client in count])

    def abandon_round(self) -> None:
        """Forget an unfinished round: the module holds the global posterior that it started from."""
        self.engine.end_round(success=False)
        self.engine.model.load_global()
        self.stage = "between"

    def close(self) -> None:
        """Give the Trainer its step back, and the layers their own priors."""
        self.engine.remove()
        if self.server.prior == "global":
            set_prior(self.engine.model.module, None)

    def _figures(self) -> dict[str, float]:
        """Counts, time and traffic of the round."""
        valid = [outcome for outcome in self.outcomes if outcome.error is None]
        figures = {
            "valid_clients": float(len(valid)),
            "failed_clients": float(len(self.outcomes) - len(valid)),
            "excluded_clients": float(len(self.excluded)),
            "failed_rounds": float(self.failed_rounds),
            "seconds": time.perf_counter() - self._start,
            "megabytes_down": self.posterior.num_bytes * len(self.outcomes) / 1e6,
            "megabytes_up": sum(outcome.num_bytes for outcome in valid) / 1e6,
        }
        if self.processes.count > 1:
            figures["megabytes_between_processes"] = (self.processes.bytes_sent - self._bytes_before) / 1e6
        measured = [outcome for outcome in valid if "train_loss" in outcome.metrics]
        if measured:
            total = sum(outcome.metrics["train_loss"] * outcome.num_examples for outcome in measured)
            figures["train_loss"] = total / sum(outcome.num_examples for outcome in measured)
        return figures

    def state_dict(self) -> dict[str, Any]:
        """The federation at the end of the last finished round."""
        return {
            "rounds": self.rounds_done,
            "posterior": self.posterior.state_dict(),
            "clients": self.engine.state_dict(),
            "failed_rounds": self.failed_rounds,
            "history": list(self.history),
            "memory": self.memory,
            "rule": self.server.rule_name,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; the module's parameters are restored by its own checkpoint."""
        device = next(iter(self.posterior.mean.values())).device
        self.posterior = GaussianPosterior.from_state_dict(state["posterior"]).to(device)
        self.engine.load_state_dict(state["clients"])
        self.failed_rounds = state["failed_rounds"]
        self.rounds_done = state["rounds"]
        self.history = list(state["history"])
        if state["rule"] == self.server.rule_name:  # another rule cannot read it
            self.memory = state["memory"]
