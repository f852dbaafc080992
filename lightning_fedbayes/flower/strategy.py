"""A Flower strategy that fuses posteriors, leaves bad clients out, and can be resumed."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from lightning.pytorch.utilities import rank_zero_info

from lightning_fedbayes.callbacks.checks import check_at_least, check_cohort, check_fraction
from lightning_fedbayes.engines.plan import choose_cohort
from lightning_fedbayes.engines.round import ClientUpdate, RoundFusion, RoundResult
from lightning_fedbayes.errors import FederationError, FusionError
from lightning_fedbayes.flower.checkpoint import ServerState
from lightning_fedbayes.flower.roster import Roster
from lightning_fedbayes.flower.wire import from_arrays, probabilistic_names, to_arrays
from lightning_fedbayes.fusion import FusionRule, get_rule, rule_name
from lightning_fedbayes.fusion.accumulator import check_structure
from lightning_fedbayes.weighting import CohortWeights, check_probabilistic, check_weighting

EvaluateFunction = Callable[[int, ArrayRecord], "MetricRecord | None"]


class FusionStrategy(Strategy):
    """Fuses the posteriors of Flower's clients by any registered rule; the server's half of ``FederatedBayes``.

    A client is left out of a round, and the server says why, if it raises, dies, or sends what is not finite, of
    another structure, of another round, or unreadable. A round with fewer than ``min_clients`` valid updates, or one
    that the rule cannot fuse, leaves the global posterior as it was. Clients are
    :func:`~lightning_fedbayes.flower.client_app`.

    With a ``checkpoint`` the federation survives the server: :meth:`start` goes on after the last finished round and
    ends where an uninterrupted one does.

    Args:
        fusion: name of a fusion rule (:func:`~lightning_fedbayes.available_fusions`) or a rule object.
        weighting: how much each client counts; see :class:`~lightning_fedbayes.FederatedBayes`. Sizes are what the
            clients say: "equal" if they are not to be trusted.
        fraction: share of the clients at hand that take part in a round, C in (0, 1], drawn anew in every round.
        min_clients: fewer valid updates than this leave the global posterior as it was.
        wait_for: clients that must be connected before the first round of a run; later rounds go on with those that
            are left, ``min_clients`` at least.
        max_failed_rounds: after this many rounds in a row that come to nothing the run stops with an error.
        evaluate: let all clients score the global posterior on their validation data after every round.
        checkpoint: the file that the federation is kept in; None keeps it in memory only.
        seed: where every random draw comes from, the clients' too.

    Attributes:
        state: the federation after the last finished round; None before :meth:`start`.

    Raises:
        FusionError, FederationError: an argument cannot be used.

    >>> FusionStrategy("weighted_averge")
    Traceback (most recent call last):
    lightning_fedbayes.errors.FusionError: unknown fusion rule 'weighted_averge': did you mean 'weighted_average'? ...
    """

    def __init__(
        self,
        fusion: str | FusionRule = "reverse_kl_barycenter",
        weighting: str | CohortWeights = "train_size",
        *,
        fraction: float = 1.0,
        min_clients: int = 1,
        wait_for: int = 2,
        max_failed_rounds: int = 3,
        evaluate: bool = False,
        checkpoint: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        self.rule = get_rule(fusion)
        check_weighting(weighting)
        check_fraction(fraction)
        for name, value in (
            ("min_clients", min_clients), ("wait_for", wait_for), ("max_failed_rounds", max_failed_rounds)
        ):
            check_at_least(name, value, 1)
        check_cohort(wait_for, fraction, min_clients)
        self.weighting = weighting
        self.fraction = fraction
        self.min_clients = min_clients
        self.wait_for = wait_for
        self.max_failed_rounds = max_failed_rounds
        self.evaluate = evaluate
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.seed = seed
        self.state: ServerState | None = None
        self._timeout = 3600.0
        self._roster = Roster()
        self._asked: dict[int, int] = {}
        self._probabilistic: set[str] = set()

    def summary(self) -> None:
        """Say how rounds are run."""
        rank_zero_info(
            f"Fusion {rule_name(self.rule)}, weighting {self.weighting}, fraction {self.fraction}, at least "
            f"{self.min_clients} of {self.wait_for} clients, seed {self.seed}, checkpoint {self.checkpoint}"
        )

    # -- the run -------------------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFunction | None = None,
    ) -> Result:
        """Run the rounds that are still to do of ``num_rounds``.

        Args:
            grid: how the server reaches the clients.
            initial_arrays: the network before training, by :func:`~lightning_fedbayes.flower.initial_arrays`.
            num_rounds: rounds of the whole federation, those in the checkpoint among them.
            timeout: seconds that a round waits for its clients.
            train_config, evaluate_config: more for clients to know.
            evaluate_fn: scores the global arrays on the server, after every round.

        Returns: Flower's Result: the global arrays, and the figures of every round of this run.

        Raises:
            FederationError: the checkpoint is of another federation, or too many rounds in a row came to nothing.
        """
        self.summary()
        self._timeout = timeout
        state = self._resume(initial_arrays)
        result = Result(arrays=to_arrays(state.posterior, state.buffers))
        if state.rounds >= num_rounds:
            rank_zero_info(f"{self.checkpoint} is complete: {state.rounds} of {num_rounds} rounds are done.")
        else:
            self._roster.wait(grid, self.wait_for, timeout)
        for server_round in range(state.rounds + 1, num_rounds + 1):
            questions = self.configure_train(server_round, result.arrays, train_config or ConfigRecord(), grid)
            arrays, metrics = self.aggregate_train(server_round, grid.send_and_receive(questions, timeout=timeout))
            result.arrays = arrays or result.arrays
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            questions = self.configure_evaluate(server_round, result.arrays, evaluate_config or ConfigRecord(), grid)
            if questions := list(questions):
                scores = self.aggregate_evaluate(server_round, grid.send_and_receive(questions, timeout=timeout))
                if scores is not None:
                    result.evaluate_metrics_clientapp[server_round] = scores
            if evaluate_fn is not None:
                scores = evaluate_fn(server_round, result.arrays)
                if scores is not None:
                    result.evaluate_metrics_serverapp[server_round] = scores
            figures = {**(metrics or {}), **result.evaluate_metrics_clientapp.get(server_round, {})}
            named = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if name != "round")
            rank_zero_info(f"Round {server_round} of {num_rounds}: {named}")
        return result

    def _resume(self, arrays: ArrayRecord) -> ServerState:
        """The state to go on from: the checkpoint's, or a new one of ``arrays``."""
        posterior, buffers = from_arrays(arrays, "the initial arrays")
        check_probabilistic(self.weighting, posterior)
        self._probabilistic = probabilistic_names(arrays)
        name = rule_name(self.rule)
        self.state = ServerState(posterior, buffers, uuid.uuid4().hex, self.seed, name, self.rule.init())
        if self.checkpoint is not None and self.checkpoint.exists():
            stored = ServerState.load(self.checkpoint)
            self._check_same(stored, self.state)
            if stored.rule != name:  # another rule cannot read what it remembers
                stored.rule, stored.memory = name, self.rule.init()
            self.state = stored
            rank_zero_info(f"Resuming after round {stored.rounds} of {self.checkpoint}.")
        return self.state

    def _check_same(self, stored: ServerState, begun: ServerState) -> None:
        """Raise FederationError if the checkpoint is of another federation than the one that is begun."""
        reasons = [] if stored.seed == begun.seed else [f"seed={begun.seed} (was {stored.seed})"]
        try:
            check_structure(stored.posterior, begun.posterior, "the checkpoint")
        except FusionError as error:
            reasons.append(str(error))
        if reasons:
            raise FederationError(
                f"{self.checkpoint} is of another federation: {'; '.join(reasons)}. Resume with the same network and "
                "seed, or give checkpoint= another path"
            )

    # -- training ------------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the round's cohort from (seed, round) and send it the global posterior; see Flower's ``Strategy``."""
        state = self.state or self._resume(arrays)
        posterior, buffers = from_arrays(arrays, "the global arrays")
        self._start = time.perf_counter()
        self._fusion = RoundFusion(self.rule, self.weighting, posterior, buffers, state.memory)
        clients = list(self._roster.wait(grid, self.min_clients, self._timeout).items())
        cohort = choose_cohort(server_round - 1, len(clients), self.fraction, self.seed)
        self._asked = {node: client for client, node in (clients[position] for position in cohort)}
        return self._messages(MessageType.TRAIN, server_round, arrays, config, self._asked)

    def _messages(
        self, kind: str, server_round: int, arrays: ArrayRecord, config: ConfigRecord, nodes: dict[int, int]
    ) -> list[Message]:
        """A message for each client of ``nodes``, node → client."""
        assert self.state is not None
        common = {"server-round": server_round, "seed": self.seed, "federation": self.state.federation}
        messages = []
        for node, client in nodes.items():
            told = ConfigRecord({**config, **common, "accepted": self.state.accepted.get(client, 0)})
            content = RecordDict({"arrays": arrays, "config": told})
            messages.append(Message(content, node, kind, group_id=str(server_round)))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fuse what can be used of the round's replies; see Flower's ``Strategy``.

        Returns: the new global arrays, None if the round came to nothing, and the round's figures.

        Raises:
            FederationError: too many rounds in a row came to nothing.
        """
        assert self.state is not None
        updates, failures = self._read(server_round, replies)
        sizes: dict[int, int] = {}
        losses: dict[int, float] = {}
        for client, update in sorted(updates.items()):  # not as they arrive: sums depend on the order
            try:
                self._fusion.add(update)
            except FusionError as refusal:
                failures[client] = str(refusal)
                continue
            sizes[client] = update.num_examples
            if "train_loss" in update.metrics:
                losses[client] = update.metrics["train_loss"]
        for _, reason in sorted(failures.items()):
            rank_zero_info(f"Round {server_round}: left out: {reason}")
        result, refusal = self._fuse(failures)
        figures: dict[str, float] = {} if result is None else dict(result.metrics)
        figures |= {"valid_clients": float(len(sizes)), "failed_clients": float(len(failures))}
        weight = sum(sizes[client] for client in losses)
        if weight > 0:
            figures["train_loss"] = sum(loss * sizes[client] for client, loss in losses.items()) / weight
        self._finish(server_round, result, tuple(sizes), figures)
        if self.state.failed_rounds >= self.max_failed_rounds:
            raise FederationError(
                f"{self.state.failed_rounds} rounds in a row came to nothing; the global posterior of the last good "
                f"round is kept. Round {server_round}: {refusal}"
            )
        arrays = None if result is None else to_arrays(result.posterior, result.buffers)
        return arrays, MetricRecord(dict(self.state.history[-1]))

    def _read(self, server_round: int, replies: Iterable[Message]) -> tuple[dict[int, ClientUpdate], dict[int, str]]:
        """Client → its update, and client → why it has none."""
        updates: dict[int, ClientUpdate] = {}
        failures: dict[int, str] = {}
        for reply in replies:
            client = self._asked.get(reply.metadata.src_node_id)
            if client is None:
                rank_zero_info(f"Round {server_round}: node {reply.metadata.src_node_id} answers, but was not asked")
                continue
            try:
                updates[client] = read_update(reply, client, server_round, self._probabilistic)
            except FusionError as refusal:
                failures[client] = str(refusal)
        silent = set(self._asked.values()) - updates.keys() - failures.keys()
        failures |= {client: f"client {client}: no reply within {self._timeout:g} s" for client in silent}
        return updates, failures

    def _fuse(self, failures: dict[int, str]) -> tuple[RoundResult | None, str]:
        """The fusion of the round, or None and why there is none."""
        if len(self._fusion) < self.min_clients:
            first = next((f"; {reason}" for _, reason in sorted(failures.items())), "")
            return None, f"{len(self._fusion)} valid updates, fewer than min_clients={self.min_clients}{first}"
        try:
            return self._fusion.finish(), ""
        except FusionError as refusal:
            rank_zero_info(f"The old posterior stays, because the clients cannot be fused: {refusal}")
            return None, str(refusal)

    def _finish(
        self, server_round: int, result: RoundResult | None, clients: tuple[int, ...], figures: dict[str, float]
    ) -> None:
        """Make the round's outcome the federation's state, and keep it."""
        state = self.state
        assert state is not None
        state.rounds = server_round
        state.failed_rounds = 0 if result is not None else state.failed_rounds + 1
        if result is not None:
            state.posterior, state.buffers, state.memory = result.posterior, result.buffers, result.memory
            state.accepted |= dict.fromkeys(clients, server_round)
            figures["excluded_clients"] = float(len(result.excluded))
        figures |= {"failed_rounds": float(state.failed_rounds), "seconds": time.perf_counter() - self._start}
        state.history.append({"round": float(server_round), **figures})
        if self.checkpoint is not None:
            state.save(self.checkpoint)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send all clients at hand the global posterior to score, if ``evaluate``; see Flower's ``Strategy``."""
        if not self.evaluate:
            return []
        nodes = {node: client for client, node in self._roster.update(grid, self._timeout).items()}
        return self._messages(MessageType.EVALUATE, server_round, arrays, config, nodes)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        r"""Means over the clients, weighted by their numbers of validation examples, :math:`\sum n_k m_k / \sum n_k`.

        Of each figure over the clients that sent it as a finite number; see Flower's ``Strategy``.
        """
        sums: dict[str, tuple[float, float]] = {}
        for reply in replies:
            try:
                metrics = read_metrics(reply, f"node {reply.metadata.src_node_id}")
                count = examples_of(metrics, f"node {reply.metadata.src_node_id}")
            except FusionError as refusal:
                rank_zero_info(f"Round {server_round}: an evaluation is left out: {refusal}")
                continue
            for name, value in metrics.items():
                if name != "num-examples" and count > 0:
                    total, examples = sums.get(name, (0.0, 0.0))
                    sums[name] = (total + count * value, examples + count)
        return MetricRecord({name: total / examples for name, (total, examples) in sums.items()}) if sums else None


