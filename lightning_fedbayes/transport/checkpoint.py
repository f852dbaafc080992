"""Files of a federation over a network: the server's checkpoint, and each client's state, which stays at the client."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_fedbayes.callbacks.example_privacy import ExamplePrivacy
from lightning_fedbayes.callbacks.trainer import damage
from lightning_fedbayes.clients.model import ResidentModel, call_hook, frozen_names
from lightning_fedbayes.clients.privacy import UpdatePrivacy
from lightning_fedbayes.clients.privacy.accountant import check_steps, epsilon_spent
from lightning_fedbayes.clients.settings import BufferPolicy
from lightning_fedbayes.clients.states import ClientState
from lightning_fedbayes.core.errors import FederationError, check_at_least, check_kind, check_number, check_path
from lightning_fedbayes.core.messages import check_mapping
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.methods.method import split
from lightning_fedbayes.server.plan import STRIDE
from lightning_fedbayes.server.server import check_state
from lightning_fedbayes.transport.schedules import Steps


@dataclass(frozen=True)
class ServerState:
    """A federation between two rounds.

    Args:
        federation: a unique name by which clients recognise their states.
        seed: source of its random draws.
        server: state of the server (:meth:`Server.state_dict <lightning_fedbayes.Server.state_dict>`).
        calibration: state of each calibration of the global posterior, by its ``state_key``. Empty before the first.
        numbers: site → its client's number, where the server numbers them.
        best: the best round by a strategy's ``monitor``: "score", "round", "posterior" and "buffers".
        under_way: who trains from which version of the global posterior, in a federation without rounds.
        steps: of each round, where learning rates move in every step (:class:`.Steps`).
    """

    federation: str
    seed: int
    server: dict[str, Any]
    calibration: dict[str, dict[str, Any]] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    under_way: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, Any] = field(default_factory=lambda: Steps(None).state_dict())

    @property
    def posterior(self) -> GaussianPosterior:
        """The global posterior."""
        return GaussianPosterior.from_state_dict(self.server["posterior"])

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The global buffers, name → tensor."""
        return self.server["buffers"]

    @property
    def rounds(self) -> int:
        """Number of finished rounds."""
        return self.server["rounds"]

    @property
    def history(self) -> list[dict[str, float]]:
        """One dict of figures per finished round, in order. Its "round" counts from 1."""
        return self.server["history"]

    def save(self, path: Path) -> None:
        """Write the file in one step: a crash keeps the earlier one. Raises FederationError if the disk refuses it."""
        write_whole(path, vars(self))

    @classmethod
    def load(cls, path: Path) -> "ServerState":
        """Read what :meth:`save` wrote. Raise FederationError for a damaged or foreign file."""
        try:
            if (reason := damage(path)) is not None:
                raise ValueError(reason)
            state = cls(**torch.load(path, map_location="cpu", weights_only=True))
            check_state(state.server)
            GaussianPosterior.from_state_dict(state.server["posterior"])
            check_kind("federation", state.federation, str, "a name is needed")
            check_kind("seed", state.seed, int, "a number is needed")
            check_mapping("calibration", state.calibration, Mapping)
            check_mapping("numbers", state.numbers, int)
            if state.best:
                GaussianPosterior.from_state_dict(state.best["posterior"])
                check_mapping("buffers", state.best["buffers"], Tensor)
            check_mapping("under_way", state.under_way, Mapping)
            Steps(None).load_state_dict(state.steps)
        except Exception as error:  # whatever another program has written
            why = f"{path} is no checkpoint of a server: {error}; give checkpoint= a path of its own"
            raise FederationError(why) from error
        return state


def write_whole(path: Path, content: Mapping[str, Any], save: Callable[[Any, Path], Any] = torch.save) -> None:
    """Write a file by ``save`` in one step: a failure keeps the earlier one, and raises FederationError."""
    written = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(dict(content), written)
        os.replace(written, path)
    except (OSError, RuntimeError) as error:  # of a full disk torch says that a stream failed
        with suppress(OSError):
            written.unlink(missing_ok=True)
        raise FederationError(
            f"{path} cannot be written: {error}. Is the disk full, or the folder write-protected? What was there "
            "before is whole; make room, or give another folder"
        ) from error


