"""Records of the clients of a federation, a column for each figure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from lightning_fedbayes.core.errors import listed
from lightning_fedbayes.core.messages import ClientOutcome

DTYPES = {"l": torch.int64, "b": torch.int8, "d": torch.float64}


class ClientRecords:
    """Records of all clients over the federation, a column for each figure: a million take 56 MB.

    Args:
        clients: their number.

    Attributes:
        rounds, failures: rounds that each took part in, and was left out of.
        train_loss, first_loss: mean training loss in its last and first round.
        diverged: 1 if its training loss has exceeded :func:`worst_loss` in some round.
        weight: its normalised weight ω in its last round.
        seconds: training time in its last round.
        megabytes_up: size of its last update.
        last_failure: client → the reason why it was left out last.
    """

    COLUMNS: ClassVar[dict[str, tuple[str, float]]] = {
        "rounds": ("l", 0),
        "failures": ("l", 0),
        "train_loss": ("d", math.nan),
        "first_loss": ("d", math.nan),
        "diverged": ("b", 0),
        "weight": ("d", math.nan),
        "seconds": ("d", 0.0),
        "megabytes_up": ("d", 0.0),
    }

    def __init__(self, clients: int) -> None:
        self.rounds: array[int]
        self.failures: array[int]
        self.diverged: array[int]
        self.train_loss: array[float]
        self.first_loss: array[float]
        self.weight: array[float]
        self.seconds: array[float]
        self.megabytes_up: array[float]
        for name, (kind, start) in self.COLUMNS.items():
            setattr(self, name, array(kind, [int(start) if kind in "lb" else start]) * clients)
        self.last_failure: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.rounds)

    def note(self, outcome: ClientOutcome) -> bool:
        """Note the outcome of a client; return whether its training diverges in this round for the first time."""
        client = outcome.client
        self.rounds[client] += 1
        self.seconds[client] = outcome.seconds
        if outcome.error is not None:
            self.fail(client, outcome.error)
            return False
        loss = outcome.metrics.get("train_loss", math.nan)
        self.megabytes_up[client], self.train_loss[client] = outcome.num_bytes / 1e6, loss
        if math.isnan(self.first_loss[client]):
            self.first_loss[client] = loss
        diverges = not self.diverged[client] and loss > worst_loss(self.first_loss[client])
        self.diverged[client] |= diverges
        return diverges

    def fail(self, client: int, error: Exception) -> None:
        """Note why a client is left out of a round."""
        self.failures[client] += 1
        self.last_failure[client] = f"{type(error).__name__}: {error}"

    def state_dict(self) -> dict[str, Any]:
        """Return the columns, as tensors, and the failures."""
        columns = {
            name: torch.tensor(getattr(self, name), dtype=DTYPES[kind]) for name, (kind, _) in self.COLUMNS.items()
        }
        return {**columns, "last_failure": dict(self.last_failure)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        for name, (kind, _) in self.COLUMNS.items():
            setattr(self, name, array(kind, state[name].tolist()))
        self.last_failure = dict(state["last_failure"])


def worst_loss(first: float) -> float:
    r"""Return the loss beyond which training has diverged, :math:`\ell_1 + \max(|\ell_1|, 1)`.

    :math:`\ell_1` is the mean training loss of the client's first round, which began without knowledge.
    """
    return first + max(abs(first), 1.0)


def divergence_of(names: Sequence[str]) -> str:
    """Return the message that the training of clients has diverged.

    >>> divergence_of(["a", "b"])[:45]
    'the training of clients a, b has diverged: th'
    """
    return (
        f"the training of client{'s' if len(names) > 1 else ''} {listed(names)} has diverged: the loss is far above "
        "that of the first round, which began without knowledge. Take a smaller learning rate or fewer local epochs"
    )
