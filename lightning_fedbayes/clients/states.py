"""States that clients keep between rounds, in memory or on disk, and optimizers as each client starts with them."""

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedbayes.core.errors import FederationError, FusionError, check_number
from lightning_fedbayes.core.messages import ClientFailure, ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.store import Store
from lightning_fedbayes.fusion import fuse
from lightning_fedbayes.server.plan import STRIDE


@dataclass(frozen=True)
class Client:
    """A client that begins to train.

    Args:
        number, name, num_examples: of the client, numbered from 0.
        round: from 0.
        position, cohort: its position among the clients of the round that this process trains, and their number.
        problem: the index of the client's problem, from 0 (:attr:`~lightning_fedbayes.Method.problems`).
    """

    number: int
    name: str
    num_examples: int
    round: int
    position: int
    cohort: int
    problem: int = 0

    @property
    def job(self) -> int:
        """The number by which an engine tells problems of clients apart."""
        return self.number + self.problem * STRIDE


@dataclass
class ClientState:
    """State that a client keeps from round to round. It never leaves the client.

    Args:
        local: local parameters and buffers, name → tensor.
        optimizers: state of each optimizer: number of the parameter → the optimizer's entries for it.
        options: changes of each optimizer's options by training: see :meth:`ClientOptimizer.read`.
        kept: what the method keeps at the client, such as its site.
        own: the ``state_dict`` of the posterior that the client has trained last. Empty if it keeps none.
        rounds: of the federation, when the optimizers' states were kept. 0 if they are not.
    """

    local: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[dict[int, dict[str, Any]]] = field(default_factory=list)
    options: list[list[dict[str, Any]]] = field(default_factory=list)
    kept: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    rounds: int = 0

    def personal(self, posterior: GaussianPosterior, weight: float) -> GaussianPosterior:
        """Return the barycenter of the global ``posterior`` and the client's, if any, by ``weight`` in [0, 1]."""
        check_number("weight", weight, "[0, 1]", why="the client's own part of its personal posterior")
        if not self.own or not weight:
            return posterior
        own = GaussianPosterior.from_state_dict(self.own)
        fused = own if weight == 1 else fuse("reverse_kl_barycenter", [posterior, own], [1 - weight, weight])
        return fused.marked(posterior.linearised)


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups, without the parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its ``state_dict``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


Trained = dict[int, dict[str, Any]]
"""New states of the clients that one process has trained, ready to be sent."""
ON_THE_CPU = frozenset({"step", "examples", "received"})
"""Entries of an optimizer's state, torch's and IVON's, that are numbers on the CPU for parameters on any device."""


