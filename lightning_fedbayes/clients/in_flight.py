"""Messages under way in a federation without rounds, and what their clients will keep when they have arrived."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_fedbayes.clients.client import ClientState
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.core.messages import ClientFailure, ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior


class Sent(NamedTuple):
    """Message under way: what it is, the round in which its client began, and the client's new state."""

    message: ClientUpdate | ClientFailure
    started: int
    state: ClientState | None


class InFlight:
    """Messages under way, by their clients, in the order in which they were sent."""

    def __init__(self) -> None:
        self.sent: dict[int, Sent] = {}

    def send(self, message: ClientUpdate | ClientFailure, started: int, state: ClientState | None) -> None:
        """Put a message on its way."""
        self.sent[message.client] = Sent(message, started, state)

    def arrive(self, client: int) -> Sent:
        """Take the message of a client."""
        return self.sent.pop(client)

    def drop(self, round: int) -> None:
        """Forget what was sent in a round that is cut short."""
        self.sent = {client: each for client, each in self.sent.items() if each.started != round}

    @property
    def rounds(self) -> set[int]:
        """The rounds that they are about."""
        return {each.started for each in self.sent.values()}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return all messages, as tensors, numbers and texts."""
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
        """Restore what :meth:`state_dict` gave; a failure is told by the name and text of its error."""
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