def load_checkpoint(
    module: L.LightningModule,
    path: str | Path,
    *,
    buffers: BufferPolicy = "average",
    local_parameters: Sequence[str] = (),
    best: bool = False,
) -> ServerState:
    """Load the global posterior of a server's checkpoint into ``module``, built as for the federation.

    When to use it: after the federation, to validate, predict or go on with the fused network.

    Raise FederationError if the file is no such checkpoint, or holds no best round, and PosteriorError if the posterior
    is of another network.

    Args:
        buffers, local_parameters: as in the federation.
        best: load the best round by FusionStrategy's ``monitor`` in place of the last one.

    Returns: the whole checkpoint. Load its calibration into a callback of the same options by
    ``scaling.load_state_dict(state.calibration[scaling.state_key])``.
    """
    state = ServerState.load(Path(path))
    if best and not state.best:
        raise FederationError(f"{path} holds no best round: train with FusionStrategy(evaluate=True, monitor=...)")
    posterior = GaussianPosterior.from_state_dict(state.best["posterior"]) if best else state.posterior
    rest = frozen_names(module) - posterior.mean.keys()
    model = ResidentModel(module, local_parameters, buffers, frozen=rest)
    model.load_posterior(posterior, split(state.best["buffers"] if best else state.buffers)[0])
    call_hook(module, "on_round_end", model.whole(posterior), [])
    return state


class StateFile:
    """A client's state on its disk, from round to round, between processes and runs. Without a folder it keeps none.

    The state after a round counts once the server has admitted that round's update: ``before`` is the last such state.
    If the file is damaged, foreign or gone, the client warns, starts without a state, and counts a private message for
    each earlier round. ``messages``, noise multiplier → number of private messages, is of all federations, as is
    ``secret``, the key of noise, and ``steps``, those of an :class:`~lightning_fedbayes.ExamplePrivacy`.
    """

    def __init__(self, folder: Path | None, client: int, config: Mapping[str, Any]) -> None:
        self.path = None if folder is None else folder / f"client-{client}.pt"
        self.federation, self.round, self.client = config["federation"], config["server-round"], client
        self.before: dict[int, Any] = {}
        self.messages: dict[float, int] = {}
        self.steps: dict[int, Any] = {}
        self.secret = secrets.token_hex(32)
        self._uncounted = self.round - 1 if config["accepted"] else 0  # of a client that has lost its file
        if self.path is None or not self.path.exists():
            return
        try:
            stored = stored_state(self.path, client)
        except FederationError as error:
            rank_zero_warn(f"{error}: client {client} starts anew")
            self._uncounted = self.round - 1
            return
        self._uncounted = 0
        self.messages, self.secret, self.steps = (stored[name] for name in ("messages", "secret", "steps"))
        if stored["federation"] == self.federation:
            self.before = stored["after"] if stored["round"] == config["accepted"] else stored["before"]

    def amend(self, client: int, kept: Mapping[str, Tensor]) -> None:
        """Let a client keep ``kept`` for the method, as the server has counted it."""
        state = {**vars(ClientState()), **self.before.get(client, {}), "kept": dict(kept)}
        self.before = {**self.before, client: state}

    def count(self, privacy: UpdatePrivacy) -> float:
        """Count a private message. Return the ε of all so far."""
        noise = privacy.noise_multiplier
        self.messages[noise] = self.messages.get(noise, self._earlier()) + 1
        return epsilon_spent([(noise, 1.0, count) for noise, count in self.messages.items()], privacy.delta)

    def count_steps(self, privacy: ExamplePrivacy) -> dict[str, float]:
        """Keep the steps that ``privacy`` has counted. Return the ε of the client with the most, under its name."""
        times = 1 + (0 if self.steps else self._earlier())
        found = privacy.state_dict()["steps"].items()
        self.steps = {job: [(z, share, times * steps) for z, share, steps in kinds] for job, kinds in found}
        privacy.load_state_dict({"steps": self.steps, "secret": self.secret})
        return {privacy.figure: max(privacy.epsilons.values())}

    def _earlier(self) -> int:
        """Return the number of earlier rounds that no account tells of. Warn if the file is gone."""
        if self._uncounted and self.path is not None and not self.path.exists():
            rank_zero_warn(
                f"{self.path} has no account of the private messages that the server has had: ε is that of one in each "
                f"of the {self._uncounted} rounds before. Keep the folder from run to run"
            )
        return self._uncounted

    def write(self, after: dict[int, Any]) -> None:
        """Write the state after the round, and the one before it in case the update is refused."""
        if self.path is not None:
            names = ("client", "federation", "round", "messages", "secret", "steps", "before")
            known = {name: getattr(self, name) for name in names}
            write_whole(self.path, {**known, "after": after})