class States:
    """States of all clients, by the numbers that an engine uses. A round's new ones count when it ends.

    Raises FederationError if the folder cannot be used.

    Args:
        folder: of the states. None: in ``memory``.
        writes: this process writes what all have trained.
        device: where clients train.

    Attributes:
        is_shared: True if several processes share the clients of a round.
        sample: the optimizers' states of one of the clients. Empty before any client has kept some.
    """

    def __init__(
        self, folder: str | Path | None = None, *, writes: bool = True, device: torch.device | None = None
    ) -> None:
        self.store = None if folder is None else Store(folder, writes=writes)
        self.device = torch.device("cpu") if device is None else device
        self.is_shared = False
        self.memory: dict[int, ClientState] = {}
        self.sample: list[OptimizerState] = []
        self._last: list[OptimizerState] = []
        self._new: dict[int, ClientState] = {}

    @property
    def writes_at_once(self) -> bool:
        """True if a client's state goes to the disk as soon as it is kept, so that memory need not hold it."""
        return self.store is not None and not self.is_shared

    def of(self, client: int) -> ClientState:
        """Return what a client keeps. An empty state before it keeps anything."""
        if self.store is None:
            return self.memory.get(client, ClientState())
        state = self.store.get(client)
        return self._here(state) if state else ClientState()

    def clients(self) -> set[int]:
        """Return the numbers of the clients that keep something, for any of their problems."""
        return {number % STRIDE for number in (self.memory if self.store is None else self.store.clients())}

    def keep(self, client: int, state: ClientState) -> None:
        """Take the state of a client that has trained. An empty one takes no memory."""
        if self.store is not None and self.writes_at_once:
            self.store.put(client, vars(state))
            self._last = state.optimizers if any(state.optimizers) else self._last
        elif any(vars(state).values()) or client in self.memory:
            self._new[client] = state

    def withdraw(self, client: int) -> ClientState | None:
        """Return the new state of a client that has trained, and drop it here. None for an empty one."""
        if self.store is None or not self.writes_at_once:
            return self._new.pop(client, None)
        state = self.store.pending(client)
        self.store.forget(client)
        return None if state is None else self._here(state)

    def amend(self, client: int, kept: Mapping[str, Tensor]) -> None:
        """Let a client that has trained in this round keep ``kept`` for the method, as the server has counted it."""
        if client in self._new:
            self._new[client] = replace(self._new[client], kept=dict(kept))
        elif self.store is not None and self.writes_at_once:
            self.store.put(client, {**(self.store.pending(client) or {}), "kept": dict(kept)})

    def forget(self, client: int) -> None:
        """Drop the new state of a client, because its update is not used."""
        if self._new.pop(client, None) is None and self.store is not None and not self.is_shared:
            self.store.forget(client)

    def change(self, change: Callable[[ClientState], ClientState]) -> None:
        """Change what every client keeps, between rounds."""
        self.memory = {client: change(state) for client, state in self.memory.items()}
        self.sample = change(ClientState(optimizers=self.sample)).optimizers
        if self.store is not None and self.store.rounds:
            for client in self.store.clients() if self.store.writes else ():
                self.store.put(client, vars(change(self.of(client))))
            self.store.finish(success=True)

    def trained(self) -> Trained:
        """Return the new states of this process's clients, to be sent to other processes."""
        return {client: apply_to_collection(vars(state), Tensor, Tensor.cpu) for client, state in self._new.items()}

    def take(self, everyone: Sequence[Trained]) -> None:
        """Take the new states of the clients of all processes in place of this one's."""
        self._new = {client: self._here(state) for states in everyone for client, state in states.items()}

    def begin_round(self) -> None:
        """Drop what an interrupted round has left."""
        self._new = {}

    def end_round(self, *, success: bool) -> None:
        """End the round. Clients keep their new states if it was fused."""
        if self.store is None:
            self.memory.update(self._new if success else {})
        else:
            if success and self.store.writes:
                for client, state in self._new.items():
                    self.store.put(client, vars(state))
            self.store.finish(success=success)
        if success:
            found = (state.optimizers for state in self._new.values())
            self.sample = next(filter(any, found), self._last or self.sample)
        self._new, self._last = {}, []

    def begin(self) -> None:
        """Begin with empty states. Raise FederationError if the folder holds the clients of another run."""
        if self.store is not None:
            self.store.begin()

    def mark(self) -> None:
        """Keep the present states for the checkpoint that is being written."""
        if self.store is not None:
            self.store.mark()

    def close(self) -> None:
        """Release the folder. A second call does nothing."""
        if self.store is not None:
            self.store.close()

    def state_dict(self) -> dict[Any, Any]:
        """Return the state of every client, or a reference to their folder."""
        if self.store is not None:
            return self.store.reference
        return {client: dict(vars(state)) for client, state in self.memory.items()}

    def load_state_dict(self, states: Mapping[Any, Any]) -> None:
        """Restore what :meth:`state_dict` gave. States from memory are written to the folder, if there is one."""
        if "folder" not in states:
            self.memory = {client: self._here(state) for client, state in states.items()}
            if self.store is not None:
                self.begin()
                self._new, self.memory = self.memory, {}
                self.end_round(success=True)
        elif self.store is None:
            why = f"resume with keep=fb.Kept(folder={states['folder']!r})"
            raise FederationError(f"the clients' states lie in {states['folder']}: {why}")
        else:
            self.store.resume(states["run"], states["rounds"])
        known = self.memory if self.store is None else self.store.clients()
        self.sample = next(filter(any, (self.of(client).optimizers for client in sorted(known))), [])

    def _here(self, state: Mapping[str, Any]) -> ClientState:
        """Return a state with its tensors on the device, except numbers that optimizers keep on the CPU."""
        here = ClientState(**state)
        if self.device.type == "cpu":
            return here

        def on(place: torch.device | str, value: Any) -> Any:
            return apply_to_collection(value, Tensor, lambda tensor: tensor.to(place))

        def entries(own: Mapping[str, Any]) -> dict[str, Any]:
            return {name: on("cpu" if name in ON_THE_CPU else self.device, value) for name, value in own.items()}

        optimizers = [{i: entries(own) for i, own in each.items()} for each in here.optimizers]
        rest = {name: on(self.device, value) for name, value in vars(here).items() if name != "optimizers"}
        return ClientState(**rest, optimizers=optimizers)


