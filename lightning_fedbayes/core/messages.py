"""Messages of a round: what a client sends, and what became of it at the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from torch import Tensor

from lightning_fedbayes.core.errors import FederationError, check_at_least, check_kind, check_number, shown
from lightning_fedbayes.core.posterior import GaussianPosterior


@dataclass(frozen=True)
class ClientUpdate:
    """Update that a client sends after its local epochs.

    Args:
        client: the client's number.
        num_examples: its number of training examples.
        posterior: its posterior.
        buffers: its buffers, name → tensor, which the server averages; what a method sends beside its posterior is
            among them, under names that begin with "method/".
        metrics: figures of its training, name → value; "train_loss" is averaged over the round.
        seconds: time that it took.

    Raises:
        FederationError: a value of another kind. The server checks what the tensors hold.
    """

    client: int
    num_examples: int
    posterior: GaussianPosterior
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        check_client(self.client, self.num_examples, self.seconds)
        why = "give what read_posterior(module) returns, or make one"
        check_kind("posterior", self.posterior, GaussianPosterior, why)
        for name, kind, values in (("buffers", Tensor, self.buffers), ("metrics", Real, self.metrics)):
            check_mapping(name, values, kind)

    @property
    def num_bytes(self) -> int:
        """Bytes of posterior and buffers."""
        return self.posterior.num_bytes + bytes_of(self.buffers)


@dataclass(frozen=True)
class ClientFailure:
    """Notice that a client has no update in this round.

    Args:
        client: the client's number.
        error: the reason.
        num_examples: its number of training examples.
        seconds: time that it took.

    Raises:
        FederationError: a value of another kind.
    """

    client: int
    error: Exception
    num_examples: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        check_client(self.client, self.num_examples, self.seconds)
        check_kind("error", self.error, Exception, "give the exception that says why")


@dataclass(frozen=True)
class ClientOutcome:
    """Outcome of a client in a round, without its tensors.

    Args:
        client: its number.
        error: the reason why it is left out; None if its update counts.
        seconds: time that it took; an equal share where several clients train at once.
        num_examples: its number of training examples.
        num_bytes: size of its update, 0 if it has failed.
        metrics: figures of its training, name → value.
    """

    client: int
    error: Exception | None
    seconds: float
    num_examples: int
    num_bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of the entries of ``tensors``."""
    return sum(each.numel() * each.element_size() for each in tensors.values())


def check_client(client: Any, num_examples: Any, seconds: Any) -> None:
    """Raise FederationError unless a client's number, its number of examples and its time can be such."""
    check_at_least("client", client, 0)
    check_at_least("num_examples", num_examples, 0)
    check_number("seconds", seconds)


def check_mapping(name: str, values: Any, kind: type) -> None:
    """Raise FederationError unless ``values`` maps strings to values of a type."""
    check_kind(name, values, Mapping, f"give a dict, name → {kind.__name__}")
    for key, value in values.items():
        if not isinstance(key, str) or not isinstance(value, kind):
            raise FederationError(f"{name}[{shown(key)}]={shown(value)}: give a dict, name → {kind.__name__}")
