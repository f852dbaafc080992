"""Federations without rounds over Flower: every client sends once, and the server has the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fedbayes.clients.settings import FederationSettings
from lightning_fedbayes.core.errors import ClientMismatch, FederationError, FusionError, check_kind, shown
from lightning_fedbayes.core.messages import Kind, Message
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.flower.training import own_clients
from lightning_fedbayes.modules.hierarchical import HierarchicalFit, HierarchicalLinearRegression
from lightning_fedbayes.modules.linear_statistics import LinearStatistics
from lightning_fedbayes.sources.curvature.kronecker import KroneckerLaplace, KroneckerSite
from lightning_fedbayes.sources.curvature.kronecker_posterior import KroneckerPosterior

ONCE = "once"
"""Flower's name of the query."""

OneShot = KroneckerLaplace | HierarchicalLinearRegression
"""Methods by which clients send once."""
Once = KroneckerPosterior | HierarchicalFit
"""Their results."""


def check_one_shot(method: Any) -> OneShot:
    """Return ``method``; raise FederationError unless clients can send once by it."""
    check_kind("one_shot", method, OneShot, "give an fb.KroneckerLaplace or an fb.HierarchicalLinearRegression")
    return method


def kind_of(method: OneShot) -> Kind:
    """Return the kind of message that a client sends."""
    return "statistics" if isinstance(method, HierarchicalLinearRegression) else "curvature"


def check_agreed(method: OneShot | None, wanted: str) -> OneShot:
    """Return the client's method; raise ClientMismatch unless it is the server's, ``wanted`` in words."""
    if method is None or repr(method) != wanted:
        raise ClientMismatch(f"the server asks for {wanted}, this client has one_shot={method}: give both the same")
    return method


# -- client ------------------------------------------------------------------------------------------------------------


def training_data(
    datamodule: L.LightningDataModule, settings: FederationSettings, client: int, seed: int
) -> DataLoader:
    """Return a loader over a client's own training data, in their order, with the options of its data module's."""
    datamodule.prepare_data()
    datamodule.setup("fit")
    loader: Any = datamodule.train_dataloader()
    own = own_clients(loader.dataset, settings.partition, client, seed).datasets[client]
    return DataLoader(own, loader.batch_size or 256, collate_fn=loader.collate_fn)


def needs_training(method: OneShot) -> bool:
    """Return whether a client trains its network before it sends."""
    return isinstance(method, KroneckerLaplace)


def answer_once(method: OneShot, module: L.LightningModule, loader: DataLoader) -> KroneckerSite | LinearStatistics:
    """Return what a client sends: of the trained ``module``, or of its examples alone."""
    return statistics_of(method, loader) if isinstance(method, HierarchicalLinearRegression) else (
        method.site(module, loader))


def statistics_of(method: HierarchicalLinearRegression, loader: DataLoader) -> LinearStatistics:
    """Return the sums of a client's examples, pairs of a vector and a number.

    Raises:
        FederationError: the examples are others.
    """
    batches = list(loader)
    for batch in batches:
        if not isinstance(batch, list | tuple) or [isinstance(each, Tensor) for each in batch] != [True, True]:
            raise FederationError(f"a batch is {shown(batch)}: give examples of (features, target)")
    inputs, targets = (torch.cat([batch[part] for batch in batches]) for part in (0, 1))
    return LinearStatistics.of(inputs, targets, method.bias)


# -- server ------------------------------------------------------------------------------------------------------------


def read_once(message: Message, method: OneShot, posterior: GaussianPosterior) -> KroneckerSite | LinearStatistics:
    """Return what a client has sent once; nothing in it is trusted.

    Raises:
        FedBayesError: it cannot be used.
    """
    if isinstance(method, HierarchicalLinearRegression):
        return message.read(LinearStatistics)
    site = message.read(KroneckerSite)
    if any(site.mean[name].shape != mean.shape if name in site.mean else True for name, mean in posterior.mean.items()):
        raise FusionError(f"client {message.client}: its weights are not those of the server's network")
    if not all(bool(value.isfinite().all()) for value in message.tensors.values()):
        raise FusionError(f"client {message.client}: its weights or their curvature are not finite")
    return site


def fused(method: OneShot, found: Mapping[int, Any]) -> Once:
    """Return the result of what clients have sent, client → site or sums; those of a model by the clients' numbers."""
    if isinstance(method, HierarchicalLinearRegression):
        return method.fit({str(client): sums for client, sums in found.items()})
    return method.fuse(list(found.values()))