class Sent(NamedTuple):
    """Message under way: what it is, the round in which its client began, and the client's new state."""

    message: ClientUpdate | ClientFailure
    started: int
    state: ClientState | None


class InFlight:
    """Messages under way, ``sent``, by their clients, in the order in which they were sent."""

    def __init__(self) -> None:
        self.sent: dict[int, Sent] = {}

    def send(self, message: ClientUpdate | ClientFailure, started: int, state: ClientState | None) -> None:
        """Put a message on its way."""
        self.sent[message.client] = Sent(message, started, state)

    def change(self, change: Callable[[ClientState], ClientState]) -> None:
        """Change the new states of their clients."""
        for client, each in self.sent.items():
            self.sent[client] = each if each.state is None else each._replace(state=change(each.state))

    def state_dict(self) -> list[dict[str, Any]]:
        """Return all messages, as tensors, numbers and text."""
        found = []
        for message, started, state in self.sent.values():
            content = dict(vars(message))
            if isinstance(message, ClientUpdate):
                content["posterior"] = message.posterior.state_dict()
            else:
                content["error"] = [type(message.error).__name__, str(message.error)]
            found.append({"message": content, "started": started, "state": None if state is None else vars(state)})
        return found

    def load_state_dict(self, state: list[dict[str, Any]], device: torch.device) -> None:
        """Restore what :meth:`state_dict` gave. A failure has the name and text of its error."""
        self.sent = {}
        for stored in apply_to_collection(state, Tensor, lambda value: value.to(device)):
            message, kept = stored["message"], stored["state"]
            if "posterior" in message:
                own = GaussianPosterior.from_state_dict(message["posterior"])
                found: ClientUpdate | ClientFailure = ClientUpdate(**{**message, "posterior": own})
            else:
                name, text = message["error"]
                found = ClientFailure(**{**message, "error": type(name, (FusionError,), {})(text)})
            self.send(found, stored["started"], None if kept is None else ClientState(**kept))


OptimizerState = dict[int, dict[str, Any]]
"""State of an optimizer: number of the parameter → name → value."""
Changes = dict[str, tuple[Any, Any]]
"""Name of an option → its value before a client's training and after it."""
MOMENTA = frozenset({"exp_avg", "momentum_buffer"})
"""Entries of torch's optimizers that are running means of gradients. Steps of IVON, whose widths are the federation's,
are short enough not to run away, and few steps without momentum would be shorter."""

PLAIN = (int, float, complex, str, bool, type(None))


class ClientOptimizer:
    """The Trainer's optimizer, set to a client's start and read at its end. It stays the same object.

    At the start there is no state per parameter, and options are those of the round's start: schedules and hooks
    between rounds change them for all clients, and a client's training only for itself. If the optimizer holds more
    from its construction, such as another optimizer or a copy of the weights, ``remake`` gives a new one. With ``keep``
    clients keep what :meth:`read` returns, but for the options ``moving``. Raises FederationError if they cannot.
    """

    def __init__(
        self, optimizer: Optimizer, remake: Callable[[], Optimizer], keep: bool, moving: Collection[str] = ()
    ) -> None:
        self.optimizer, self._remake, self._moving = optimizer, remake, moving
        self._is_plain = not has_own_state(optimizer)
        if keep and not self._is_plain:
            raise FederationError(
                f"keep='optimizer': {type(optimizer).__name__} holds more than a state per parameter, which "
                "cannot be kept for each client; leave it out"
            )
        self.begin_round()

    def begin_round(self) -> None:
        """Take the present options for all clients' start."""
        self._options = [_copy_of(options) for options in options_of(self.optimizer)]
        self._attributes = _plain_attributes(self.optimizer)

    def reset(self, state: OptimizerState | None = None, changes: Sequence[Changes] = ()) -> None:
        """Start as new, or from what :meth:`read` has returned for the client."""
        optimizer = self.optimizer
        drop_gradients(optimizer)
        if self._is_plain:
            optimizer.state.clear()
        else:  # a new optimizer's attributes; hooks and the scheduler's mark stay
            own = vars(optimizer)
            with torch.random.fork_rng():
                new = self._remake()
            stay = {name: own[name] for name in own if name == "step" or name.startswith("_optimizer_")}
            own.clear()
            own.update({**vars(new), **stay})
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            for name in group.keys() - options.keys() - {"params"}:
                del group[name]
            group.update(_copy_of(options))
        for name in _plain_attributes(optimizer).keys() - self._attributes.keys():
            delattr(optimizer, name)
        vars(optimizer).update(self._attributes)
        if state:
            parameters = parameters_of(optimizer)
            there = with_counts(optimizer, state).items()
            optimizer.state.update({parameters[i]: {k: copied(v) for k, v in entries.items()} for i, entries in there})
        for values, changed in zip([*optimizer.param_groups, vars(optimizer)], changes):
            for name, (before, after) in changed.items():
                if is_equal(values.get(name), before):  # else a schedule has changed it since, for all clients
                    values[name] = after

    def read(self) -> tuple[OptimizerState, list[Changes]]:
        """Return what the client keeps: state per parameter, and changes of each group's options and of attributes."""
        optimizer = self.optimizer
        own = {i: optimizer.state[p] for i, p in enumerate(parameters_of(optimizer)) if p in optimizer.state}
        # copies: a state that a hook has loaded may have the tensors of another client's
        state = {i: {name: copied(value) for name, value in entries.items()} for i, entries in own.items()}
        pairs = zip([*self._options, self._attributes], [*options_of(optimizer), _plain_attributes(optimizer)])
        return state, [
            {
                name: (before.get(name), value)
                for name, value in now.items()
                if name not in self._moving and not is_equal(before.get(name), value)
            }
            for before, now in pairs
        ]


