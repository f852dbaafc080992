"""Messages: the one form of what leaves a client, the update of a round, and its outcome at the server."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

from torch import Tensor

from lightning_fedbayes.core.errors import FederationError, FusionError, check_at_least, check_kind, check_number, shown
from lightning_fedbayes.core.posterior import GaussianPosterior

T = TypeVar("T")

Kind = Literal[
    "introduction", "update", "scores", "temperature", "counts", "statistics", "curvature", "scale", "failure"
]

EPSILONS = (
    *("privacy/epsilon", "privacy/simulated_epsilon"),
    *("privacy/example_epsilon", "privacy/simulated_example_epsilon"),
)
"""Names of ε in figures: of clients and of examples, with noise from a secret and from a seed."""
SCALE = "scale/"
"""Prefix of a scale among the buffers that the server sends. Clients answer with none."""


@dataclass(frozen=True)
class Message:
    """Message of a client on any subject: named tensors and figures, and the number of examples behind them.

    Args:
        kind: "introduction": which client it is. "update": of a round. "scores": what it logs of a validation.
            "temperature" and "counts": sums and histograms for a calibration. "statistics" and "curvature": what it
            sends once, in place of rounds. "scale": sums over its examples, for a FederatedScaler. "failure": it could
            not do what it was asked for.
        client, num_examples: its number, and the number of its examples behind the message.
        round: the round that it is based on, from 1. 0 before the first.
        tensors, figures: by name.
        texts: name → text, for a failure only: "error", the class of the exception, "stage", and, where clients share
            it, "text", the message of the exception.
    """

    kind: Kind
    client: int
    round: int = 0
    num_examples: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, kind: Kind, client: int, round: int, value: Any, figures: Mapping[str, float] | None = None
    ) -> "Message":
        """Return the message of a dataclass: its tensors and numbers by the names of their fields.

        Fields are tensors, numbers, dicts name → tensor (sent as "field/name"), or text that the server knows. A field
        "num_examples" becomes the message's. ``figures`` are further ones.
        """
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, float] = dict(figures or {})
        for each in fields(value):
            part = getattr(value, each.name)
            if isinstance(part, Tensor):
                tensors[each.name] = part
            elif isinstance(part, Mapping):
                tensors |= {f"{each.name}/{name}": tensor for name, tensor in part.items()}
            elif isinstance(part, Real) and each.name != "num_examples":
                numbers[each.name] = float(part)
        return cls(kind, client, round, int(value.num_examples), tensors, numbers)

    def read(self, kind: type[T], **known: Any) -> T:
        """Return the dataclass that :meth:`of` has sent. The message is not trusted. ``known`` fields are not sent.

        Raise FusionError if a tensor or number is missing, or does not belong to it. The dataclass checks its values.
        """
        values, left, types = dict(known), set(self.tensors), get_type_hints(kind)
        for name in types:
            if name in values:
                continue
            if name == "num_examples":
                values[name] = self.num_examples
            elif get_origin(types[name]) is Mapping:
                found = [key for key in self.tensors if key.startswith(f"{name}/")]
                values[name] = {key.removeprefix(f"{name}/"): self.tensors[key] for key in found}
                left -= {*found}
            elif name in (known_part := self.figures if types[name] is float else self.tensors):
                values[name] = known_part[name]
                left.discard(name)
            else:
                raise FusionError(f"client {self.client}: its message has no '{name}'")
        if left:
            raise FusionError(f"client {self.client}: '{min(left)}' is no part of a {kind.__name__}")
        return kind(**values)


@dataclass(frozen=True)
class ClientUpdate:
    """Update that a client sends after its local epochs.

    Raises FederationError if an argument has the wrong type. The server checks what the tensors hold.

    Args:
        client, num_examples, posterior: the client's number, its number of training examples and its posterior.
        buffers: its buffers, name → tensor, which the server averages. What a method sends besides the posterior is
            among them, under names that begin with "method/".
        metrics: figures of its training, name → value. "train_loss" and "added_loss" are averaged over the round.
        seconds: time that it took.
        kept: what the client keeps of it, in the process of the server. It never travels. None: the server works out
            what such a client keeps, where it has to know.
    """

    client: int
    num_examples: int
    posterior: GaussianPosterior
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    kept: Mapping[str, Tensor] | None = field(default=None, compare=False)

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

    def clone(self) -> "ClientUpdate":
        """Return a copy that shares no memory, so that later batches do not overwrite it."""
        buffers = {name: value.clone() for name, value in self.buffers.items()}
        return replace(self, posterior=self.posterior.clone(), buffers=buffers)


@dataclass(frozen=True)
class ClientFailure:
    """Notice that a client has no update, and why. Raises FederationError if an argument has the wrong type."""

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
        client, num_examples: its number, and its number of training examples.
        error: the reason why it is left out, or None if its update counts.
        seconds: time that it took. An equal share where several clients train at once.
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
    """Raise FederationError unless a client's number, its number of examples and its time are possible."""
    check_at_least("client", client, 0)
    check_at_least("num_examples", num_examples, 0)
    check_number("seconds", seconds)


def check_mapping(name: str, values: Any, kind: type) -> None:
    """Raise FederationError unless ``values`` maps strings to values of a type."""
    check_kind(name, values, dict | Mapping, f"give a dict, name → {kind.__name__}")  # most are dicts, a quick look
    for key, value in values.items():
        if not isinstance(key, str) or not isinstance(value, kind):
            raise FederationError(f"{name}[{shown(key)}]={shown(value)}: give a dict, name → {kind.__name__}")