def stored_state(path: Path, client: int) -> dict[str, Any]:
    """Return what :meth:`StateFile.write` of a ``client`` has written. Raise FederationError for any other file."""
    reason = damage(path)
    if reason is not None:
        raise FederationError(f"the state {path} is damaged ({reason})")
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        if stored.get("client", client) != client:
            raise ValueError(f"it is of client {stored['client']}")
        check_kind("federation", stored["federation"], str, "a name is needed")
        check_kind("secret", stored["secret"], str, "a text is needed")
        check_at_least("round", stored["round"], 1)
        check_steps(stored["steps"])
        for noise, count in stored["messages"].items():
            check_number("the noise of messages", noise, "[0, inf)")
            check_at_least("messages", count, 0)
        for job, state in (*stored["before"].items(), *stored["after"].items()):
            check_at_least("client", job, 0)
            made = ClientState(**state)
            check_mapping("local", made.local, Tensor)
            check_mapping("kept", made.kept, Tensor)
            check_kind("optimizers", made.optimizers, list, "a list is needed")
            check_kind("options", made.options, list, "a list is needed")
            if made.own:
                GaussianPosterior.from_state_dict(made.own)
    except Exception as error:  # whatever another program has written
        why = f"{path} is no state of a client ({type(error).__name__}: {error})"
        raise FederationError(f"{why}; give each client a folder of its own") from error
    return stored


def personal_posterior(
    module: L.LightningModule,
    state_folder: str | Path,
    client: int,
    posterior: GaussianPosterior,
    weight: float = 1.0,
    *,
    local_parameters: Sequence[str] = (),
) -> GaussianPosterior:
    """Return a client's personal posterior from its folder.

    ::

        state = load_checkpoint(module, "federation.pt")  # of the server, or its posterior by other means
        personal = personal_posterior(module, "state", 0, state.posterior)
        predictive = fb.PosteriorPredictive(module, personal)

    Raise FederationError if the client has kept no posterior there, or ``weight`` is not in [0, 1].

    When to use it: at the client, after a federation with ``keep=["posterior"]`` or a method that keeps posteriors, to
    predict and to choose ``weight`` (:func:`~lightning_fedbayes.choose_personal_weight`).

    Args:
        module, posterior: the network, built as for the federation, and the global posterior.
        state_folder, client: the client's folder and number.
        weight, local_parameters: see :meth:`~lightning_fedbayes.FederatedBayes.posterior_of` and
            :func:`~lightning_fedbayes.transport.flower.client_app`.
    """
    path = check_path("state_folder", state_folder) / f"client-{client}.pt"
    if not path.exists():
        raise FederationError(f"{path} is not there: give the folder and the number of a client that trains")
    stored = stored_state(path, client)
    jobs = [job for job in stored["after"] if job % STRIDE == client]  # the client's last problem is its personal one
    state = ClientState(**stored["after"][max(jobs)]) if jobs else ClientState()
    if not state.own:
        raise FederationError(f"{path} holds no posterior: train with keep=['posterior']")
    model = ResidentModel(module, local_parameters, frozen=frozen_names(module) - posterior.mean.keys())
    return model.with_local(state.personal(posterior, weight), state.local)