def with_counts(optimizer: Optimizer, state: OptimizerState) -> OptimizerState:
    """Return a state with counts of steps on the parameters' device if the optimizer is fused or capturable."""
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    if not any(group.get("fused") or group.get("capturable") for group in groups):
        return state
    devices = [parameter.device for parameter in parameters_of(optimizer)]
    return _with_entries(state, ("step",), lambda i, value: value.to(devices[i]))


def _with_entries(
    state: OptimizerState, names: Collection[str], change: Callable[[int, Tensor], Tensor]
) -> OptimizerState:
    """Return a state with ``change(number of the parameter, tensor)`` in place of the tensors with these names."""
    return {
        i: {n: change(i, v) if n in names and isinstance(v, Tensor) else v for n, v in entries.items()}
        for i, entries in state.items()
    }


def after_absence(optimizer: Optimizer, state: OptimizerState, steps: int) -> OptimizerState:
    """Return a client's state with momentum faded by the ``steps`` missed: others have moved the model since."""
    if steps <= 0 or not state:
        return state
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    decays = [group["betas"][0] if "betas" in group else group.get("momentum", 0.0) for group in groups]
    return _with_entries(state, MOMENTA, lambda i, value: value * decays[i] ** steps)


def drop_gradients(optimizer: Optimizer) -> None:
    """Do ``optimizer.zero_grad()`` without opening a profiler's record, which takes 70 µs between large steps."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def has_own_state(optimizer: Optimizer) -> bool:
    """Return True if a new ``optimizer`` holds more than its groups and plain values."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return False  # Adagrad, which makes its state at once, makes it again where it is missing
    extra = [value for name, value in vars(optimizer).items() if name not in _own_attributes()]
    return bool(optimizer.state) or not all(isinstance(value, PLAIN) for value in extra)


@functools.cache
def _own_attributes() -> frozenset[str]:
    """Names of the attributes that torch keeps on every optimizer."""
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))) | {"step", "_opt_called"}


def _plain_attributes(optimizer: Optimizer) -> dict[str, Any]:
    own = _own_attributes()
    return {name: value for name, value in vars(optimizer).items() if name not in own and isinstance(value, PLAIN)}


def _copy_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``options`` that shares no mutable value."""
    return {name: value if isinstance(value, PLAIN) else copy.deepcopy(value) for name, value in options.items()}


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two options or entries of a state have the same values."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other.to(one))
    return one is other or bool(one == other)


def copied(value: Any) -> Any:
    """Return a copy of an optimizer's entry for a parameter, which the optimizer may write into."""
    return value.clone() if isinstance(value, Tensor) else value


def remade(configure: Callable[[], Sequence[Optimizer]], place: int, like: Optimizer) -> Optimizer:
    """Return the optimizer that ``configure`` makes in this ``place``. Raise FederationError if it is not ``like``."""
    made = configure()
    if len(made) <= place or type(made[place]) is not type(like):
        why = f"{type(like).__name__} holds state from its construction, so every client needs a new one"
        raise FederationError(f"configure_optimizers makes another optimizer than at the start of the fit: {why}")
    return made[place]
