"""Federations without rounds over a network: clients send once, or a few times for a softmax head."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fedbayes.clients.settings import FederationSettings
from lightning_fedbayes.core.batches import unpacked
from lightning_fedbayes.core.errors import ClientMismatch, FederationError, FusionError, check_kind, shown
from lightning_fedbayes.core.messages import SCALE, ClientUpdate, Kind, Message
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.layers.scaler import ScaleSums, compared
from lightning_fedbayes.modules.head import BayesianHead, HeadFit, HeadModule, HeadSlopes
from lightning_fedbayes.modules.hierarchical import HierarchicalFit, HierarchicalLinearRegression
from lightning_fedbayes.modules.linear_regression import LinearStatistics
from lightning_fedbayes.modules.sources.curvature.kronecker import KroneckerLaplace, KroneckerPosterior, KroneckerSite
from lightning_fedbayes.server.guard import TensorsGuard
from lightning_fedbayes.server.sums_guard import Claim, SumsGuard, fits
from lightning_fedbayes.transport.calibration import usable
from lightning_fedbayes.transport.training import own_clients

TOLD = "told"
"""Name of the tensors that tell clients about a head."""
SCALING = "scale"
"""Name of the exchange by which clients send the sums of a scale, before they train."""
COUNTING = "steps"
"""Name of the exchange by which clients announce their steps in a round, before they train."""
OneShot = KroneckerLaplace | HierarchicalLinearRegression | BayesianHead
"""Methods by which clients send once, or a few times."""
Once = KroneckerPosterior | HierarchicalFit | HeadFit
Ask = Callable[[Collection[int] | None, Mapping[str, Tensor]], dict[int, Any]]
"""Asks clients, None for all, with tensors for them."""


def check_one_shot(method: Any) -> OneShot:
    """Return ``method``. Raise FederationError unless clients can send once by it."""
    what = "give an fb.KroneckerLaplace, an fb.HierarchicalLinearRegression or an fb.BayesianHead"
    check_kind("one_shot", method, OneShot, what)
    return method


def kind_of(method: OneShot | str) -> Kind:
    """Return the kind of message that a client sends."""
    if isinstance(method, str):
        return "scale" if method == SCALING else "introduction"
    return "curvature" if isinstance(method, KroneckerLaplace) else "statistics"


def check_agreed(method: OneShot | None, wanted: str) -> OneShot | str:
    """Return the client's method, SCALING or COUNTING. Raise ClientMismatch unless it is what the server ``wanted``."""
    for each in (SCALING, COUNTING):
        if wanted == repr(each):
            return each
    if method is None or repr(method) != wanted:
        raise ClientMismatch(f"the server asks for {wanted}, this client has one_shot={method}: give both the same")
    return method


def training_data(
    datamodule: L.LightningDataModule, settings: FederationSettings, client: int, seed: int
) -> DataLoader:
    """Return a loader over a client's training data, in their order, with batch size and collation of its loader."""
    datamodule.prepare_data()
    datamodule.setup("fit")
    loader: Any = datamodule.train_dataloader()
    own = own_clients(loader.dataset, settings.partition, client, seed).datasets[client]
    return DataLoader(own, loader.batch_size or 256, collate_fn=loader.collate_fn)


def answer_once(
    method: OneShot | str, module: L.LightningModule, loader: DataLoader, told: Mapping[str, Tensor]
) -> KroneckerSite | LinearStatistics | HeadSlopes | ScaleSums:
    """Return a client's answer by ``method``. ``told`` is :meth:`HeadFit.told` of the server, empty at first."""
    if isinstance(method, str):
        return ScaleSums.of(loader.dataset, loader.collate_fn, module)
    if isinstance(method, KroneckerLaplace):
        return method.site(module, loader)
    if isinstance(method, HierarchicalLinearRegression):
        return statistics_of(method, loader)
    features, targets = _features_of(method, module, loader)
    if not told:
        return method.sums(features, targets)
    fit = HeadFit.from_told(told, method.takes_pairs(told["weights"].shape[1]))
    return method.slopes(fit, features, targets)