def read_update(reply: Message, client: int, server_round: int, probabilistic: set[str]) -> ClientUpdate:
    """What a client's reply to a training message says.

    Args:
        reply: the message; nothing in it is trusted.
        client: who was asked.
        server_round: the round it was asked for.
        probabilistic: names of the parameters that must come with a variance, and no others.

    Raises:
        FusionError: the client failed, or the reply cannot be used. Values and shapes are checked by
            :class:`~lightning_fedbayes.engines.round.RoundFusion`.
    """
    who = f"client {client}"
    metrics = read_metrics(reply, who)
    arrays, config = reply.content.get("arrays"), reply.content.get("config")
    answered = config.get("server-round") if isinstance(config, ConfigRecord) else None
    if answered != server_round:
        raise FusionError(f"{who}: its reply is of round {answered}, and this is round {server_round}")
    if not isinstance(arrays, ArrayRecord):
        raise FusionError(f"{who}: its reply has no arrays")
    posterior, buffers = from_arrays(arrays, who)
    wrong = sorted(probabilistic_names(arrays) ^ probabilistic)
    if wrong:
        raise FusionError(
            f"{who}: it must send the variances of the probabilistic parameters and of no others; wrong are "
            f"{', '.join(wrong)}"
        )
    count = examples_of(metrics, who)
    return ClientUpdate(client, count, posterior, buffers, {n: v for n, v in metrics.items() if n != "num-examples"})


def read_metrics(reply: Message, who: str) -> dict[str, float]:
    """The finite figures of a reply, "num-examples" among them as it was sent.

    Raises:
        FusionError: the client failed, or the reply has no figures.
    """
    if reply.has_error():
        raise FusionError(f"{who} failed: {reply.error.reason}")
    record = reply.content.get("metrics")
    if not isinstance(record, MetricRecord):
        raise FusionError(f"{who}: its reply has no metrics")
    numbers: dict[str, Any] = {name: value for name, value in record.items() if not isinstance(value, list)}
    return {name: value for name, value in numbers.items() if name == "num-examples" or math.isfinite(value)}


def examples_of(metrics: dict[str, float], who: str) -> int:
    """How many examples a client says it has.

    Raises:
        FusionError: it is no whole number of at least 0.
    """
    count = metrics.get("num-examples")
    if not isinstance(count, int) or count < 0:
        raise FusionError(f"{who}: num-examples={count}; it must be a whole number of at least 0")
    return count
