"""Flower's messages: a client's message as records and back, posteriors as arrays, replies that nobody trusts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import flwr.app
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from lightning_fedbayes.clients.evaluation import ClientScores
from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import (
    FedBayesError,
    FusionError,
    PosteriorError,
    check_at_least,
    is_whole,
    listed,
    shown,
)
from lightning_fedbayes.core.messages import ClientUpdate, Kind, Message
from lightning_fedbayes.core.posterior import GaussianPosterior

MOST_EXAMPLES = 2**31 - 1
"""More examples than a client has; a smaller lie is a matter of the weighting."""
COUNTED = "counted"
"""Name of the record with what the server has counted of a client's site, where the client is to keep that."""
MOST_TEXT = 500
"""Characters of what a failure says that are shown."""
KINDS = ("mean", "variance", "buffer", "linearised", "frozen")
"""Kinds of arrays; a key is the kind, a slash and the parameter's or buffer's name. The last two stand alone: they say
of what kind the posterior is, and what the frozen parameters are that nobody sends."""


SENT = (torch.float32, torch.float64)
"""Types of means and variances in a message."""


def to_arrays(posterior: GaussianPosterior, buffers: Mapping[str, Tensor], frozen: str = "") -> ArrayRecord:
    """Return ``posterior`` and ``buffers`` as one ArrayRecord: float64 and integers as they are, others in float32.

    Deterministic parameters send no variance. Keys are ``mean/<name>``, ``variance/<name>`` and ``buffer/<name>``, and
    ``linearised/`` if the posterior is; ``frozen/<digest>`` where some parameters are.

    Args:
        posterior: means and variances, any floating dtype; bfloat16, which Flower cannot send, is exact in float32.
        buffers: name → tensor.
        frozen: digest of the frozen parameters.

    >>> q = GaussianPosterior({"w": torch.zeros(2), "b": torch.zeros(1)}, {"w": torch.ones(2), "b": torch.zeros(1)})
    >>> sorted(to_arrays(GaussianPosterior.point_mass({"w": torch.zeros(2)}), {"steps": torch.tensor(3)}))
    ['buffer/steps', 'mean/w']
    """
    tensors = tensors_of(posterior, buffers) | ({f"frozen/{frozen}": torch.ones(1)} if frozen else {})
    return ArrayRecord({name: Array(value) for name, value in tensors.items()})


