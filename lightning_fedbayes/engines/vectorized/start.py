"""``on_client_start`` for several clients at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fedbayes.engines.client import Client
from lightning_fedbayes.engines.vectorized.step import ABSENT, Attributes, restore_attributes


class StackedClient(Client):
    """Several clients in one: what differs between them is a tensor inside :func:`torch.func.vmap`.

    Args:
        number, num_examples, position: as in :class:`~lightning_fedbayes.engines.Client`.
        like: any of the clients, for what they share.
    """

    def __init__(self, number: Tensor, num_examples: Tensor, position: Tensor, like: Client) -> None:
        self.__dict__.update(
            number=number, num_examples=num_examples, position=position, round=like.round, cohort=like.cohort
        )

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Refused: several clients have no one name."""
        raise RuntimeError("on_client_start reads the client's name, and clients that train at once have several")


def start_clients(module: L.LightningModule, clients: Sequence[Client]) -> Attributes:
    """Call the module's ``on_client_start``, if it has one, for several clients at once.

    Returns: the attributes that it set; the module itself stays as it was.
    """
    hook = getattr(module, "on_client_start", None)
    if hook is None:
        return Attributes()
    shared: dict[str, Any] = {}

    def start(number: Tensor, num_examples: Tensor, position: Tensor) -> dict[str, Tensor]:
        before = dict(module.__dict__)
        try:
            hook(StackedClient(number, num_examples, position, clients[0]))
        finally:
            after = dict(module.__dict__)
            changed = {name: value for name, value in after.items() if before.get(name, ABSENT) is not value}
            restore_attributes(module, {name: before.get(name, ABSENT) for name in changed})
        shared.update({name: value for name, value in changed.items() if not isinstance(value, Tensor)})
        return {name: value for name, value in changed.items() if isinstance(value, Tensor)}

    numbers = [torch.tensor([getattr(c, name) for c in clients]) for name in ("number", "num_examples", "position")]
    stacked = torch.func.vmap(start, randomness="different")(*(each.to(module.device) for each in numbers))
    return Attributes(stacked, shared)
