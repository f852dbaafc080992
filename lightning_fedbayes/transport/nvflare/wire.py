"""FLARE's messages: a question and a client's message as an ``FLModel`` and back, with checks of what clients send."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from torch import Tensor

from lightning_fedbayes.core.errors import ClientMismatch, FederationError, FusionError, check_path, is_whole, shown
from lightning_fedbayes.core.messages import Kind, Message
from lightning_fedbayes.transport.client import STAGES, Asked, Question
from lightning_fedbayes.transport.messages import header_of, numbers_of, read_message

ASKED = "asked"
"""Key of the task in the meta data of a question."""
TOLD = "told/"
"""Prefix of tensors for a client in addition to the global model."""


def model_of(asked: Asked, question: Question, rounds: int) -> FLModel:
    """Return a question for one client as FLARE sends it: tensors as ``params``, the rest as ``meta``."""
    told = {f"{TOLD}{name}": value for name, value in (question.told or {}).items()}
    meta = {**question.config, ASKED: asked, "client": question.client, "tells": question.told is not None}
    done = question.config["server-round"] - 1
    return FLModel(params={**question.model, **told}, meta=meta, current_round=done, total_rounds=rounds)


def question_in(model: FLModel) -> tuple[Asked, Question]:
    """Return the task and the question. Raise ClientMismatch for a foreign message."""
    asked, client = model.meta.get(ASKED), number_in(model.meta)
    if asked not in STAGES or client < 0:
        raise ClientMismatch("the server's task is none of FusionController's: give the job one as its controller")
    tensors: Mapping[str, Tensor] = model.params or {}
    told = {name.removeprefix(TOLD): value for name, value in tensors.items() if name.startswith(TOLD)}
    shared = {name: value for name, value in tensors.items() if not name.startswith(TOLD)}
    return asked, Question(client, model.meta, shared, told if model.meta.get("tells") else None)


def number_in(meta: Mapping[str, Any]) -> int:
    """Return the client's number that the server has given; -1 if there is none."""
    number: Any = meta.get("client")
    return number if is_whole(number) else -1


def answer_of(message: Message) -> FLModel:
    """Return a client's message as FLARE sends it."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in message.tensors.items()}
    return FLModel(params=tensors, metrics=numbers_of(message), meta=header_of(message))


def message_in(model: FLModel, client: int, kind: Kind, server_round: int) -> Message:
    """Return the message in a client's reply. Raise FusionError as ``read_message`` does, or for differences."""
    who = f"client {client}"
    if model.params_type == ParamsType.DIFF:
        raise FusionError(f"{who}: it sends differences, and posteriors are sent whole: params_transfer_type='FULL'")
    return read_message(
        model.meta, lambda: tensors_in(model.params, who), model.metrics, client, kind, server_round, who
    )


def tensors_in(params: Any, who: str) -> dict[str, Tensor]:
    """Return the tensors of a reply, by their names. Raise FusionError for other than dense tensors."""
    if not isinstance(params, Mapping):
        raise FusionError(f"{who}: its params are {shown(params)}, and a dict of tensors is needed")
    for name, value in params.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.layout != torch.strided:
            raise FusionError(f"{who}: array {shown(name)} is {shown(value)}, and a dense tensor is needed")
    return dict(params)


def check_absolute(name: str, path: str | Path | None) -> None:
    """Raise FederationError unless a path leads to the same place wherever FLARE runs a process."""
    if path is not None and not check_path(name, path).is_absolute():
        why = "FLARE runs its processes in other folders, and its simulator empties them"
        raise FederationError(f"{name}={shown(str(path))}: give an absolute path; {why}")
