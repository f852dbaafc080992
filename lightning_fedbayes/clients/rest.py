"""The optimizers between two rounds, when their states are with the clients."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_fedbayes.clients.snapshot import fingerprint
from lightning_fedbayes.clients.states import has_own_state
from lightning_fedbayes.core.errors import FederationError


class Resting(defaultdict[Any, Any]):
    """The empty state of an optimizer between rounds. It notes that a hook has cleared it, or looked through it."""

    is_used = False

    def clear(self) -> None:
        """See ``dict.clear``."""
        self.is_used = True
        super().clear()

    def values(self) -> Any:
        """See ``dict.values``. Torch and Lightning call ``items``."""
        self.is_used = True
        return super().values()

    def __iter__(self) -> Iterator[Any]:
        self.is_used = True
        return super().__iter__()


class Rest:
    """The time between two rounds, in which a hook that changes the state of an optimizer changes no client's.

    With ``keep`` clients keep the states from round to round, so that clearing one is a change, too.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, keep: bool) -> None:
        self._optimizers, self._keep = optimizers, keep
        self.begin()

    def begin(self) -> None:
        """Begin the time between rounds. What optimizers hold from their construction stays."""
        for each in self._optimizers:
            if "state" in vars(each) and not has_own_state(each):
                each.state = Resting(dict)
        self._held = [(each, each.state, _entries(each)) for each in self._optimizers]

    def end(self) -> None:
        """Begin a round. Raise FederationError if a hook has changed a state."""
        for optimizer, state, entries in self._held:
            if _entries(optimizer) != entries:
                raise changed_state(optimizer, "was loaded or written into by a hook")
            if self._keep and (optimizer.state is not state or getattr(state, "is_used", False)):
                raise changed_state(optimizer, "was cleared, or changed one by one, by a hook")
            if isinstance(optimizer.state, Resting):
                optimizer.state = defaultdict(dict)


def check_new(optimizers: Sequence[Optimizer]) -> None:
    """Raise FederationError if one of torch's optimizers has taken steps or loaded a state before the federation."""
    for each in optimizers:
        is_torch = type(each).__module__.startswith("torch.optim.")
        if is_torch and any(float(own.get("step", 1)) for own in each.state.values()):  # Adagrad begins with one
            raise changed_state(each, "was loaded or written into before training")


def changed_state(optimizer: Optimizer, why: str) -> FederationError:
    """Return the error that no client would have a changed state."""
    return FederationError(
        f"the state of {type(optimizer).__name__} {why}, when no client trains, and each client has a state of its "
        "own: change it in the module's hook on_client_start(client), with engine='sequential'. Without "
        "keep=['optimizer'] clients of an averaging method begin every round with a new state"
    )


def _entries(optimizer: Optimizer) -> list[Any]:
    """Return a fingerprint of the states of parameters that have one."""
    return [(id(parameter), fingerprint(own)) for parameter, own in optimizer.state.items() if own]
