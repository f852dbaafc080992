"""Optimizers of clients: each client starts a round with one as a new fit would make it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedbayes.clients.states import options_of, parameters_of
from lightning_fedbayes.core.errors import FederationError

OptimizerState = dict[int, dict[str, Any]]
"""State of an optimizer: number of the parameter → name → value."""

Changes = dict[str, tuple[Any, Any]]
"""Name of an option → its value before a client's training and after it."""

MOMENTA = frozenset({"exp_avg", "momentum", "momentum_buffer"})
"""Entries of torch's optimizers and of IVON that are running means of gradients."""

PLAIN = (int, float, complex, str, bool, type(None))


class ClientOptimizer:
    """The Trainer's optimizer, set to a client's start and read at its end; it stays the same object.

    The start has no state per parameter, and the options of the round's start: schedules and hooks between rounds
    change them for all clients, and what a client's training does to them ends with the client. The module makes a new
    optimizer if this one holds more from its construction, such as another optimizer or a copy of the weights.

    Args:
        optimizer: of the Trainer.
        remake: calls the module's ``configure_optimizers`` and returns the one in the place of ``optimizer``.
        keep: clients keep what :meth:`read` returns from round to round.

    Raises:
        FederationError: the state cannot be kept.
    """

    def __init__(self, optimizer: Optimizer, remake: Callable[[], Optimizer], *, keep: bool) -> None:
        self.optimizer = optimizer
        self._remake = remake
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
                if not _differs(values.get(name), before):  # else a schedule has changed it since, for all clients
                    values[name] = after

    def read(self) -> tuple[OptimizerState, list[Changes]]:
        """Return what the client keeps: state per parameter, and changes of each group's options and of attributes."""
        optimizer = self.optimizer
        state = {i: optimizer.state[p] for i, p in enumerate(parameters_of(optimizer)) if p in optimizer.state}
        pairs = zip([*self._options, self._attributes], [*options_of(optimizer), _plain_attributes(optimizer)])
        return state, [
            {name: (before.get(name), value) for name, value in now.items() if _differs(before.get(name), value)}
            for before, now in pairs
        ]


def with_counts(optimizer: Optimizer, state: OptimizerState) -> OptimizerState:
    """Return a state with counts of steps on the parameters' device if the optimizer is fused or capturable."""
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    if not any(group.get("fused") or group.get("capturable") for group in groups):
        return state
    devices = [parameter.device for parameter in parameters_of(optimizer)]
    return {
        i: {
            name: value.to(devices[i]) if name == "step" and isinstance(value, Tensor) else value
            for name, value in entries.items()
        }
        for i, entries in state.items()
    }


def after_absence(optimizer: Optimizer, state: OptimizerState, steps: int) -> OptimizerState:
    """Return a client's state of ``optimizer`` with its momentum faded by the ``steps`` that the client has missed.

    Its momentum is of the model that it trained last, and the others have moved the model since.
    """
    if steps <= 0 or not state:
        return state
    decays = [
        group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
        for group in optimizer.param_groups
        for _ in group["params"]
    ]
    return {
        i: {
            name: value * decays[i] ** steps if name in MOMENTA and isinstance(value, Tensor) else value
            for name, value in entries.items()
        }
        for i, entries in state.items()
    }


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
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, PLAIN) and name not in _own_attributes()
    }


def _copy_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``options`` that shares nothing that can be written into."""
    return {name: value if isinstance(value, PLAIN) else copy.deepcopy(value) for name, value in options.items()}


def _differs(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return not torch.equal(before, now)
    return bool(before != now)


def copied(value: Any) -> Any:
    """Return a copy of an optimizer's entry for a parameter, which the optimizer may write into."""
    return value.clone() if isinstance(value, Tensor) else value


def remade(configure: Callable[[], Sequence[Optimizer]], place: int, like: Optimizer) -> Optimizer:
    """Return the optimizer that ``configure`` makes in this ``place``; raise FederationError if it is not ``like``."""
    made = configure()
    if len(made) <= place or type(made[place]) is not type(like):
        raise FederationError(
            f"configure_optimizers makes another optimizer than at the start of the fit: {type(like).__name__} holds "
            "state from its construction, so every client needs a new one"
        )
    return made[place]
