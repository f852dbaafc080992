"""Messages under way in a federation without rounds, and what their clients will keep when they have arrived."""

from __future__ import annotations

from collections.abc import Mapping
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
        return [_stored(each) for each in self.sent.values()]

    def load_state_dict(self, state: list[dict[str, Any]], device: torch.device) -> None:
        """Restore what :meth:`state_dict` gave."""
        there = (_restored(apply_to_collection(each, Tensor, lambda value: value.to(device))) for each in state)
        self.sent = {each.message.client: each for each in there}


def _stored(sent: Sent) -> dict[str, Any]:
    """Return a message as a checkpoint holds it."""
    message = dict(vars(sent.message))
    if isinstance(sent.message, ClientUpdate):
        message["posterior"] = sent.message.posterior.state_dict()
    else:
        message["error"] = [type(sent.message.error).__name__, str(sent.message.error)]
    return {"message": message, "started": sent.started, "state": None if sent.state is None else vars(sent.state)}


def _restored(stored: Mapping[str, Any]) -> Sent:
    """Return the message that :func:`_stored` has stored; a failure is told by the name and text of its error."""
    message, state = dict(stored["message"]), stored["state"]
    if "posterior" in message:
        message["posterior"] = GaussianPosterior.from_state_dict(message["posterior"])
        found: ClientUpdate | ClientFailure = ClientUpdate(**message)
    else:
        name, text = message["error"]
        found = ClientFailure(**{**message, "error": type(name, (FusionError,), {})(text)})
    return Sent(found, stored["started"], None if state is None else ClientState(**state))
