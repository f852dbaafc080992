"""Messages over a network: posteriors as named tensors and back, and checks of what a client sends."""

import importlib.metadata
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, get_args

import lightning as L
import torch
from torch import Tensor

from lightning_fedbayes.callbacks.trainer import optimizers_of
from lightning_fedbayes.clients.across import CrossScores
from lightning_fedbayes.clients.evaluation import ClientScores
from lightning_fedbayes.clients.learned import learned_posterior
from lightning_fedbayes.clients.model import ResidentModel, frozen_names
from lightning_fedbayes.clients.settings import BufferPolicy, FederationSettings, Source
from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import FedBayesError, FusionError
from lightning_fedbayes.core.messages import ClientUpdate, Kind, Message
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.layers.scaler import scale_of

MOST_EXAMPLES = 2**31 - 1
"""Most examples that a client may claim."""
EXAMPLES = "num-examples"
"""Name of the number of examples among a message's numbers."""
COUNTED = "counted"
"""Name of the tensors that tell a client what the server has counted of its site."""
VERSION = ".".join(importlib.metadata.version("lightning-fedbayes").split(".")[:2])
"""Version of the messages, the package's without its last number. Each message tells it: both ends have the same."""
MOST_TEXT = 500
"""Characters of a failure's texts that are shown."""
KINDS = ("mean", "variance", "buffer", "linearised", "frozen", "steps")
"""Kinds of arrays. A key is the kind, a slash and the parameter's or buffer's name. The last three tell the kind of the
posterior, the digest of the frozen parameters, and that the module asks for the steps of all rounds."""
SENT = (torch.float32, torch.float64)


