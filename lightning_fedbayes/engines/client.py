"""What an engine says of a client: who it is, what it keeps, and why it failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_fedbayes.engines.state import Tensors


@dataclass(frozen=True)
class Client:
    """A client that begins to train.

    Args:
        number: the client's number, from 0.
        name: its name.
        num_examples: its number of training examples n_k.
        round: the round, from 0.
        position: its place among the clients of the round that this process trains, from 0.
        cohort: number of those.
    """

    number: int
    name: str
    num_examples: int
    round: int
    position: int
    cohort: int


@dataclass(frozen=True)
class ClientFailure:
    """A client that is left out of the round.

    Args:
        client: the client's number.
        error: why.
    """

    client: int
    error: Exception


@dataclass
class ClientState:
    """What a client keeps from round to round.

    Args:
        local: parameters and buffers that never leave it, name → tensor.
        optimizers: state of each optimizer, number of the parameter in it → what the optimizer keeps of it.
    """

    local: Tensors = field(default_factory=dict)
    optimizers: list[dict[int, dict[str, Any]]] = field(default_factory=list)


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """The options of an optimizer's groups."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def parameters_of(optimizer: Any) -> list[Tensor]:
    """The parameters of an optimizer, numbered as in its ``state_dict``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
