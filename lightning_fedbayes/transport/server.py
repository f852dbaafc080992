"""The server's half of a federation over a network: rounds, what clients are asked, and its checkpoint."""

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_fedbayes.clients.settings import FederationSettings, Fusion, Weighting, check_cohort
from lightning_fedbayes.core import errors
from lightning_fedbayes.core.messages import ClientFailure, ClientOutcome, ClientUpdate, Message
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.seeding import derive_seed, seed_everything
from lightning_fedbayes.fusion.accumulator import check_structure
from lightning_fedbayes.methods import Late, get_method
from lightning_fedbayes.methods.method import PREFIX
from lightning_fedbayes.server import RoundResult, Server
from lightning_fedbayes.server.guard import USUAL, Safeguards, told_bounded
from lightning_fedbayes.server.plan import Fraction, RoundPlan, choose_cohort
from lightning_fedbayes.transport import calibration as calibrating
from lightning_fedbayes.transport import log, messages
from lightning_fedbayes.transport.checkpoint import ServerState
from lightning_fedbayes.transport.schedules import Steps

Answers = Mapping[int, "Message | errors.FedBayesError"]
"""Client → what it has sent, or why that cannot be read."""


class Rounds:
    """Runs the rounds of a federation. A transport brings questions to the clients and their answers back.

    Args:
        fusion, weighting: see :class:`~lightning_fedbayes.FederatedBayes`.
        fraction: share of the clients at hand in a round, C in (0, 1], drawn in every round. "turns": one of them in
            each round, in the order of their numbers.
        wait_for: clients that must be connected before the first round of a run. Later rounds go on with fewer, but at
            least as many as ``safeguards`` ask for.
        safeguards: quorum, rounds that may fail in a row, and the bound of what one client can do.
        evaluate: let all clients score the global posterior on their validation data after every round.
        across: after the last round of a run send the last posterior of each client to all the others, to be scored on
            their validation data. Clients then see each other's posteriors, which no other setting shows them: ask all
            of them before ([what leaves a client](../what_leaves.md#models-that-clients-see-of-each-other)). K clients
            cause K² messages, and the server keeps K posteriors in memory.
        checkpoint: file of the federation. None keeps it in memory only.
        logger: one of Lightning's loggers, such as ``WandbLogger()``, or a list of them: what a federation in one
            process logs of rounds and clients, under the same names, from the server.
        seed: source of every random draw, the clients' included.

    Attributes:
        server, client_scores, cross_scores: see :class:`~lightning_fedbayes.transport.flower.FusionStrategy`.
        numbers: site → its client's number, where the server numbers them.
        best: the best round, where a transport knows it. See :class:`~lightning_fedbayes.transport.ServerState`.
    """

    late: Late | None = None
    """Way in which averages take late messages. None with rounds."""
    course: Any = None
    """Messages under way, by a transport, in a federation without rounds. None with rounds."""

    def __init__(
        self,
        fusion: Fusion = "reverse_kl_barycenter",
        weighting: Weighting = "train_size",
        *,
        fraction: Fraction = 1.0,
        wait_for: int = 2,
        safeguards: Safeguards = USUAL,
        evaluate: bool = False,
        across: bool = False,
        checkpoint: str | Path | None = None,
        logger: Logger | Sequence[Logger] | None = None,
        seed: int = 0,
    ) -> None:
        settings = FederationSettings(  # for its checks
            fusion=get_method(fusion), weighting=weighting, fraction=fraction, safeguards=safeguards, seed=seed
        )
        errors.check_at_least("wait_for", wait_for, 1)
        check_cohort(wait_for, fraction, safeguards.min_clients)
        errors.check_flag("evaluate", evaluate)
        errors.check_flag("across", across)
        self.method = settings.method
        if across and (self.method.sends_means or self.method.name == "sums"):
            why = f"across=True with fusion='{self.method.name}': its clients send no posterior of their own"
            raise errors.FederationError(f"{why}; give a method whose clients do, or across=False")
        self.weighting, self.safeguards = settings.weighting, safeguards
        self.fraction: Fraction = fraction
        self.wait_for, self.evaluate, self.across, self.seed = wait_for, evaluate, across, seed
        self.checkpoint = None if checkpoint is None else errors.check_path("checkpoint", checkpoint)
        self.server: Server | None = None
        self.client_scores = messages.client_scores({})
        self.cross_scores = messages.cross_scores({})
        self.numbers: dict[str, int] = {}
        self._log, self._described = log.ServerLog(logger), {**settings.described(), "clients": wait_for}
        self.best: dict[str, Any] = {}
        self._federation = ""
        self._timeout = 3600.0
        self._at_hand = 1
        self._frozen = ""
        self._probabilistic: set[str] = set()

    @property
    def running(self) -> Server:
        """The server, once there is one."""
        assert self.server is not None
        return self.server

    def summary(self) -> None:
        """Print the settings."""
        rank_zero_info(
            f"Fusion {self.method.name}, weighting {self.weighting}, fraction {self.fraction}, at least "
            f"{self.safeguards.min_clients} of {self.wait_for} clients, seed {self.seed}, checkpoint {self.checkpoint}"
        )

    def resume(self, model: Mapping[str, Tensor]) -> Server:
        """Make the server that starts from ``model``, an ``initial_model``, or goes on from the checkpoint."""
        posterior, buffers = messages.posterior_in(model, "the initial model")
        self._probabilistic = messages.probabilistic_names(model)
        self._frozen = next((key.removeprefix("frozen/") for key in model if key.startswith("frozen/")), "")
        self._asks_for_steps, self._rounds = "steps/" in model, (0, 0)
        self.steps = Steps(self.safeguards.max_influence)
        self._federation = uuid.uuid4().hex
        self._sent: dict[int, ClientUpdate] = {}  # that others are to score
        self._own: dict[int, ClientUpdate] = {}  # the admitted ones
        self.server = Server(
            posterior, buffers, fusion=self.method, weighting=self.weighting, safeguards=self.safeguards, late=self.late
        )
        self.best, self.resumed = {}, {}
        if self.checkpoint is not None and self.checkpoint.exists():
            stored = ServerState.load(self.checkpoint)
            self._check_same(stored, posterior)
            self._federation, self.numbers = stored.federation, dict(stored.numbers)
            self.best, self.resumed = dict(stored.best), dict(stored.under_way)
            self.server.load_state_dict(stored.server)
            self.steps.load_state_dict(stored.steps)
            rank_zero_info(f"Resuming after round {stored.rounds} of {self.checkpoint}.")
        self._log.begin(self._log.loggers, self._described, self.server.rounds)
        return self.server

    def count(self, rounds: int, ask: Callable[[], Answers]) -> None:
        """Note the number of ``rounds``. Ask clients for their steps, where the module wants to know those of all."""
        if self._asks_for_steps and not self.steps.announced:
            self.steps.announce(calibrating.usable(ask(), lambda message: message))
        self._rounds = rounds, self.steps.total(rounds, self.fraction, self.seed)

    def _check_same(self, stored: ServerState, begun: GaussianPosterior) -> None:
        reasons = [] if stored.seed == self.seed else [f"seed={self.seed} (was {stored.seed})"]
        try:
            check_structure(stored.posterior, begun, "the checkpoint")
        except errors.FusionError as error:
            reasons.append(str(error))
        if reasons:
            remedy = "resume with the same network and seed, or give checkpoint= another path"
            raise errors.FederationError(f"{self.checkpoint} is of another federation: {'; '.join(reasons)}; {remedy}")

    def begin(self, server_round: int, clients: Collection[int]) -> tuple[int, ...]:
        """Begin a round, from 1. Return its cohort, drawn by (seed, round) from the clients at hand, ascending."""
        at_hand, self._at_hand = sorted(clients), len(clients)
        chosen = choose_cohort(server_round - 1, len(at_hand), self.fraction, self.seed)
        asked = tuple(sorted(at_hand[position] for position in chosen))
        self.running.begin(RoundPlan(server_round - 1, asked, clients=len(at_hand)))
        return asked

    def config_for(self, client: int, server_round: int) -> dict[str, Any]:
        """Return the configuration of every question.

        "server-round" is the round, or the version of the global posterior that comes with it, from 1. For "federation"
        and "accepted" see :class:`.StateFile`. "begun" is False until a round has been fused. "share" is the client's
        share of all clients. "method" is :meth:`~lightning_fedbayes.Method.agreement`. "frozen" is the digest of the
        frozen parameters, "" if there are none. "rounds" and "steps" are the federation's rounds, and the largest
        clients' steps in them, 0 if unknown. "moved" is :attr:`.Steps.moved`.
        """
        return {
            "server-round": server_round,
            "version": messages.VERSION,
            "seed": self.seed,
            "federation": self._federation,
            "begun": not self.running.is_new,
            "method": self.method.agreement(),
            "frozen": self._frozen,
            "share": 1 / max(1, self._at_hand),
            "accepted": self.running.accepted.get(client, 0),
            "rounds": self._rounds[0],
            "steps": self._rounds[1],
            "moved": self.steps.moved if self.late is None else [-1],  # fewer than rounds: those have no order
        }

    def counted_for(self, client: int) -> Mapping[str, Tensor] | None:
        """Return the server's count of a training client's site, if the client is to take it over."""
        return self.running.sites[client] if client in self.running.untold else None

    def finish(
        self, server_round: int, asked: Collection[int], answers: Answers, lost: Collection[int] = ()
    ) -> RoundResult:
        """Fuse the usable answers of the cohort ``asked`` in round ``server_round``, from 1, and write the checkpoint.

        ``lost`` are the clients that have lost their state. Raises FederationError if too many rounds in a row failed.
        """
        server = self.running
        server.untold |= set(lost) & server.sites.keys()
        server.hear({client: each.num_examples for client, each in answers.items() if isinstance(each, Message)})
        return self.fuse([server.admit(self.update_of(client, answers)) for client in sorted(asked)], server_round)

    def fuse(self, outcomes: Sequence[ClientOutcome], server_round: int) -> RoundResult:
        """Fuse the admitted updates, in their order, and write the checkpoint. For errors see :meth:`finish`."""
        server = self.running
        tell_failures(f"Round {server_round}", {each.client: each.error for each in outcomes})
        seed_everything(derive_seed(self.seed, "fusion", server_round - 1))  # of rules that draw
        final = outcomes
        try:
            result = server.finish()
            final = result.outcomes
            refused = {} if result.aggregate is None else result.aggregate.refused
            tell_failures(
                f"Round {server_round}", {each.client: each.error for each in final if each.client in refused}
            )
        finally:
            if server.rounds == server_round:
                self.steps.end_round(server_round - 1, final)
                if self.course is not None:
                    self.course.end(outcomes)
            self.save({})
        good = {each.client for each in outcomes if each.error is None}
        self._own |= {client: update for client, update in self._sent.items() if client in good}
        self._sent = {client: update for client, update in self._sent.items() if client not in good}
        if result.bounded:
            rank_zero_info(f"Round {server_round}: {told_bounded(result.bounded)}")
        if result.refusal is not None:
            rank_zero_info(f"The old posterior stays, because the clients cannot be fused: {result.refusal}")
        self._log.end_round(result, self.numbers, max(self._at_hand, len(server.accepted)))
        return result

    def update_of(self, client: int, answers: Answers) -> ClientUpdate | ClientFailure:
        """Return a client's update, or its failure."""
        try:
            answer = answers.get(client, errors.FusionError(f"client {client}: no reply within {self._timeout:g} s"))
            if isinstance(answer, errors.FedBayesError):
                raise answer
            update = messages.read_update(answer, set() if self.method.sends_means else self._probabilistic)
        except errors.FedBayesError as refusal:
            return ClientFailure(client, refusal)
        if self.across:
            self._sent[client] = update
        return update

    def save(self, calibration: dict[str, dict[str, Any]]) -> None:
        """Write the checkpoint, if there is one."""
        if self.checkpoint is not None:
            under_way = {} if self.course is None else self.course.state_dict()
            parts = (self.running.state_dict(), calibration, self.numbers, self.best, under_way)
            ServerState(self._federation, self.seed, *parts, self.steps.state_dict()).save(self.checkpoint)

    def take_scores(self, server_round: int, answers: Answers) -> dict[str, float]:
        r"""Keep the clients' scores; return means by validation examples, :math:`\sum n_k m_k / \sum n_k`."""
        self.client_scores = messages.client_scores(scored(f"Round {server_round}, evaluation", answers))
        self._log.scored(server_round, self.client_scores, self.numbers)
        return {name: self.client_scores.mean(name) for name in self.client_scores.values}

    def own_models(self) -> dict[int, tuple[GaussianPosterior, dict[str, Tensor]]]:
        """Return each client's last posterior and buffers in this run, if ``across``. Tensors of methods are global."""
        found = {}
        for client, update in sorted(self._own.items()):
            sent = {name: value for name, value in update.buffers.items() if not name.startswith(PREFIX)}
            buffers = {name: sent.get(name, value) for name, value in self.running.buffers.items()}
            found[client] = update.posterior, buffers
        return found

    def take_across(self, answers: Mapping[int, Answers]) -> None:
        """Make the table of all clients' answers about each client's model: client of the model → answers."""
        rows = {c: scored(f"The model of client {c} on the data of each", row) for c, row in answers.items()}
        self.cross_scores = messages.cross_scores(rows)
        if self.cross_scores is None:
            rank_zero_info("across=True: fewer than two clients have trained in this run and scored all models")
        else:
            rank_zero_info(f"Each client's own model on the data of each:\n{self.cross_scores.markdown()}")

    def calibrate_by(self, calibration: Sequence[calibrating.Calibration], ask: calibrating.Ask) -> None:
        """Fit temperature and thresholds from the clients' answers, and write the checkpoint. ``ask`` reaches them."""
        temperature = 1.0
        for each in calibration:
            if isinstance(each, calibrating.FederatedTemperature):
                calibrating.find_temperature(each, ask)
                temperature = each.check_fitted()
            else:
                calibrating.take_thresholds(each, temperature, ask)
            figures = ", ".join(f"{name} {value:.4g}" for name, value in each.figures().items())
            rank_zero_info(f"Calibration {each.label}: {figures}")
        self.save({each.state_key: each.state_dict() for each in calibration})


def tell_failures(where: str, answers: Mapping[int, Any]) -> None:
    """Print why clients are left out, of those with an error as their answer."""
    failures = {str(client): each for client, each in answers.items() if isinstance(each, Exception)}
    for line in errors.told_failures(failures):
        rank_zero_info(f"{where}: {line}")


def scored(where: str, answers: Answers) -> dict[int, Message]:
    """Return the scores of clients that have examples. Print why others are left out."""
    tell_failures(where, answers)
    return {client: each for client, each in answers.items() if isinstance(each, Message) and each.num_examples > 0}


def told_round(server_round: int, rounds: int, figures: Mapping[str, Any]) -> None:
    """Print the figures of a round."""
    named = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if name != "round")
    rank_zero_info(f"Round {server_round} of {rounds}: {named}")