def tensors_of(posterior: GaussianPosterior, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return posterior and buffers as the tensors of a message; see :func:`to_arrays`."""
    stored = posterior.state_dict()
    parts = {"mean": stored["mean"], "variance": stored["variance"], "buffer": buffers}
    if posterior.linearised:
        parts["linearised"] = {"": torch.ones(1)}
    return {f"{kind}/{name}": _sendable(value) for kind, part in parts.items() for name, value in part.items()}


def from_arrays(arrays: ArrayRecord, who: str) -> tuple[GaussianPosterior, dict[str, Tensor]]:
    """Return the posterior and buffers that :func:`to_arrays` sent.

    Args:
        arrays: of a message; nothing in it is trusted.
        who: whose they are, for messages.

    Returns: the posterior and the buffers, in the dtypes they were sent in.

    Raises:
        FusionError: an array of another kind or order, one that cannot be read, a mean or variance that is neither
            float32 nor float64, a negative variance, or a variance without a mean.
    """
    return posterior_in(tensors_in(arrays, who), who)


def tensors_in(arrays: ArrayRecord, who: str) -> dict[str, Tensor]:
    """Return the tensors of a record, by their keys.

    Raises:
        FusionError: one cannot be read, or is not in the order of rows.
    """
    tensors = {}
    for key, array in arrays.items():
        try:
            stored = array.numpy()
            tensors[key] = torch.from_numpy(stored)
        except Exception as error:  # bytes of a stranger: NumPy raises what it likes
            raise FusionError(f"{who}: array '{key}' cannot be read: {error}") from None
        if not stored.flags.c_contiguous:
            raise FusionError(f"{who}: array '{key}' is not in the order of rows that to_arrays sends")
    return tensors


def posterior_in(tensors: Mapping[str, Tensor], who: str) -> tuple[GaussianPosterior, dict[str, Tensor]]:
    """Return the posterior and buffers of :func:`tensors_of`; for what is refused see :func:`from_arrays`."""
    parts: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if kind not in parts:
            raise FusionError(f"{who}: array '{key}' is none of {', '.join(f'{known}/…' for known in KINDS)}")
        if kind != "buffer" and value.dtype not in SENT:
            why = "means and variances are floating-point numbers, in float32 or float64"
            raise FusionError(f"{who}: array '{key}' is {value.dtype}; {why}")
        parts[kind][name] = value
    orphans = sorted(parts["variance"].keys() - parts["mean"].keys())
    if orphans:
        raise FusionError(f"{who}: variances without a mean: {listed(orphans)}")
    try:
        posterior = GaussianPosterior.from_state_dict(parts)
    except PosteriorError as error:
        raise FusionError(f"{who}: {error}") from None
    return posterior, parts["buffer"]


def digest_in(arrays: ArrayRecord) -> str:
    """Return the digest of the frozen parameters; empty if there is none."""
    return next((key.removeprefix("frozen/") for key in arrays if key.startswith("frozen/")), "")


def probabilistic_names(arrays: Mapping[str, Any]) -> set[str]:
    """Return the names of the parameters that come with a variance."""
    return {key.removeprefix("variance/") for key in arrays if key.startswith("variance/")}


def _sendable(value: Tensor) -> Tensor:
    """Return ``value`` on the CPU, floating-point values in float32, unless they are in float64."""
    detached = value.detach().cpu()
    return detached.to(torch.float32) if detached.is_floating_point() and detached.dtype not in SENT else detached


def records_of(message: Message) -> RecordDict:
    """Return what travels of a client's message: "arrays", "metrics" and "config", each if there is something in it."""
    config = {"kind": message.kind, "client": message.client, "server-round": message.round, **message.texts}
    records = RecordDict({"config": ConfigRecord(config)})
    if message.tensors:
        arrays = {name: Array(_numpy_has(value)) for name, value in message.tensors.items()}
        records["arrays"] = ArrayRecord(arrays)
    if message.figures or message.num_examples:
        records["metrics"] = MetricRecord({"num-examples": message.num_examples, **message.figures})
    return records


def _numpy_has(value: Tensor) -> Tensor:
    """Return ``value`` on the CPU, bfloat16, which NumPy does not have, in float32."""
    value = value.detach().cpu()
    return value.float() if value.dtype == torch.bfloat16 else value


def message_in(reply: flwr.app.Message, client: int | None, kind: Kind, server_round: int) -> Message:
    """Return the message in a client's reply; nothing in it is trusted.

    Args:
        reply: the reply.
        client: the client that was asked; None: it is to say who it is.
        kind: what it was asked for.
        server_round: the round that it was asked about.

    Raises:
        FusionError: the client failed, says that it is another, or has sent something else, of another round or of
            no whole number of examples. Figures that are not finite are left out.
    """
    node = reply.metadata.src_node_id
    who = f"node {node}" if client is None else f"client {client}"
    if reply.has_error():
        raise FusionError(f"{who} failed: {reply.error.reason}")
    config, arrays, metrics = (reply.content.get(name) for name in ("config", "arrays", "metrics"))
    if not isinstance(config, ConfigRecord) or config.get("kind") not in get_args(Kind):
        raise FusionError(f"{who}: its reply says of itself that it is {shown(config and config.get('kind'))}, which "
                          "no message of this version is")
    if config["kind"] == "failure":
        raise FusionError(f"{who} failed{failure_in(config)}")
    if config["kind"] != kind:
        raise FusionError(f"{who}: its reply is of kind '{config['kind']}', and it was asked for '{kind}'")
    number: Any = config.get("client")
    answered: Any = config.get("server-round")
    if not is_whole(number) or number < 0 or (client is not None and number != client):
        raise FusionError(f"{who}: it says that it is client {shown(number)}")
    if not is_whole(answered) or answered != server_round:
        raise FusionError(f"{who}: its reply is of round {answered}, and this is round {server_round}")
    tensors = tensors_in(arrays, who) if isinstance(arrays, ArrayRecord) else {}
    numbers = {
        name: value for name, value in (metrics.items() if isinstance(metrics, MetricRecord) else ())
        if not isinstance(value, list)
    }
    count = numbers.pop("num-examples", 0)
    check_at_least(f"{who}: num-examples", count, 0, MOST_EXAMPLES, error=FusionError)
    figures = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
    return Message(kind, number, answered, int(count), tensors, figures)


def read_all(
    replies: Iterable[flwr.app.Message], nodes: Mapping[int, int], kind: Kind, server_round: int
) -> dict[int, Message | FedBayesError]:
    """Return what each client has sent, or why it cannot be read, by the client's number.

    Args:
        replies: of the nodes; those of others are left out.
        nodes: node → client, those that were asked.
        kind, server_round: what they were asked for, and about which round.
    """
    found: dict[int, Message | FedBayesError] = {}
    for reply in replies:
        client = nodes.get(reply.metadata.src_node_id)
        if client is not None:
            try:
                found[client] = message_in(reply, client, kind, server_round)
            except FedBayesError as refusal:
                found[client] = refusal
    return dict(sorted(found.items()))


def has_lost_state(reply: flwr.app.Message) -> bool:
    """Return True if a client says that it has lost what it had to keep."""
    config = None if reply.has_error() else reply.content.get("config")
    return isinstance(config, ConfigRecord) and config.get("error") == errors.LostState.__name__


def failure_in(config: Mapping[str, Any]) -> str:
    """Return what a client's failure says of itself, with what this package knows of an error of its own."""
    name, stage, text = (str(config.get(key, ""))[:MOST_TEXT] for key in ("error", "stage", "text"))
    if text:
        return f" in {stage}: {name}: {text}"
    known = getattr(errors, name, None)
    meaning = known.__doc__ if isinstance(known, type) and issubclass(known, FedBayesError) else None
    hint = "its own log says more; client_app(share_errors=True) sends the text"
    return f" in {stage}: {name} ({f'{meaning} {hint[0].upper()}{hint[1:]}.' if meaning else hint})"


def read_update(message: Message, probabilistic: set[str]) -> ClientUpdate:
    """Return the update in a client's message.

    Args:
        message: of the client.
        probabilistic: names of the parameters that must come with a variance, and no others.

    Raises:
        FusionError: it cannot be used. Values and shapes are checked by :class:`~lightning_fedbayes.Server`.
    """
    who = f"client {message.client}"
    if not message.tensors:
        raise FusionError(f"{who}: its reply has no arrays")
    posterior, buffers = posterior_in(message.tensors, who)
    wrong = sorted(probabilistic_names(message.tensors) ^ probabilistic)
    if wrong:
        raise FusionError(
            f"{who}: it must send the variances of the probabilistic parameters and of no others; wrong are "
            f"{listed(wrong)}"
        )
    check_at_least(f"{who}: num-examples", message.num_examples, 1, MOST_EXAMPLES, error=FusionError)
    return ClientUpdate(message.client, message.num_examples, posterior, buffers, dict(message.figures))


def client_scores(sent: Mapping[int, tuple[int, Mapping[str, float]]]) -> ClientScores:
    """Return the table of what clients have measured; NaN where a client has not sent a figure.

    Args:
        sent: number of the client → its number of validation examples and its figures.
    """
    clients = sorted(sent)
    figures = dict.fromkeys(name for client in clients for name in sent[client][1])
    values = {
        name: torch.tensor([sent[client][1].get(name, math.nan) for client in clients], dtype=torch.float64)
        for name in figures
    }
    return ClientScores(tuple(map(str, clients)), tuple(sent[client][0] for client in clients), values)
