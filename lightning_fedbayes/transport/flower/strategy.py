"""A Flower strategy that fuses posteriors, leaves bad clients out, and can be resumed."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_fedbayes.clients.settings import FederationSettings, Fusion, Weighting
from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import FedBayesError, FederationError
from lightning_fedbayes.core.messages import ClientFailure, ClientUpdate, Kind
from lightning_fedbayes.core.messages import Message as ClientMessage
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.modules.sources.curvature.kronecker import KroneckerLaplace
from lightning_fedbayes.server import Asynchronous, RoundResult, Server
from lightning_fedbayes.transport import one_shot as once
from lightning_fedbayes.transport.calibration import Ask, Calibration, check_calibration, try_calibration, usable
from lightning_fedbayes.transport.flower import wire
from lightning_fedbayes.transport.flower.asynchronous import Course, check_schedule
from lightning_fedbayes.transport.flower.roster import Roster
from lightning_fedbayes.transport.messages import COUNTED, attempted, has_lost_state
from lightning_fedbayes.transport.server import Rounds, told_round


@dataclass(frozen=True)
class Monitor:
    """Figure by which rounds are compared, the best "min" or "max", and rounds to wait for a better one."""

    name: str | None
    mode: Literal["min", "max"]
    patience: int | None

    def __post_init__(self) -> None:
        errors.check_choice("mode", self.mode, ("min", "max"))
        if self.name is not None:
            errors.check_kind("monitor", self.name, str, "give the name of a figure, such as 'val/nll'")
        if self.patience is not None:
            errors.check_at_least("patience", self.patience, 1)
            if self.name is None:
                raise FederationError(f"patience={self.patience} with monitor=None: say which figure, as by 'val/nll'")

    def noted(self, best: Mapping[str, Any], figures: Mapping[str, Any], server: Server) -> dict[str, Any]:
        """Return the best round after a further one: "score", "round" from 1, "posterior", "buffers", and "scored".

        "scored" is the last round with scores. ``figures`` are of the clients' validation, perhaps empty. Raises
        FederationError if the figure is missing.
        """
        if self.name is None or not figures:
            return {**best}
        if self.name not in figures:
            known = errors.nearest(self.name, figures)
            raise FederationError(f"monitor='{self.name}': clients log no such figure; {known}")
        score, scored = float(figures[self.name]), {"scored": server.rounds}
        if best and (score >= best["score"] if self.mode == "min" else score <= best["score"]):
            return {**best, **scored}
        kept = {"posterior": server.posterior.state_dict(), "buffers": dict(server.buffers)}
        return {"score": score, "round": server.rounds, **kept, **scored}

    def is_over(self, best: Mapping[str, Any]) -> bool:
        """Return True if the federation stops."""
        return bool(best) and self.patience is not None and best["scored"] - best["round"] >= self.patience


class FusionStrategy(Rounds, Strategy):
    """Fuses the posteriors of Flower's clients by any registered rule. The server's half of ``FederatedBayes``.

    A client that raises, dies, or sends what cannot be used is left out of a round, and the server says why. A round
    with fewer valid updates than ``safeguards`` ask for, or one that the rule cannot fuse, leaves the global posterior
    as it was. Clients are :func:`~lightning_fedbayes.transport.flower.client_app`.

    With a ``checkpoint`` the federation survives the server: :meth:`start` goes on after the last finished round and
    ends where an uninterrupted one does. With a ``schedule`` there are no rounds: free clients train, and as soon as
    enough messages have arrived they are fused. Raises FusionError or FederationError if an argument cannot be used.

    Args:
        fusion, weighting: see :class:`~lightning_fedbayes.FederatedBayes`. Clients state their sizes: give the
            weighting "equal" if they are not to be trusted.
        schedule: an :class:`~lightning_fedbayes.Asynchronous`: a round is then one fusion, which waits for no slow
            client, and a client that does not answer within the ``timeout`` is given up. A file with the name of the
            checkpoint and the suffix ".jsonl" holds the order of arrivals, by which the run can be repeated.
        monitor, mode: the figure of the clients' scores, and "min" or "max", by which the checkpoint keeps the best
            round, too. The arrays that :meth:`start` returns are of the best round.
        patience: stop after this many rounds in a row that are not better. None: never.
        options: ``fraction``, ``wait_for``, ``safeguards``, ``evaluate``, ``across``, ``checkpoint``, ``logger`` and
            ``seed`` of :class:`~lightning_fedbayes.transport.server.Rounds`. With a ``schedule``, ``evaluate`` scores
            by the free clients, and by the last scores of the others.

    Attributes:
        server: the :class:`~lightning_fedbayes.Server` that it drives. None before :meth:`start`.
        client_scores: the :class:`.ClientScores` of the last evaluation: figures that each client's
            ``validation_step`` has logged, by the client's number.
        cross_scores: with ``across`` the :class:`.CrossScores` of the last run: of each client's personal posterior on
            the data of each, by their numbers. None where fewer than two clients have trained and score all models.

    >>> FusionStrategy("weighted_averge")
    Traceback (most recent call last):
    lightning_fedbayes.core.errors.FusionError: unknown fusion rule 'weighted_averge': did you mean ...
    """

    def __init__(
        self,
        fusion: Fusion = "reverse_kl_barycenter",
        weighting: Weighting = "train_size",
        *,
        schedule: Asynchronous | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        patience: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(fusion, weighting, **options)
        if schedule is not None:
            FederationSettings(fusion=self.method, fraction=self.fraction, schedule=schedule)  # for its checks
            check_schedule(schedule, self.safeguards.min_clients)
            self.late = schedule.late
        self.monitor = Monitor(monitor, mode, patience)
        if monitor is not None and not self.evaluate:
            raise FederationError(f"monitor='{monitor}' with evaluate=False: nothing is scored; give evaluate=True")
        self.schedule = schedule
        self._roster, self._asked, self._scoring = Roster(), dict[int, int](), dict[int, int]()

    def resume(self, model: Mapping[str, Tensor]) -> Server:
        """Begin a run: make the server that starts from ``model``, or goes on from the checkpoint."""
        self._asked, self._scoring = {}, {}
        self._scores: dict[int, ClientMessage] = {}
        server = super().resume(model)
        self.course = None if self.schedule is None else Course(self, self.resumed)
        return server

    def start(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        calibration: Sequence[Calibration] = (),
    ) -> Result:
        """Run the rounds that are still to do of ``num_rounds``, and calibrate.

        Raise FederationError if the checkpoint is of another federation, too many rounds in a row failed, or no client
        can answer a calibration.

        Args:
            grid: how the server reaches the clients.
            initial_arrays: the network before training, by :func:`~lightning_fedbayes.transport.flower.initial_arrays`.
            num_rounds: rounds of the whole federation, rounds in the checkpoint included.
            timeout: seconds that a round waits for its clients.
            calibration: callbacks that :meth:`calibrate` fits after the last round. Before the first, each client tries
                one batch, and says whether it can answer.

        Returns: Flower's Result: the global arrays, the best ones with a ``monitor``, and all figures of this run.
        """
        check_calibration(calibration)
        self.summary()
        self._timeout = timeout
        server = self.resume(wire.tensors_in(initial_arrays, "the initial arrays"))
        result = Result(arrays=wire.to_arrays(server.posterior, server.buffers))
        if server.rounds >= num_rounds or self.monitor.is_over(self.best):
            rank_zero_info(f"{self.checkpoint} is complete: {server.rounds} of {num_rounds} rounds are done.")
        else:
            self._roster.wait(grid, self.wait_for, timeout, at_once=self.schedule is not None)
            result.arrays = self._scaled(server, grid, result.arrays, num_rounds)
            try_calibration(calibration, self._asking(grid, result.arrays, timeout))
        if self.monitor.name is not None and server.rounds > self.best.get("scored", 0):  # killed before it was scored
            self._score(server.rounds, result, grid)
        while server.rounds < num_rounds and not self.monitor.is_over(self.best):
            server_round = server.rounds + 1
            if self.course is not None:
                outcomes = self.course.turn(grid, server.rounds, result.arrays, self.safeguards.min_clients)
                arrays, metrics = _records(self.fuse(outcomes, server_round))
            else:
                questions = self.configure_train(server_round, result.arrays, ConfigRecord(), grid)
                arrays, metrics = self.aggregate_train(server_round, grid.send_and_receive(questions, timeout=timeout))
            result.arrays = arrays or result.arrays
            result.train_metrics_clientapp[server_round] = metrics
            self._score(server_round, result, grid)
            told_round(server_round, num_rounds, {**metrics, **result.evaluate_metrics_clientapp.get(server_round, {})})
        if self.across:
            self._score_across(grid)
        if self.best:
            posterior = GaussianPosterior.from_state_dict(self.best["posterior"])
            result.arrays = wire.to_arrays(posterior, self.best["buffers"])
            rank_zero_info(f"Round {self.best['round']} is the best: {self.monitor.name} {self.best['score']:.4g}")
        if calibration:
            self.calibrate(grid, result.arrays, calibration, timeout)
        return result

    def _score(self, server_round: int, result: Result, grid: Grid) -> None:
        """Let clients score the global posterior, if ``evaluate``, and keep the best."""
        questions = list(self.configure_evaluate(server_round, result.arrays, ConfigRecord(), grid))
        if not questions:
            return
        scores = self.aggregate_evaluate(server_round, grid.send_and_receive(questions, timeout=self._timeout))
        if scores is not None:
            result.evaluate_metrics_clientapp[server_round] = scores
        if self.monitor.name is not None:
            self.best = self.monitor.noted(self.best, scores or {}, self.running)
            self.save({})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the round's cohort from (seed, round) and send it the global posterior. See Flower's ``Strategy``."""
        server = self.server or self.resume(wire.tensors_in(arrays, "the initial arrays"))
        server.posterior, server.buffers = wire.from_arrays(arrays, "the global arrays")
        nodes = self._roster.wait(grid, self.safeguards.min_clients, self._timeout)
        self._asked = {nodes[client]: client for client in self.begin(server_round, nodes)}
        return self._messages(MessageType.TRAIN, server_round, arrays, self._asked, config)

    def _messages(
        self, kind: str, server_round: int, arrays: ArrayRecord, nodes: dict[int, int], config: Mapping[str, Any]
    ) -> list[Message]:
        """Return a message for each client of ``nodes``, node → client, with ``config`` as further configuration."""
        messages = []
        arrays = ArrayRecord({key: array for key, array in arrays.items() if self.method.tells(key)})
        for node, client in nodes.items():
            whole = ConfigRecord({**self.config_for(client, server_round), **config})
            content = RecordDict({"arrays": arrays, "config": whole})
            counted = self.counted_for(client) if kind == MessageType.TRAIN else None
            if counted is not None:
                content[COUNTED] = wire.record_of(counted)
            messages.append(Message(content, node, kind, group_id=str(server_round)))
        return messages

    def _ask(self, node: int, client: int, server_round: int, arrays: ArrayRecord, told: Mapping[str, Any]) -> Message:
        """Return the message by which a client begins, in a federation without rounds."""
        return self._messages(MessageType.TRAIN, server_round, arrays, {node: client}, told)[0]

    def _read(self, reply: Message, client: int, server_round: int) -> ClientUpdate | ClientFailure:
        if has_lost_state(wire.header_in(reply)) and client in self.running.sites:
            self.running.untold.add(client)
        return self.update_of(client, read_all([reply], {reply.metadata.src_node_id: client}, "update", server_round))

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord]:
        """Fuse the usable replies of the round. Return new arrays, None if it failed, and figures. See Flower's."""
        replies, asked = list(replies), self._asked
        for reply in replies:
            if reply.metadata.src_node_id not in asked:
                rank_zero_info(f"Round {server_round}: node {reply.metadata.src_node_id} answers, but was not asked")
        lost = [asked.get(each.metadata.src_node_id, -1) for each in replies if has_lost_state(wire.header_in(each))]
        answers = read_all(replies, asked, "update", server_round)
        return _records(self.finish(server_round, asked.values(), answers, lost))

    def calibrate(
        self, grid: Grid, arrays: ArrayRecord, calibration: Sequence[Calibration], timeout: float = 3600
    ) -> None:
        """Calibrate the global posterior on the clients' validation data after :meth:`start`, and store the result.

        It is the same as with these callbacks in one process, a FederatedTemperature first; thresholds go by the
        clients' numbers. A client that fails within ``timeout`` seconds is left out. Raise FederationError if it is
        called before :meth:`start`, an argument cannot be used, or no client answers.
        """
        if self.server is None:
            raise FederationError("there is no federation to calibrate yet: call start first")
        check_calibration(calibration)
        errors.check_number("timeout", timeout, "(0, inf)")
        self._roster.wait(grid, self.wait_for, timeout)
        self.calibrate_by(calibration, self._asking(grid, arrays, timeout))

    def _asking(self, grid: Grid, arrays: ArrayRecord, timeout: float) -> Ask:
        """Return the function that asks clients about a calibration of ``arrays``."""
        rounds = max(1, self.running.rounds)

        def ask(
            request: dict[str, Any], clients: set[int] | None, kind: Kind
        ) -> dict[int, ClientMessage | FedBayesError]:
            nodes = {n: c for c, n in self._roster.nodes.items() if clients is None or c in clients}
            questions = self._messages(f"{MessageType.QUERY}.calibrate", rounds, arrays, nodes, request)
            return read_all(grid.send_and_receive(questions, timeout=timeout), nodes, kind, rounds)

        return ask

    def one_shot(self, grid: Grid, arrays: ArrayRecord, method: once.OneShot, timeout: float = 3600) -> once.Once:
        """Federate without rounds: ask every client once, and return what the server makes of the answers.

        ::

            posterior = strategy.one_shot(grid, initial_arrays(network), fb.KroneckerLaplace())
            model = strategy.one_shot(grid, initial_arrays(network), fb.HierarchicalLinearRegression(random=[0]))
            head = strategy.one_shot(grid, initial_arrays(head_module), head_module.head)

        For an :class:`~lightning_fedbayes.KroneckerLaplace` every client trains from ``arrays`` as in the first round,
        for the others it sends sums over its examples. A softmax head asks further, as often as it needs. The result is
        that of the same calls in one process. A client that fails within ``timeout`` seconds is left out. Raise
        FederationError if an argument cannot be used, or no client answers, and FedBayesError if the answers give no
        result.

        Args:
            grid, arrays: how the server reaches the clients, and the network before training.
            method: the same as the clients', ``client_app(one_shot=...)``.

        Returns: the global posterior of the network, the fitted linear model, whose clients go by their numbers, or
            the :class:`~lightning_fedbayes.modules.HeadFit`.
        """
        once.check_one_shot(method)
        errors.check_number("timeout", timeout, "(0, inf)")
        server = self.server or self.resume(wire.tensors_in(arrays, "the initial arrays"))
        self._timeout = timeout
        self._roster.wait(grid, self.wait_for, timeout)
        if isinstance(method, KroneckerLaplace):
            arrays = self._scaled(server, grid, arrays, 1)
        if not once.starts_from(method, server.posterior):
            arrays = wire.to_arrays(GaussianPosterior.point_mass({}), {})
        ask = partial(self._ask_once, grid, arrays, method)
        first = usable(ask(None, {}), lambda message: once.read_once(message, method, server.posterior))
        return once.fused(method, once.bounded(method, first, self.safeguards.max_influence, server.posterior), ask)

    def _ask_once(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        method: once.OneShot | str,
        clients: Collection[int] | None = None,
        told: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[int, Any]:
        nodes = {node: c for c, node in self._roster.nodes.items() if clients is None or c in clients}
        action = f"{MessageType.QUERY}.once"
        questions = self._messages(action, 1, arrays, nodes, {"one-shot": repr(method)})
        for question in questions if told else ():
            question.content[once.TOLD] = wire.record_of(told or {})
        return read_all(grid.send_and_receive(questions, timeout=self._timeout), nodes, once.kind_of(method), 1)

    def _scaled(self, server: Server, grid: Grid, arrays: ArrayRecord, rounds: int) -> ArrayRecord:
        """Return the global ``arrays`` with the scale of the clients' data. Ask for it, and for steps, where needed."""
        self.count(rounds, partial(self._ask_once, grid, arrays, once.COUNTING))
        server.buffers = once.with_scale(server.buffers, partial(self._ask_once, grid, arrays, once.SCALING))
        return wire.to_arrays(server.posterior, server.buffers)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the global posterior to all clients at hand to score, if ``evaluate``. See Flower's ``Strategy``."""
        if not self.evaluate:
            return []
        self._scoring = nodes = self._at_leisure(grid)
        return self._messages(MessageType.EVALUATE, server_round, arrays, nodes, config)

    def _at_leisure(self, grid: Grid) -> dict[int, int]:
        known = self._roster.update(grid, self._timeout) if self.course is None else self.course.free
        return {node: client for client, node in known.items()}

    def _score_across(self, grid: Grid) -> None:
        """Let each client score the last posterior of each, for :attr:`cross_scores`, one posterior after another."""
        found, server_round = {}, self.running.rounds
        for client, model in self.own_models().items():
            nodes = self._at_leisure(grid)
            arrays = wire.to_arrays(*model)
            asked = self._messages(MessageType.EVALUATE, server_round, arrays, nodes, {"across": True})
            replies = grid.send_and_receive(asked, timeout=self._timeout)
            found[client] = read_all(replies, nodes, "scores", server_round)
        self.take_across(found)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        r"""Return means over the clients, weighted by validation examples, :math:`\sum n_k m_k / \sum n_k`.

        Clients without a finite number of a figure do not count in it. See Flower's ``Strategy``.
        """
        found = read_all(replies, self._scoring, "scores", server_round)
        if self.schedule is not None:  # clients at work keep their last scores
            good = {client: each for client, each in found.items() if isinstance(each, ClientMessage)}
            self._scores = {**self._scores, **good}
            found = {**self._scores, **found}
        means = self.take_scores(server_round, found)
        return MetricRecord({**means}) if means else None


def _records(result: RoundResult) -> tuple[ArrayRecord | None, MetricRecord]:
    arrays = wire.to_arrays(result.posterior, result.buffers) if result.success else None
    return arrays, MetricRecord({**result.figures})


def read_all(
    replies: Iterable[Message], nodes: Mapping[int, int], kind: Kind, server_round: int
) -> dict[int, ClientMessage | FedBayesError]:
    """Return the message of each client of ``nodes`` (node → client), or why it cannot be read, by its number."""
    found: dict[int, ClientMessage | FedBayesError] = {}
    for reply in replies:
        client = nodes.get(reply.metadata.src_node_id)
        if client is not None:
            found[client] = attempted(partial(wire.message_in, reply, client, kind, server_round))
    return dict(sorted(found.items()))
