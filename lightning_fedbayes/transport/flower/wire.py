"""Flower's messages: a client's message as records and back, posteriors as arrays, and checks of all replies."""

from collections.abc import Mapping

import flwr.app
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.core.messages import Kind, Message
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.transport.messages import header_of, numbers_of, posterior_in, read_message, tensors_of


def to_arrays(posterior: GaussianPosterior, buffers: Mapping[str, Tensor]) -> ArrayRecord:
    """Return ``posterior`` and ``buffers`` as one ArrayRecord, by ``transport.messages.tensors_of``.

    >>> sorted(to_arrays(GaussianPosterior.point_mass({"w": torch.zeros(2)}), {"steps": torch.tensor(3)}))
    ['buffer/steps', 'mean/w']
    """
    return record_of(tensors_of(posterior, buffers))


def record_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return named tensors as an ArrayRecord."""
    own = {name: value.detach().cpu() for name, value in tensors.items()}
    half = torch.bfloat16  # which NumPy does not have
    return ArrayRecord({n: Array(value.float() if value.dtype == half else value) for n, value in own.items()})


def from_arrays(arrays: ArrayRecord, who: str) -> tuple[GaussianPosterior, dict[str, Tensor]]:
    """Return the posterior and buffers of :func:`to_arrays`. Raise FusionError for arrays of another form."""
    return posterior_in(tensors_in(arrays, who), who)


def tensors_in(arrays: ArrayRecord, who: str) -> dict[str, Tensor]:
    """Return the tensors of a record, by their keys. Raise FusionError for unreadable ones, or other than row order."""
    tensors = {}
    for key, array in arrays.items():
        try:
            stored = array.numpy()
            tensors[key] = torch.from_numpy(stored)
        except Exception as error:  # NumPy may raise anything for foreign bytes
            raise FusionError(f"{who}: array '{key}' cannot be read: {error}") from None
        if not stored.flags.c_contiguous:
            raise FusionError(f"{who}: array '{key}' is not in the order of rows that to_arrays sends")
    return tensors


def records_of(message: Message) -> RecordDict:
    """Return the records of a client's message: "config", and "arrays" and "metrics" if there are any."""
    records = RecordDict({"config": ConfigRecord(header_of(message))})
    if message.tensors:
        records["arrays"] = record_of(message.tensors)
    if message.figures or message.num_examples:
        records["metrics"] = MetricRecord({**numbers_of(message)})
    return records


def message_in(reply: flwr.app.Message, client: int | None, kind: Kind, server_round: int) -> Message:
    """Return the message in a client's reply. Raise FusionError as ``transport.messages.read_message`` does."""
    who = f"node {reply.metadata.src_node_id}" if client is None else f"client {client}"
    if reply.has_error():
        raise FusionError(f"{who} failed: {reply.error.reason}")
    header, arrays, metrics = (reply.content.get(name) for name in ("config", "arrays", "metrics"))

    def tensors() -> dict[str, Tensor]:
        return tensors_in(arrays, who) if isinstance(arrays, ArrayRecord) else {}

    return read_message(header, tensors, metrics, client, kind, server_round, who)


def header_in(reply: flwr.app.Message) -> object:
    """Return the header of a reply. None for an error of Flower's."""
    return None if reply.has_error() else reply.content.get("config")
