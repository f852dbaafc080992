"""Clients' data as adversaries train on them; the data sets themselves stay as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fedbayes.adversaries import Attack, LabelFlip, flip_labels
from lightning_fedbayes.data.clients import Clients, tensors_of
from lightning_fedbayes.errors import FederationError


def poisoned(clients: Clients, attacks: Mapping[int, Sequence[Attack]]) -> Clients:
    """``clients`` whose adversaries' labels are flipped; counts of classes remain those of the true labels.

    Args:
        clients: the clients.
        attacks: client number → its attacks.

    Raises:
        FederationError: an attack on labels that are unknown, no integers, or not the last of an example's parts.
    """
    flips = {client: [each for each in found if isinstance(each, LabelFlip)] for client, found in attacks.items()}
    flips = {client: found for client, found in flips.items() if found}
    if flips and clients.counts is None:
        raise FederationError(
            f"{next(iter(flips.values()))[0]}: the labels of the training data are unknown or not integers, so there "
            "are no classes to flip. Give the data set an integer attribute `targets` or `labels` with one entry per "
            "example, or use an attack on the update, such as SignFlip"
        )
    datasets, known = list(clients.datasets), {}
    for client, found in flips.items():
        for _ in found:
            datasets[client] = _flipped(datasets[client], clients.classes, known)
    return replace(clients, datasets=tuple(datasets))


def _flipped(dataset: Dataset, classes: Sequence[int], known: dict[int, TensorDataset]) -> Dataset:
    """``dataset`` with flipped labels, still tensors in memory if it was.

    Args:
        dataset: of one client.
        classes: ascending.
        known: flipped data sets of tensors by the id of the original, so that clients share what they shared.
    """
    if tensors_of(dataset) is None:
        flipped = FlippedLabels(dataset, classes)
        _check_first_example(flipped)
        return flipped
    if isinstance(dataset, Subset):
        return Subset(_flipped(dataset.dataset, classes, known), dataset.indices)
    assert isinstance(dataset, TensorDataset)
    if id(dataset) not in known:
        *inputs, labels = dataset.tensors
        known[id(dataset)] = TensorDataset(*inputs, flip_labels(labels, classes))
    return known[id(dataset)]


class FlippedLabels(Dataset):
    """A map-style data set of tuples whose last entry, the label, is replaced by its mirror image.

    Args:
        dataset: gives tuples or lists.
        classes: all labels that occur, ascending.
    """

    def __init__(self, dataset: Dataset, classes: Sequence[int]) -> None:
        self.dataset = dataset
        self.mirror = dict(zip(classes, reversed(classes), strict=True))

    def __len__(self) -> int:
        return len(self.dataset)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, index: int) -> Any:
        example = self.dataset[index]
        if not isinstance(example, tuple | list):
            raise FederationError(
                f"LabelFlip: an example is a {type(example).__name__}; give tuples whose last entry is the label"
            )
        *inputs, label = example
        try:
            flipped = self.mirror[int(label)]
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise FederationError(
                f"LabelFlip: the last entry of an example is {label!r}, which is none of the classes "
                f"{list(self.mirror)}; give the label last"
            ) from None
        return *inputs, torch.full_like(label, flipped) if isinstance(label, Tensor) else type(label)(flipped)


def _check_first_example(dataset: FlippedLabels) -> None:
    """Raise FederationError before training if examples are not what flipping needs.

    Whatever else the data set raises fails its client when it trains, as without the attack.
    """
    with isolate_rng(include_cuda=False):
        try:
            dataset[0]
        except FederationError:
            raise
        except Exception:
            return