def tensors_of(posterior: GaussianPosterior, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return posterior and buffers as the tensors of a message: float64 and integers as they are, others in float32.

    Deterministic parameters send no variance. Keys are ``mean/<name>``, ``variance/<name>`` and ``buffer/<name>``, and
    ``linearised/`` if the posterior is.
    """
    stored = posterior.state_dict()
    parts = {"mean": stored["mean"], "variance": stored["variance"], "buffer": dict(buffers)}
    if posterior.linearised:
        parts["linearised"] = {"": torch.ones(1)}
    tensors = {f"{kind}/{n}": value.detach().cpu() for kind, part in parts.items() for n, value in part.items()}
    return {
        key: value.float() if value.is_floating_point() and value.dtype not in SENT else value
        for key, value in tensors.items()
    }


def posterior_in(tensors: Mapping[str, Tensor], who: str) -> tuple[GaussianPosterior, dict[str, Tensor]]:
    """Return the posterior and buffers of :func:`tensors_of`, in the dtypes they were sent in. ``who`` sent them.

    Raises FusionError for an array of another kind, a mean or variance that is neither float32 nor float64, and a
    variance that is negative or has no mean.
    """
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
        raise FusionError(f"{who}: variances without a mean: {errors.listed(orphans)}")
    try:
        posterior = GaussianPosterior.from_state_dict(parts)
    except errors.PosteriorError as error:
        raise FusionError(f"{who}: {error}") from None
    return posterior, parts["buffer"]


def probabilistic_names(arrays: Mapping[str, Any]) -> set[str]:
    """Return the names of the parameters that come with a variance."""
    return {key.partition("/")[2] for key in arrays if key.startswith("variance/")}


def initial_model(
    module: L.LightningModule,
    *,
    buffers: BufferPolicy = "average",
    local_parameters: Sequence[str] = (),
    posterior: Source | None = None,
) -> dict[str, Tensor]:
    """Return the model to start from. See :func:`~lightning_fedbayes.transport.flower.initial_arrays`."""
    errors.check_kind("module", module, L.LightningModule, "give a LightningModule")
    FederationSettings(buffers=buffers, local_parameters=local_parameters, posterior=posterior)  # for its checks
    optimizers, asks = optimizers_of(module)
    learned = learned_posterior(optimizers, module, posterior)
    model = ResidentModel(module, local_parameters, buffers, learned, frozen=frozen_names(module))
    frozen = model.digest()
    tensors = tensors_of(model.read_posterior(), {**model.federated_buffers, **scale_of(module)})
    marks = ([f"frozen/{frozen}"] if frozen else []) + (["steps/"] if asks else [])
    return tensors | {mark: torch.ones(1) for mark in marks}


def header_of(message: Message) -> dict[str, Any]:
    """Return the header of a client's message."""
    header = {"kind": message.kind, "client": message.client, "server-round": message.round, "version": VERSION}
    return {**header, **message.texts}


def numbers_of(message: Message) -> dict[str, float]:
    """Return the number of examples of a client's message, and its figures."""
    return {EXAMPLES: message.num_examples, **message.figures}


def read_message(
    header: Any,
    tensors: Callable[[], dict[str, Tensor]],
    numbers: Any,
    client: int | None,
    kind: Kind,
    server_round: int,
    who: str,
) -> Message:
    """Return the message in a client's reply. Every part is checked.

    ``header`` and ``numbers`` are of :func:`header_of` and :func:`numbers_of`. Other than finite numbers are left out.
    ``tensors`` is called once the header is in order. ``client`` None: the header says who it is. ``who`` is for
    messages. Raise FusionError if the client failed, or sent another client's number, kind or round than the server
    asked for, or no whole number of examples.
    """
    check_version(header, who, FusionError)
    says = header.get("kind") if isinstance(header, Mapping) else None
    if not isinstance(says, str) or says not in get_args(Kind):
        raise FusionError(f"{who}: its reply says that it is {errors.shown(says)}, which no message of this version is")
    if says == "failure":
        raise FusionError(f"{who} failed{failure_in(header)}")
    if says != kind:
        raise FusionError(f"{who}: its reply is of kind '{says}', and it was asked for '{kind}'")
    number: Any = header.get("client")
    answered: Any = header.get("server-round")
    if not errors.is_whole(number) or number < 0 or (client is not None and number != client):
        raise FusionError(f"{who}: it says that it is client {errors.shown(number)}")
    if not errors.is_whole(answered) or answered != server_round:
        raise FusionError(f"{who}: its reply is of round {errors.shown(answered)}, and this is round {server_round}")
    sent = tensors()
    known = {str(name): value for name, value in numbers.items()} if isinstance(numbers, Mapping) else {}
    count = known.pop(EXAMPLES, 0)
    errors.check_at_least(f"{who}: {EXAMPLES}", count, 0, MOST_EXAMPLES, error=FusionError)
    figures = {name: float(value) for name, value in known.items() if _is_finite(value)}
    return Message(kind, number, answered, int(count), sent, figures)


def check_version(header: Any, who: str, error: type[FedBayesError]) -> None:
    """Raise ``error`` for a message without this version of the package, or of a stranger."""
    found = header.get("version") if isinstance(header, Mapping) else None
    if not isinstance(found, str) or found != VERSION:
        what = f"{who}: its message is of lightning_fedbayes {errors.shown(found)}, and {VERSION} runs here"
        raise error(f"{what}: install the same at the server and at all clients")


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def attempted(read: Callable[[], Message]) -> Message | FedBayesError:
    """Return the message that ``read`` returns, or why it cannot be read."""
    try:
        return read()
    except FedBayesError as refusal:
        return refusal


def has_lost_state(header: Any) -> bool:
    """Return True if a client reports that it has lost its state."""
    return isinstance(header, Mapping) and header.get("error") == errors.LostState.__name__


def failure_in(config: Mapping[str, Any]) -> str:
    """Return the text of a client's failure, with the meaning of an error of this package."""
    name, stage, text = (str(config.get(key, ""))[:MOST_TEXT] for key in ("error", "stage", "text"))
    if text:
        return f" in {stage}: {name}: {text}"
    known = getattr(errors, name, None)
    meaning = known.__doc__ if isinstance(known, type) and issubclass(known, FedBayesError) else None
    hint = "its own log says more; share_errors=True sends the text"
    return f" in {stage}: {name} ({f'{meaning} {hint[0].upper()}{hint[1:]}.' if meaning else hint})"


def read_update(message: Message, probabilistic: set[str]) -> ClientUpdate:
    """Return the update in a client's message, with variances of exactly the ``probabilistic`` parameters.

    Raises FusionError if it cannot be used. :class:`~lightning_fedbayes.Server` checks values and shapes.
    """
    who = f"client {message.client}"
    if not message.tensors:
        raise FusionError(f"{who}: its reply has no arrays")
    posterior, buffers = posterior_in(message.tensors, who)
    wrong = sorted(probabilistic_names(message.tensors) ^ probabilistic)
    if wrong:
        rule = "it must send the variances of the probabilistic parameters and of no others"
        raise FusionError(f"{who}: {rule}; wrong are {errors.listed(wrong)}")
    errors.check_at_least(f"{who}: num-examples", message.num_examples, 1, MOST_EXAMPLES, error=FusionError)
    return ClientUpdate(message.client, message.num_examples, posterior, buffers, dict(message.figures))


def client_scores(scored: Mapping[int, Message]) -> ClientScores:
    """Return the table of what clients have measured, by their numbers. NaN where a figure has not been sent."""
    messages = {str(client): scored[client] for client in sorted(scored)}
    counts = {name: each.num_examples for name, each in messages.items()}
    return ClientScores.of(counts, {name: each.figures for name, each in messages.items()})


def cross_scores(found: Mapping[int, Mapping[int, Message]]) -> CrossScores | None:
    """Return the table of the clients that have sent a model and scored all. None for fewer than two.

    ``found`` is number of the model's client → number of the client that has scored it → its message.
    """
    both = [client for client in sorted(found) if all(client in row for row in found.values())]
    messages = [found[model][data] for model in both for data in both]
    first = messages[0].figures if len(both) > 1 else {}
    figures = [name for name in first if all(name in each.figures for each in messages)]
    if not figures:
        return None
    rows = {}
    for model in both:
        scored = client_scores({data: found[model][data] for data in both})
        rows[str(model)] = replace(scored, values={name: scored.values[name] for name in figures})
    return CrossScores.of(rows)
