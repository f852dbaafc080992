"""``on_client_start`` for several clients at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from lightning_fedbayes.engines.client import Client
from lightning_fedbayes.engines.state import Tensors
from lightning_fedbayes.engines.vectorized.attributes import Snapshot
from lightning_fedbayes.engines.vectorized.places import Places
from lightning_fedbayes.engines.vectorized.reasons import CannotVectorize
from lightning_fedbayes.engines.vectorized.step import Attributes

PLAIN = (int, float, str, type(None))


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


register_pytree_node(
    StackedClient,
    lambda client: ([client.number, client.num_examples, client.position], client),
    lambda tensors, like: StackedClient(tensors[0], tensors[1], tensors[2], like),  # pyright: ignore
)


def start_clients(
    module: L.LightningModule, clients: Sequence[Client], places: Places, tensors: Tensors
) -> Attributes:
    """Call the module's ``on_client_start``, if it has one, for several clients at once.

    Args:
        module: the user's module; its attributes stay as they are.
        clients: who starts.
        places: where the module's parameters and buffers live.
        tensors: what the hook finds there: name → tensor of shape (clients, *).

    Returns: the attributes that it set.

    Raises:
        CannotVectorize: it did something else than to set the module's attributes to tensors or plain values.
    """
    hook = getattr(module, "on_client_start", None)
    if hook is None:
        return Attributes()
    shared: dict[str, Any] = {}
    given: list[weakref.ref[Any]] = []

    def start(number: Tensor, num_examples: Tensor, position: Tensor, tensors: Tensors) -> dict[str, Any]:
        client = StackedClient(number, num_examples, position, clients[0])
        given.extend(weakref.ref(each) for each in (client, number, num_examples, position))
        before = Snapshot(module)
        try:
            with places.holding(tensors):
                hook(client)
            changed = before.changes()
        finally:
            before.restore()
        if not changed:
            raise CannotVectorize("on_client_start does something else than to set attributes of the module")
        stacked = {}
        for name, value in changed.items():
            if isinstance(value, PLAIN):
                shared[name] = value
            elif (leaves := tree_leaves(value)) and all(isinstance(leaf, Tensor) for leaf in leaves):
                stacked[name] = value
            else:
                raise CannotVectorize(f"on_client_start sets self.{name} to a {type(value).__name__}")
        return stacked

    numbers = [torch.tensor([getattr(c, name) for c in clients]) for name in ("number", "num_examples", "position")]
    numbers = [each.to(module.device) for each in numbers]
    stacked = torch.func.vmap(start, randomness="different")(numbers[0], numbers[1], numbers[2], tensors)
    if any(each() is not None for each in given):
        gc.collect()
        if any(each() is not None for each in given):
            raise CannotVectorize("on_client_start keeps what it is told outside of the module's attributes")
    return Attributes(stacked, shared)


def attributes_of(attributes: Attributes, client: Client) -> dict[str, Any]:
    """What :func:`start_clients` gave, for the last client in the stack alone: what the module has after a round."""
    stacked = {
        name: client if isinstance(value, StackedClient) else tree_map(lambda stack: stack[-1], value)
        for name, value in attributes.stacked.items()
    }
    return {**attributes.shared, **stacked}
