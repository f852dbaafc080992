"""Calibration over a network: the server's requests, the clients' answers, and how the server reads them."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.utils.data import ConcatDataset, Dataset

from lightning_fedbayes.callbacks import calibration
from lightning_fedbayes.callbacks.calibration import FederatedConformal, FederatedTemperature, ScoreSketch
from lightning_fedbayes.callbacks.calibration.callback import data_of
from lightning_fedbayes.callbacks.calibration.scores import GRIDS, checked_pair
from lightning_fedbayes.callbacks.calibration.temperature import message_of
from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import FedBayesError, FederationError, FusionError, told_failures
from lightning_fedbayes.core.messages import Kind, Message
from lightning_fedbayes.data import ClientDatasets
from lightning_fedbayes.transport.checkpoint import write_whole
from lightning_fedbayes.transport.messages import MOST_EXAMPLES

TEMPERATURE = "temperature"

Calibration = FederatedTemperature | FederatedConformal
Ask = Callable[[dict[str, Any], "set[int] | None", Kind], Mapping[int, Message | FedBayesError]]
"""Sends a request to some clients, or to all, for messages of a kind: client → message, or why it has none."""


def check_calibration(callbacks: Any) -> Sequence[Calibration]:
    """Raise FederationError unless these are calibrations in an order that can be run."""
    if not isinstance(callbacks, Sequence) or not all(isinstance(each, Calibration) for each in callbacks):
        raise FederationError("calibration: give a list of FederatedTemperature and FederatedConformal")
    if any(isinstance(each, FederatedTemperature) for each in callbacks[1:]):
        raise FederationError("calibration: put FederatedTemperature first, and only one; sets are of scaled logits")
    return callbacks


def request_of(callback: Calibration, temperature: float, trial: bool = False) -> dict[str, Any]:
    """Return a request: "temperature" or a kind of scores, T of the logits, cells and ε of the sketch (0: no noise).

    With ``trial`` the client is to try one batch and send nothing of it.
    """
    if isinstance(callback, FederatedTemperature):
        kind, bins, epsilon = TEMPERATURE, 1, 0.0
    else:
        kind, bins, epsilon = callback.kind, callback.bins, callback.epsilon or 0.0
    return {"kind": kind, "temperature": temperature, "bins": bins, "epsilon": epsilon, "trial": trial}


def try_calibration(callbacks: Sequence[Calibration], ask: Ask) -> None:
    """Let the clients try one batch before training, without sending it. Raise FederationError if none can answer."""
    for each in callbacks:
        usable(ask(request_of(each, 1.0, trial=True), None, "introduction"), lambda message: message)


def find_temperature(scaling: FederatedTemperature, ask: Ask) -> None:
    """Find T by exchanges, over again without clients that fail. Raise FederationError if none answers."""
    search, clients = calibration.TemperatureSearch(max_influence=scaling.max_influence), None
    while not search.done:
        answers = ask(request_of(scaling, search.temperature), clients, "temperature")
        messages = usable(answers, lambda message: message.read(calibration.TemperatureMessage))
        if clients is not None and messages.keys() != clients:
            search = calibration.TemperatureSearch(search.temperature, search.max_influence, exchanges=search.exchanges)
        clients = set(messages)
        search = search.after(list(messages.values()))
    scaling.take(search, [str(client) for client in sorted(clients or ())])


def take_thresholds(conformal: FederatedConformal, temperature: float, ask: Ask) -> None:
    """Take the thresholds from a sketch of each client. Raise FederationError if none answers."""
    conformal.temperature = 1.0 if conformal.kind == "interval" else temperature

    def read(message: Message) -> tuple[ScoreSketch, float]:  # the sketch, and the ε that the client has spent
        sketch = message.read(ScoreSketch, grid=GRIDS[conformal.kind])
        if len(sketch.counts) != conformal.bins or int(sketch.counts.max()) > MOST_EXAMPLES or sketch.num_examples == 0:
            rule = f"its counts are not those of {conformal.bins} cells and of some examples"
            raise FusionError(f"client {message.client}: {rule}")
        return sketch, message.figures.get("epsilon", 0.0)

    sketches = usable(ask(request_of(conformal, conformal.temperature), None, "counts"), read)
    conformal.fit({str(client): sketch for client, (sketch, _) in sketches.items()})
    if conformal.epsilon is not None:
        spent = max(epsilon for _, epsilon in sketches.values())
        rank_zero_info(f"Noisy counts so far: ε = {spent:g}, the largest of a client")


def usable(replies: Mapping[int, Any], read: Callable[[Any], Any]) -> dict[int, Any]:
    """Return client → ``read(message)``, in the order of clients. Raise FederationError if no reply can be used."""
    found, failures = {}, dict[str, Exception]()
    for client in sorted(replies):
        reply = replies[client]
        try:
            if isinstance(reply, FedBayesError):
                raise reply
            found[client] = read(reply)
        except FedBayesError as refusal:
            failures[str(client)] = refusal
    told = told_failures(failures)
    for line in told:
        rank_zero_info(line[0].upper() + line[1:])
    if not found:
        raise FederationError(f"no client's answer can be used: {'; '.join(told) or 'none has come in time'}")
    return found


def own_data(loaders: Any, client: int) -> tuple[Dataset, int]:
    """Return a client's part of a ClientDatasets, or all data, and the batch size. Raise FedBayesError without data."""
    datasets, batch_size = data_of(loaders)
    if isinstance(datasets, ClientDatasets):
        if client >= len(datasets.datasets):
            count = len(datasets.datasets)
            raise FederationError(f"the validation data are those of {count} clients, and this one is number {client}")
        return datasets.datasets[client], batch_size
    parts = list(datasets.values())
    return (parts[0] if len(parts) == 1 else ConcatDataset(parts)), batch_size


