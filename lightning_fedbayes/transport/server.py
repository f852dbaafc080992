"""The server's half of a federation over a network: rounds, what clients are asked, and its checkpoint."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_fedbayes.clients.settings import FederationSettings, Fusion, Weighting, check_cohort
from lightning_fedbayes.core.errors import (
    FedBayesError,
    FederationError,
    FusionError,
    check_at_least,
    check_flag,
    check_path,
    told_failures,
)
from lightning_fedbayes.core.messages import ClientFailure, ClientOutcome, ClientUpdate, Message
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.seeding import derive_seed, seed_everything
from lightning_fedbayes.fusion.accumulator import check_structure
from lightning_fedbayes.methods import Late, get_method
from lightning_fedbayes.methods.method import PREFIX
from lightning_fedbayes.server import Server
from lightning_fedbayes.server.plan import Fraction, RoundPlan, choose_cohort
from lightning_fedbayes.server.safeguards import USUAL, Safeguards
from lightning_fedbayes.server.server import RoundResult
from lightning_fedbayes.transport.calibration import Ask, Calibration, calibrate
from lightning_fedbayes.transport.checkpoint import ServerState
from lightning_fedbayes.transport.messages import (
    client_scores,
    cross_scores,
    posterior_in,
    probabilistic_names,
    read_update,
)

Answers = Mapping[int, "Message | FedBayesError"]
"""Client → what it has sent, or why that cannot be read."""


class Rounds:
    """Runs the rounds of a federation; a transport brings questions to the clients and their answers back.

    For the arguments and attributes see :class:`~lightning_fedbayes.flower.FusionStrategy`.

    Attributes:
        numbers: site → its client's number, where the server numbers them.
        best: the best round, where a transport tells it; see :class:`~lightning_fedbayes.transport.ServerState`.
    """

    late: Late | None = None
    """Way in which averages take late messages; None with rounds."""

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
        seed: int = 0,
    ) -> None:
        settings = FederationSettings(  # for its checks
            fusion=get_method(fusion), weighting=weighting, fraction=fraction, safeguards=safeguards, seed=seed
        )
        check_at_least("wait_for", wait_for, 1)
        check_cohort(wait_for, fraction, safeguards.min_clients)
        check_flag("evaluate", evaluate)
        check_flag("across", across)
        self.method = settings.method
        if across and (self.method.sends_means or self.method.name == "sums"):
            raise FederationError(
                f"across=True with fusion='{self.method.name}': its clients send no posterior of their own; give a "
                "method whose clients do, or across=False"
            )
        self.weighting = settings.weighting
        self.fraction: Fraction = fraction
        self.wait_for = wait_for
        self.safeguards = safeguards
        self.evaluate = evaluate
        self.across = across
        self.checkpoint = None if checkpoint is None else check_path("checkpoint", checkpoint)
        self.seed = seed
        self.server: Server | None = None
        self.client_scores = client_scores({})
        self.cross_scores = cross_scores({})
        self.numbers: dict[str, int] = {}
        self.best: dict[str, Any] = {}
        self._federation = ""
        self._timeout = 3600.0
        self._at_hand = 1
        self._frozen = ""
        self._probabilistic: set[str] = set()

    def summary(self) -> None:
        """Say how rounds are run."""
        rank_zero_info(
            f"Fusion {self.method.name}, weighting {self.weighting}, fraction {self.fraction}, at least "
            f"{self.safeguards.min_clients} of {self.wait_for} clients, seed {self.seed}, checkpoint {self.checkpoint}"
        )

    def resume(self, model: Mapping[str, Tensor]) -> Server:
        """Make the server that starts from ``model``, an ``initial_model``, or goes on from the checkpoint."""
        posterior, buffers = posterior_in(model, "the initial model")
        self._probabilistic = probabilistic_names(model)
        self._frozen = next((key.removeprefix("frozen/") for key in model if key.startswith("frozen/")), "")
        self._federation = uuid.uuid4().hex
        self._sent: dict[int, ClientUpdate] = {}  # that others are to score
        self._own: dict[int, ClientUpdate] = {}  # those of them that have been admitted
        self.server = Server(
            posterior, buffers, fusion=self.method, weighting=self.weighting, safeguards=self.safeguards, late=self.late
        )
        self.best, under_way = {}, {}
        if self.checkpoint is not None and self.checkpoint.exists():
            stored = ServerState.load(self.checkpoint)
            self._check_same(stored, posterior)
            self._federation, self.numbers = stored.federation, dict(stored.numbers)
            self.best, under_way = dict(stored.best), dict(stored.under_way)
            self.server.load_state_dict(stored.server)
            rank_zero_info(f"Resuming after round {stored.rounds} of {self.checkpoint}.")
        self.go_on(under_way)
        return self.server

    def go_on(self, under_way: Mapping[str, Any]) -> None:
        """Take up what :meth:`under_way` gave, of a run that has ended too early; empty at the beginning."""

    def under_way(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold of messages under way."""
        return {}

    def ended(self, outcomes: Sequence[ClientOutcome]) -> None:
        """Note what has become of the messages of a fusion, before the checkpoint is written."""

    def _check_same(self, stored: ServerState, begun: GaussianPosterior) -> None:
        """Raise FederationError if the checkpoint is of another federation than the one that is begun."""
        reasons = [] if stored.seed == self.seed else [f"seed={self.seed} (was {stored.seed})"]
        try:
            check_structure(stored.posterior, begun, "the checkpoint")
        except FusionError as error:
            reasons.append(str(error))
        if reasons:
            raise FederationError(
                f"{self.checkpoint} is of another federation: {'; '.join(reasons)}. Resume with the same network and "
                "seed, or give checkpoint= another path"
            )

    def begin(self, server_round: int, clients: Collection[int]) -> tuple[int, ...]:
        """Begin a round, from 1; return its cohort, drawn from (seed, round) of the clients at hand, ascending."""
        assert self.server is not None
        at_hand, self._at_hand = sorted(clients), len(clients)
        chosen = choose_cohort(server_round - 1, len(at_hand), self.fraction, self.seed)
        asked = tuple(sorted(at_hand[position] for position in chosen))
        self.server.begin(RoundPlan(server_round - 1, asked, clients=len(at_hand)))
        return asked

    def config_for(self, client: int, server_round: int) -> dict[str, Any]:
        """Return what every question to a client says (:data:`~lightning_fedbayes.transport.client.CONFIG_KEYS`)."""
        assert self.server is not None
        return {
            "server-round": server_round,
            "seed": self.seed,
            "federation": self._federation,
            "begun": not self.server.is_new,
            "method": self.method.agreement(),
            "frozen": self._frozen,
            "share": 1 / max(1, self._at_hand),
            "accepted": self.server.accepted.get(client, 0),
        }

    def counted_for(self, client: int) -> Mapping[str, Tensor] | None:
        """Return what a client that trains is told of its site; None: nothing."""
        assert self.server is not None
        return self.server.sites[client] if client in self.server.untold else None

    def finish(
        self, server_round: int, asked: Collection[int], answers: Answers, lost: Collection[int] = ()
    ) -> RoundResult:
        """Fuse what can be used of a round's answers, and write the checkpoint.

        Args:
            server_round: from 1.
            asked: its cohort.
            answers: of the cohort.
            lost: clients that say that they have lost what they had to keep.

        Raises:
            FederationError: too many rounds in a row came to nothing.
        """
        server = self.server
        assert server is not None
        server.untold |= set(lost) & server.sites.keys()
        return self.fuse([server.admit(self.update_of(client, answers)) for client in sorted(asked)], server_round)

    def fuse(self, outcomes: Sequence[ClientOutcome], server_round: int) -> RoundResult:
        """Fuse what has been admitted, whose sums depend on the order, and write the checkpoint.

        Raises:
            FederationError: too many rounds in a row came to nothing.
        """
        server = self.server
        assert server is not None
        for line in told_failures({str(each.client): each.error for each in outcomes if each.error is not None}):
            rank_zero_info(f"Round {server_round}: {line}")
        seed_everything(derive_seed(self.seed, "fusion", server_round - 1))  # of rules that draw
        try:
            result = server.finish()
        finally:
            if server.rounds == server_round:
                self.ended(outcomes)
            self.save({})
        good = {each.client for each in outcomes if each.error is None}
        self._own |= {client: update for client, update in self._sent.items() if client in good}
        self._sent = {client: update for client, update in self._sent.items() if client not in good}
        if result.refusal is not None:
            rank_zero_info(f"The old posterior stays, because the clients cannot be fused: {result.refusal}")
        return result

    def update_of(self, client: int, answers: Answers) -> ClientUpdate | ClientFailure:
        """Return a client's update, or why it has none."""
        try:
            answer = answers.get(client, FusionError(f"client {client}: no reply within {self._timeout:g} s"))
            if isinstance(answer, FedBayesError):
                raise answer
            update = read_update(answer, set() if self.method.sends_means else self._probabilistic)
        except FedBayesError as refusal:
            return ClientFailure(client, refusal)
        if self.across:
            self._sent[client] = update
        return update

    def save(self, calibration: dict[str, dict[str, Any]]) -> None:
        """Write the checkpoint, if there is one."""
        if self.checkpoint is not None:
            assert self.server is not None
            state = self.server.state_dict()
            parts = (state, calibration, self.numbers, self.best, self.under_way())
            ServerState(self._federation, self.seed, *parts).save(self.checkpoint)

    def take_scores(self, server_round: int, answers: Answers) -> dict[str, float]:
        r"""Keep the clients' scores; return means weighted by validation examples, :math:`\sum n_k m_k / \sum n_k`.

        Of each figure over the clients that sent it as a finite number.
        """
        refused = {str(client): each for client, each in answers.items() if isinstance(each, FedBayesError)}
        for line in told_failures(refused):
            rank_zero_info(f"Round {server_round}, evaluation: {line}")
        self.client_scores = client_scores(
            {
                client: (each.num_examples, each.figures)
                for client, each in answers.items()
                if isinstance(each, Message) and each.num_examples > 0
            }
        )
        return {name: self.client_scores.mean(name) for name in self.client_scores.values}

    def own_models(self) -> dict[int, tuple[GaussianPosterior, dict[str, Tensor]]]:
        """Return posterior and buffers that each client has sent last in this run, ``across`` given; by its number.

        What a method keeps at the server beside is the server's.
        """
        assert self.server is not None
        shared = self.server.buffers
        return {
            client: (
                update.posterior,
                {
                    name: buffer if name.startswith(PREFIX) else update.buffers.get(name, buffer)
                    for name, buffer in shared.items()
                },
            )
            for client, update in sorted(self._own.items())
        }

    def take_across(self, answers: Mapping[int, Answers]) -> None:
        """Make the table of what each client has answered about the model of each: client of the model → answers."""
        for model, row in answers.items():
            refused = {str(client): each for client, each in row.items() if isinstance(each, FedBayesError)}
            for line in told_failures(refused):
                rank_zero_info(f"The model of client {model} on the data of each: {line}")
        self.cross_scores = cross_scores(
            {
                model: {c: each for c, each in row.items() if isinstance(each, Message) and each.num_examples > 0}
                for model, row in answers.items()
            }
        )
        if self.cross_scores is None:
            rank_zero_info("across=True: fewer than two clients have trained in this run and scored all models")
        else:
            rank_zero_info(f"Each client's own model on the data of each:\n{self.cross_scores.markdown()}")

    def calibrate_by(self, calibration: Sequence[Calibration], ask: Ask) -> None:
        """Fit each calibration from the clients' answers, and write the checkpoint; ``ask`` reaches them."""
        calibrate(calibration, ask)
        self.save({each.state_key: each.state_dict() for each in calibration})


def told_round(server_round: int, rounds: int, figures: Mapping[str, Any]) -> None:
    """Say what has come of a round."""
    named = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if name != "round")
    rank_zero_info(f"Round {server_round} of {rounds}: {named}")
