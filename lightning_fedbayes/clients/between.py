"""States of optimizers between two rounds: what hooks find there, and what their changes mean for the clients."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from lightning_fedbayes.clients.snapshot import fingerprint
from lightning_fedbayes.clients.states import ClientState, OptimizerState, copied, is_equal, parameters_of
from lightning_fedbayes.core.errors import FederationError

Change = Callable[[ClientState], ClientState]
"""Returns the state of a client as hooks have changed it."""


class Between:
    """The optimizers between two rounds, with copies of the ``states`` that one of the clients has kept.

    A hook that drops the state of parameters does so for every client. Any other change begins at the state of one
    client, so it holds for the ``only`` one, and is refused if there are several. Of ``fixed`` ones, which the global
    posterior determines, all changes are refused.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], states: Sequence[OptimizerState], *, only: bool, fixed: bool
    ) -> None:
        self._optimizers, self._only, self._fixed = optimizers, only, fixed
        self._kept = [{i: own for i, own in state.items() if own} for state in states]
        self._prints: list[dict[tuple[int, str], Any]] = []
        for optimizer, kept in zip(optimizers, self._kept):
            parameters = parameters_of(optimizer)
            for i, own in kept.items():
                optimizer.state[parameters[i]] = {name: copied(value) for name, value in own.items()}
            self._prints.append({key: fingerprint(value) for key, value in _entries(_state_of(optimizer))})

    def change(self) -> Change | None:
        """Return what hooks have changed since. None for nothing. Raise FederationError if it cannot be followed."""
        now = [_state_of(optimizer) for optimizer in self._optimizers]
        gone = [kept.keys() - state.keys() for kept, state in zip(self._kept, now)]
        for n, optimizer in enumerate(self._optimizers):
            if self._fixed and gone[n]:
                raise changed_state(optimizer, "was cleared")
            left = {i: own for i, own in self._kept[n].items() if i not in gone[n]}
            if not self._is_same(n, now[n], left):
                if self._only and not self._fixed:
                    own = [{i: entries for i, entries in state.items() if i >= 0} for state in now]
                    return lambda client: replace(client, optimizers=own)
                raise changed_state(optimizer, "was written into or loaded")
        if not any(gone):
            return None

        def follow(client: ClientState) -> ClientState:
            pairs = zip(client.optimizers, gone)
            kept = [{i: own for i, own in state.items() if i not in lost} for state, lost in pairs]
            return replace(client, optimizers=kept)

        return follow

    def _is_same(self, n: int, now: OptimizerState, left: OptimizerState) -> bool:
        """Return whether an optimizer has what is ``left``: by identity and version, which reading leaves, or value."""
        found, kept = dict(_entries(now)), dict(_entries(left))
        return found.keys() == kept.keys() and all(
            fingerprint(value) == self._prints[n][key] or is_equal(value, kept[key]) for key, value in found.items()
        )


def check_new(optimizers: Sequence[Optimizer]) -> None:
    """Raise FederationError if one of torch's optimizers has taken steps or loaded a state before the federation."""
    for each in optimizers:
        # Adagrad begins with a state of no steps
        if any(float(own.get("step", 1)) for own in each.state.values() if own):
            raise changed_state(each, "was loaded or written into before training")
        each.state.clear()


def changed_state(optimizer: Optimizer, what: str) -> FederationError:
    """Return the error that no client would have a changed state."""
    return FederationError(
        f"the state of {type(optimizer).__name__} {what} by a hook while no client trains, and each client has a state "
        "of its own: change it in the module's hook on_client_start(client), with engine='sequential'. Between rounds "
        "a hook may clear the state of all clients, unless it is IVON's. Without keep=['optimizer'] clients of an "
        "averaging method begin every round with a new one"
    )


def _state_of(optimizer: Optimizer) -> OptimizerState:
    """Return the states of parameters by number, and others under negative numbers. Reading may add empty ones."""
    numbers = {parameter: i for i, parameter in enumerate(parameters_of(optimizer))}
    held = [(numbers.get(key, -1 - n), own) for n, (key, own) in enumerate(optimizer.state.items())]
    return {i: own for i, own in held if own}


def _entries(state: OptimizerState) -> Iterator[tuple[tuple[int, str], Any]]:
    for i, own in state.items():
        yield from (((i, name), value) for name, value in own.items())