def answer(
    module: nn.Module, data: tuple[Dataset, int], request: Mapping[str, Any], client: int, seed: int
) -> calibration.TemperatureMessage | ScoreSketch:
    """Return a client's sums, or counts with fresh, secret noise. Raise FedBayesError if data or module do not suit."""
    (dataset, batch_size), name = data, str(client)
    kind, temperature = request["kind"], request["temperature"]
    if kind == TEMPERATURE:
        pair = calibration.predictions_of(module, {name: dataset}, batch_size, seed, first=client)[name]
        return message_of(checked_pair("", pair), temperature)
    conformal = FederatedConformal(kind=kind, bins=request["bins"])
    scores = conformal.scores_of(module, {name: dataset}, temperature, batch_size, seed, first=client)
    sketch = conformal.sketch(scores[name])
    return sketch.noisy(request["epsilon"], secrets.token_hex(32)) if request["epsilon"] else sketch


TWICE: tuple[str, ...] = ("epsilon", "epsilon_again")
"""Names of a sum in its file: a byte that has changed makes them differ."""


def count_noise(folder: Path, client: int, epsilon: float) -> float:
    """Add ε to the sum of a client's noisy counts, in a file of its folder. Raise FederationError if it is damaged."""
    path = folder / f"client-{client}-counts.json"
    try:
        told = json.loads(path.read_text()) if path.exists() else dict.fromkeys(TWICE, 0.0)
        spent, again = (told[name] for name in TWICE)
        errors.check_number("epsilon", spent, "[0, inf)")
        if spent != again:
            raise ValueError(f"{spent} is not {again}")
    except (OSError, ValueError, KeyError, TypeError, FederationError) as error:
        remedy = "restore the file, or write the ε spent so far into it, twice"
        why = f"{path}, this client's account of noisy counts, is damaged ({error})"
        raise FederationError(f"{why}, and it sends no more of them; {remedy}") from None
    if not path.exists():
        rank_zero_info(f"client {client}: there is no {path}, so that its account of noisy counts begins at 0")
    content = dict.fromkeys(TWICE, spent + epsilon)
    write_whole(path, content, lambda content, to: to.write_text(json.dumps(content)))
    return spent + epsilon