def _features_of(head: BayesianHead, module: L.LightningModule, loader: DataLoader) -> tuple[Tensor, Tensor]:
    """Return features and targets of a client's examples, on the CPU. Raise ClientMismatch for another module."""
    if not isinstance(module, HeadModule) or module.head != head:
        raise ClientMismatch(f"this client's module is no HeadModule with {head}: give the client one")
    with torch.inference_mode():
        pairs = (unpacked(batch, module, needs_targets=True) for batch in loader)
        parts = [(module.features(inputs).cpu(), targets.cpu()) for inputs, targets in pairs]
    features, targets = (torch.cat(each).clone() for each in zip(*parts, strict=True))
    return features, targets


def statistics_of(method: HierarchicalLinearRegression, loader: DataLoader) -> LinearStatistics:
    """Return the sums of a client's examples, pairs of vector and number. Raise FederationError for others."""
    batches = list(loader)
    for batch in batches:
        if not isinstance(batch, list | tuple) or [isinstance(each, Tensor) for each in batch] != [True, True]:
            raise FederationError(f"a batch is {shown(batch)}: give examples of (features, target)")
    inputs, targets = (torch.cat([batch[part] for batch in batches]) for part in (0, 1))
    return LinearStatistics.of(inputs, targets, method.bias)


def starts_from(method: OneShot, posterior: GaussianPosterior) -> bool:
    """Return True if clients need the network, unlike a head's. Raise FederationError for a head without HeadModule."""
    if isinstance(method, BayesianHead) and "sums.gram" not in posterior.mean:
        raise FederationError(f"{method} needs a HeadModule: pass initial_arrays(head_module)")
    return not isinstance(method, BayesianHead)


def with_scale(buffers: Mapping[str, Tensor], ask: Callable[[], Mapping[int, Any]]) -> dict[str, Tensor]:
    """Return a server's buffers, with a scale from the clients if it needs one. Raise FederationError without any."""
    scale = [value for name, value in buffers.items() if name.startswith(SCALE)]
    if not scale or any(value.numel() for value in scale):
        return dict(buffers)
    return {**buffers, **compared(usable(ask(), lambda message: message.read(ScaleSums)))[0].scale()}


def read_once(message: Message, method: OneShot, posterior: GaussianPosterior) -> KroneckerSite | LinearStatistics:
    """Return the site or sums in a client's message. Raise FedBayesError if they cannot be used."""
    if isinstance(method, HierarchicalLinearRegression):
        return message.read(LinearStatistics)
    if isinstance(method, BayesianHead):
        sums, own = message.read(LinearStatistics), posterior.mean
        if sums.gram.shape != own["sums.gram"].shape or sums.moment.shape != own["sums.moment"].shape:
            raise FusionError(f"client {message.client}: its sums are not those of the server's head")
        return sums
    site = message.read(KroneckerSite)
    if any(site.mean[name].shape != mean.shape if name in site.mean else True for name, mean in posterior.mean.items()):
        raise FusionError(f"client {message.client}: its weights are not those of the server's network")
    if not all(bool(value.isfinite().all()) for value in message.tensors.values()):
        raise FusionError(f"client {message.client}: its weights or their curvature are not finite")
    return site


def _read_slopes(message: Message, fit: HeadFit, sums: Mapping[int, LinearStatistics]) -> HeadSlopes:
    """Return a client's slopes. Raise FedBayesError for other examples than its ``sums``, or other weights."""
    found, count = message.read(HeadSlopes), sums[message.client].num_examples
    if found.slope.shape != fit.weights.shape or bool(len(found.curvature)) != fit.takes_pairs:
        raise FusionError(f"client {message.client}: its slopes are not those of the server's head")
    if found.num_examples != count:
        have = found.num_examples
        raise FusionError(f"client {message.client}: its slopes are of {have} examples, its sums of {count}")
    claim = claim_of(sums[message.client], -1)
    if not replace(claim, slopes={**vars(found), "num_examples": torch.tensor(count)}).is_possible:
        raise FusionError(f"client {message.client}: no probabilities of its examples have its slopes and curvature")
    return found


