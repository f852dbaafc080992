"""Adversaries of one round: the data that they train on, and the updates that they send in place of their own."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fedbayes.clients.adversaries import (
    Attack,
    HonestMoments,
    Knowledge,
    LabelFlip,
    UpdateAttack,
    flip_labels,
)
from lightning_fedbayes.core.errors import FederationError, listed
from lightning_fedbayes.core.messages import ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.seeding import derive_seed
from lightning_fedbayes.data.clients import Clients, tensors_of
from lightning_fedbayes.fusion.accumulator import check_structure
from lightning_fedbayes.methods.method import joined, split
from lightning_fedbayes.server.plan import RoundPlan


class RoundAdversaries:
    """Replaces the updates of the clients that attack.

    Of the honest clients only moments are kept, and those only if an adversary waits for them.
    """

    def __init__(
        self, attacks: Mapping[int, Sequence[Attack]], plan: RoundPlan, previous: GaussianPosterior, seed: int
    ) -> None:
        self.previous = previous
        self.plan = plan
        self.seed = seed
        self._attackers = attacks.keys() & set(plan.cohort)
        self._attacks = {
            client: [attack for attack in attacks[client] if isinstance(attack, UpdateAttack)]
            for client in self._attackers
        }
        self._mean = previous.flatten()[0] if any(self._attacks.values()) else torch.zeros(0)
        self._observes = any(self.waits(client) for client in self._attackers)
        self._honest = HonestMoments(self._mean)

    def waits(self, client: int) -> bool:
        """Return True if a client sends its update only after those of the honest clients."""
        return any(attack.needs_honest for attack in self._attacks.get(client, ()))

    def send(self, update: ClientUpdate) -> ClientUpdate:
        """Return the update that a client sends; an honest client sends ``update`` itself.

        Raises:
            FusionError: names or shapes are not those of the global model.
        """
        attacks = self._attacks.get(update.client)
        if not attacks:
            return update
        check_structure(update.posterior, self.previous, f"client {update.client}")
        posterior = update.posterior.ordered(self.previous.names)
        own, beside = split(update.buffers)
        for attack in attacks:
            posterior = attack.send(posterior, self._knowledge(update.client, attack))
            if beside:
                beside = attack.send_beside(beside, self._knowledge(update.client, attack))
        return replace(update, posterior=posterior, buffers=joined(own, beside), kept=None)

    def observe(self, update: ClientUpdate) -> None:
        """Show the adversaries a valid update."""
        if self._observes and update.client not in self._attackers:
            self._honest.add(update.posterior.ordered(self.previous.names).flatten()[0])

    def _knowledge(self, client: int, attack: Attack) -> Knowledge:
        """Return the knowledge of ``client``, with a generator for this round, client and attack."""
        name = zlib.crc32(type(attack).__name__.encode())
        draws = torch.Generator().manual_seed(derive_seed(self.seed, "attack", self.plan.round, client, name))
        return Knowledge(self._mean, draws, self._honest, len(self.plan.cohort), len(self._attackers))


def held_back(update: ClientUpdate) -> ClientUpdate:
    """Return a copy that later batches do not overwrite."""
    buffers = {name: value.clone() for name, value in update.buffers.items()}
    return replace(update, posterior=update.posterior.clone(), buffers=buffers)


def poisoned(clients: Clients, attacks: Mapping[int, Sequence[Attack]]) -> Clients:
    """``clients`` whose adversaries' labels are flipped; counts of classes remain those of the true labels.

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
    if not flips:
        return clients
    datasets, known = list(clients.datasets), {}
    for client, found in flips.items():
        for _ in found:
            datasets[client] = _flipped(datasets[client], clients.classes, known)
    return replace(clients, datasets=tuple(datasets))


def _flipped(dataset: Dataset, classes: Sequence[int], known: dict[int, TensorDataset]) -> Dataset:
    """``dataset`` with flipped labels, still tensors in memory if it was; ``known``, by id, clients go on sharing."""
    if tensors_of(dataset) is None:
        flipped = FlippedLabels(dataset, classes)
        with isolate_rng(include_cuda=False):
            try:
                flipped[0]
            except FederationError:  # before training
                raise
            except Exception:  # fails its client when it trains, as without the attack
                pass
        return flipped
    if isinstance(dataset, Subset):
        return Subset(_flipped(dataset.dataset, classes, known), dataset.indices)
    assert isinstance(dataset, TensorDataset)
    if id(dataset) not in known:
        *inputs, labels = dataset.tensors
        known[id(dataset)] = TensorDataset(*inputs, flip_labels(labels, classes))
    return known[id(dataset)]


class FlippedLabels(Dataset):
    """A map-style data set of tuples whose last entry, the label, is replaced by its mirror image in ``classes``."""

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
                f"{listed(self.mirror)}; give the label last"
            ) from None
        return *inputs, torch.full_like(label, flipped) if isinstance(label, Tensor) else type(label)(flipped)
