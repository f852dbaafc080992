"""Flower's messages: posterior and buffers as arrays and back, and the reading of replies that nobody trusts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from torch import Tensor

from lightning_fedbayes.clients.evaluation import ClientScores
from lightning_fedbayes.core.errors import FusionError, PosteriorError, check_at_least, is_whole, listed
from lightning_fedbayes.core.messages import ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior

MOST_EXAMPLES = 2**31 - 1
"""More examples than a client has; a smaller lie is a matter of the weighting."""
KINDS = ("mean", "variance", "buffer", "linearised", "frozen")
"""Kinds of arrays; a key is the kind, a slash and the parameter's or buffer's name. The last two stand alone: they say
of what kind the posterior is, and what the frozen parameters are that nobody sends."""


def to_arrays(posterior: GaussianPosterior, buffers: Mapping[str, Tensor], frozen: str = "") -> ArrayRecord:
    """Return ``posterior`` and ``buffers`` as one ArrayRecord, floating-point values in float32, others as they are.

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
    stored = posterior.state_dict()
    parts = {"mean": stored["mean"], "variance": stored["variance"], "buffer": buffers}
    if posterior.linearised:
        parts["linearised"] = {"": torch.ones(1)}
    if frozen:
        parts["frozen"] = {frozen: torch.ones(1)}
    return ArrayRecord({
        f"{kind}/{name}": Array(_sendable(value)) for kind, part in parts.items() for name, value in part.items()
    })


def from_arrays(arrays: ArrayRecord, who: str) -> tuple[GaussianPosterior, dict[str, Tensor]]:
    """Return the posterior and buffers that :func:`to_arrays` sent.

    Args:
        arrays: of a message; nothing in it is trusted.
        who: whose they are, for messages.

    Returns: the posterior, float32, and the buffers in the dtype they were sent in.

    Raises:
        FusionError: an array of another kind or order, one that cannot be read, a mean or variance that is not
            float32 or a negative variance, or a variance without a mean.
    """
    parts: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for key, array in arrays.items():
        kind, _, name = key.partition("/")
        if kind not in parts:
            raise FusionError(f"{who}: array '{key}' is none of {', '.join(f'{known}/…' for known in KINDS)}")
        try:
            stored = array.numpy()
            value = torch.from_numpy(stored)
        except Exception as error:  # bytes of a stranger: NumPy raises what it likes
            raise FusionError(f"{who}: array '{key}' cannot be read: {error}") from None
        if not stored.flags.c_contiguous:
            raise FusionError(f"{who}: array '{key}' is not in the order of rows that to_arrays sends")
        if kind != "buffer" and value.dtype != torch.float32:
            why = "means and variances are floating-point numbers, in float32"
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


def probabilistic_names(arrays: ArrayRecord) -> set[str]:
    """Return the names of the parameters that come with a variance."""
    return {key.removeprefix("variance/") for key in arrays if key.startswith("variance/")}


def _sendable(value: Tensor) -> Tensor:
    """Return ``value`` on the CPU, floating-point values in float32."""
    detached = value.detach().cpu()
    return detached.to(torch.float32) if detached.is_floating_point() else detached


def read_update(reply: Message, client: int, server_round: int, probabilistic: set[str]) -> ClientUpdate:
    """Return the update in a client's reply to a training message.

    Args:
        reply: the message; nothing in it is trusted.
        client: the client that was asked.
        server_round: the round that it was asked for.
        probabilistic: names of the parameters that must come with a variance, and no others.

    Raises:
        FusionError: the client failed, or the reply cannot be used. Values and shapes are checked by
            :class:`~lightning_fedbayes.Server`.
    """
    who = f"client {client}"
    metrics = read_metrics(reply, who)
    arrays, config = reply.content.get("arrays"), reply.content.get("config")
    answered = config.get("server-round") if isinstance(config, ConfigRecord) else None
    if not is_whole(answered) or answered != server_round:
        raise FusionError(f"{who}: its reply is of round {answered}, and this is round {server_round}")
    if not isinstance(arrays, ArrayRecord):
        raise FusionError(f"{who}: its reply has no arrays")
    posterior, buffers = from_arrays(arrays, who)
    wrong = sorted(probabilistic_names(arrays) ^ probabilistic)
    if wrong:
        raise FusionError(
            f"{who}: it must send the variances of the probabilistic parameters and of no others; wrong are "
            f"{listed(wrong)}"
        )
    count = examples_of(metrics, who, least=1)
    return ClientUpdate(client, count, posterior, buffers, {n: v for n, v in metrics.items() if n != "num-examples"})


def read_metrics(reply: Message, who: str) -> dict[str, float]:
    """Return the finite figures of a reply, "num-examples" among them as it was sent.

    Raises:
        FusionError: the client failed, or the reply has no figures.
    """
    if reply.has_error():
        raise FusionError(f"{who} failed: {reply.error.reason}")
    record = reply.content.get("metrics")
    if not isinstance(record, MetricRecord):
        raise FusionError(f"{who}: its reply has no metrics")
    numbers: dict[str, Any] = {name: value for name, value in record.items() if not isinstance(value, list)}
    return {name: value for name, value in numbers.items() if name == "num-examples" or math.isfinite(value)}


def examples_of(metrics: dict[str, float], who: str, least: int = 0) -> int:
    """Return the number of examples that a client says it has.

    Raises:
        FusionError: it is no whole number, less than ``least`` or more than :data:`MOST_EXAMPLES`.
    """
    count = metrics.get("num-examples")
    check_at_least(f"{who}: num-examples", count, least, MOST_EXAMPLES, error=FusionError)
    return int(count)  # pyright: ignore[reportArgumentType]


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