def claim_of(sums: LinearStatistics, ones: int | None) -> Claim:
    """Return a client's sums as a guard takes them, with their column of ones."""
    moment, square = (each if sums.moment.ndim == 2 else each[..., None] for each in (sums.moment, sums.square))
    return Claim({"gram": sums.gram, "moment": moment, "square": square}, sums.num_examples, ones)


def bounded(
    method: OneShot, found: Mapping[int, Any], max_influence: float | None, start: GaussianPosterior
) -> dict[int, Any]:
    """Return the clients' sums without those that no examples have, or that stand out. Raise FederationError for all.

    Of sites it clips moves from ``start``, and curvatures. ``max_influence`` is of
    :class:`~lightning_fedbayes.Safeguards`.
    """
    if max_influence is None:
        return dict(found)
    if isinstance(method, KroneckerLaplace):
        return _bounded_sites(usable(found, _checked_site), max_influence, start)
    ones = -1 if isinstance(method, BayesianHead) else 0 if method.bias else None
    guard = SumsGuard(GaussianPosterior.point_mass({}), max_influence, is_alone=len(found) == 1)
    bad = guard.left_out({client: claim_of(sums, ones) for client, sums in found.items()})
    answers = {client: FusionError(bad[client]) if client in bad else sums for client, sums in found.items()}
    return usable(answers, lambda sums: sums)


def _checked_site(site: KroneckerSite) -> KroneckerSite:
    """Return a site, of factors that examples can have. Raise FusionError for another."""
    for name, each in (*site.inputs.items(), *site.outputs.items()):
        factor = each.double()
        if not fits(factor, (factor.diagonal().abs() + torch.finfo().tiny).sqrt()):
            raise FusionError(f"the curvature of '{name}' is not symmetric and positive: it is of no examples")
    return site


def _bounded_sites(
    sites: Mapping[int, KroneckerSite], max_influence: float, start: GaussianPosterior
) -> dict[int, KroneckerSite]:
    """Return sites with moves, and curvatures for each example, within ``max_influence`` times the median client's."""
    updates = []
    for client, site in sites.items():
        means = GaussianPosterior.point_mass({name: site.mean[name] for name in start.names})
        curvatures = {name: site.outputs[name] * site.inputs[name].trace() for name in site.outputs}
        updates.append(ClientUpdate(client, site.num_examples, means, curvatures))
    sent = updates[0].buffers
    begun = GaussianPosterior.point_mass(start.mean)
    guard = TensorsGuard(begun, (), max_influence, {}, len(sites) == 1, 1.0, sent=sent, per_example=sent)
    sizes, weights = guard.sizes_of(updates), {each.client: float(each.num_examples) for each in updates}
    limits, found = guard.limits(sizes, list(weights.values())).of(weights), dict(sites)
    for update, size, limit in zip(updates, sizes, limits, strict=True):
        if bool((size > limit).any()):
            rank_zero_info(f"client {update.client} stands out, and counts as max_influence allows")
            kept, site = guard.clipped(update, limit, size), found[update.client]
            outputs = {name: kept.buffers[name] / site.inputs[name].trace() for name in site.outputs}
            mean = {**site.mean, **kept.posterior.owned().mean}
            found[update.client] = replace(site, mean=mean, outputs=outputs)
    return found


def fused(method: OneShot, found: Mapping[int, Any], ask: Ask) -> Once:
    """Return the result of the clients' first messages. A softmax head asks further, and again if a client fails."""
    if isinstance(method, HierarchicalLinearRegression):
        return method.fit({str(client): sums for client, sums in found.items()})
    if isinstance(method, KroneckerLaplace):
        return method.fuse(list(found.values()))
    fit = method.fit(found.values())
    while not fit.is_done:
        answers = ask(found.keys(), fit.told(method.inference == "variational"))
        slopes = usable(answers, partial(_read_slopes, fit=fit, sums=found))
        if len(slopes) < len(found):
            found = {client: found[client] for client in slopes}
            fit = method.fit(found.values())
        else:
            fit = method.step(fit, slopes.values())
    return fit
