"""Set-up of a federation: the resident model, the engine that suits, and the federation that drives it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_fedbayes.clients.context import TrainingContext
from lightning_fedbayes.clients.engine import Engine
from lightning_fedbayes.clients.evaluation import check_score
from lightning_fedbayes.clients.federation import Federation
from lightning_fedbayes.clients.loader import FederatedLoader
from lightning_fedbayes.clients.model import ResidentModel, frozen_names
from lightning_fedbayes.clients.privacy import Door, check_no_buffers
from lightning_fedbayes.clients.problems import default_fusion
from lightning_fedbayes.clients.sequential import SequentialEngine
from lightning_fedbayes.clients.settings import FederationSettings
from lightning_fedbayes.clients.states import Client
from lightning_fedbayes.core.errors import CannotVectorize, FederationError, listed
from lightning_fedbayes.core.exchange import ALONE, Collective
from lightning_fedbayes.server.plan import choose_cohort

LARGEST_STEP = {"cpu": 30e6, "cuda": 30e9}
"""Floating-point operations of a client's step up to which stacking pays, by type of device: it saves calls."""
LARGEST_SHARED_STEP, MOSTLY_FROZEN = {"cpu": 3e9, "cuda": 30e9}, 0.9
"""The same for a network with this share of frozen parameters, as under adapters, of which a stack takes one product
with all clients' examples (``python -m benchmarks.engine.adapters``; the limit for GPUs is not measured)."""

STACK_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}
"""Memory for a stack of clients, by type of device. It is fixed, so that the number of clients in a stack, on which the
noise depends, is the same on every machine."""


def make_federation(
    settings: FederationSettings,
    context: TrainingContext,
    loader: FederatedLoader,
    collective: Collective = ALONE,
    held_out: Callable[[], Iterable[Any]] = tuple,
) -> Federation:
    """Make the federation of ``settings`` for a training loop: resident model, engine and server.

    Arguments as of :class:`~lightning_fedbayes.clients.federation.Federation` and of an engine. Raise FederationError
    or FusionError if the module cannot be federated with these settings.
    """
    learned = context.learned_posterior(settings.posterior)
    own_starts = settings.fusion is not None and settings.method.own_starts
    trainer: Any = context.module.trainer
    examples = any(getattr(each, "takes_single_gradients", False) for each in trainer.callbacks)
    loader.fill_scalers(context.module, collective, Door(settings.privacy, examples=examples))
    thaws = any(isinstance(each, BaseFinetuning) for each in trainer.callbacks)  # all of it trains in the end
    frozen = () if thaws else frozen_names(context.module)
    model = ResidentModel(context.module, settings.local_parameters, settings.buffers, learned, own_starts, frozen)
    if model.frozen_names:
        trained = sum(p.numel() for p in context.module.parameters() if p.requires_grad)
        all_ = sum(p.numel() for p in context.module.parameters())
        rank_zero_info(f"{trained:,} of {all_:,} parameters train; the rest stays where it is.")
    tell_of_single_examples(context.module, loader)
    tell_of_other_posteriors(context)
    needed = getattr(context.module, "federated_method", None)
    if settings.fusion is None and needed is not None:
        settings = replace(settings, fusion=needed)
    elif needed is not None and settings.method.name != needed:
        why = f"{type(context.module).__name__} federates by fusion='{needed}' alone; leave fusion= out"
        raise FederationError(f"fusion='{settings.method.name}': {why}")
    if settings.fusion is None:
        method, why = default_fusion(settings, model, len(loader.clients), trainer.callbacks)
        rank_zero_info(f"Fusion: {why}.")
        settings = replace(settings, fusion=method)
    if settings.privacy is not None:
        check_no_buffers(model.federated_buffers)
    engine = make_engine(settings, context, model, loader, writes=collective.rank == 0)
    try:
        engine.check_posterior()
        if settings.method.auto is not None:
            check_score(settings.method.auto, context.module)
        return Federation(settings, engine, collective, held_out)
    except BaseException:
        engine.states.close()
        raise


def tell_of_single_examples(module: L.LightningModule, loader: FederatedLoader) -> None:
    """Warn of clients with a last batch of one example, of which BatchNorm has no variance."""
    batching, clients = loader.batching, loader.clients
    norms = [each for each in module.modules() if isinstance(each, nn.BatchNorm1d) and each.training]
    if batching.drop_last or not any(each.weight is None or each.weight.requires_grad for each in norms):  # not frozen
        return
    one = [name for name, size in zip(clients.names, clients.sizes) if size % batching.batch_size == 1]
    if one:
        rank_zero_warn(
            f"the last batch of the clients {listed(one)} has one example, and BatchNorm needs more: where it fails, "
            "they are left out of every round. Give the loader drop_last=True or another batch_size"
        )


OTHERS = {
    "ivon": "fb.IVON(params, lr, hessian_init=..., curvature='ivon'), which takes the same steps",
    "torch_uncertainty": "fb.bayesianize(network), which has the same estimators",
    "pyro": "fb.bayesianize(network)",
    "tyxe": "fb.bayesianize(network)",
}
"""Packages with posteriors of their own → what to take in place of theirs."""


def tell_of_other_posteriors(context: TrainingContext) -> None:
    """Warn of posteriors by other packages, of which a federation averages the parameters as numbers."""
    for each in (*context.optimizers, *context.module.modules()):
        package = type(each).__module__.split(".")[0]
        if package in OTHERS and (package != "torch_uncertainty" or "Bayes" in type(each).__name__):
            rank_zero_warn(
                f"the posterior of {package}'s {type(each).__name__} is not known here: its parameters are averaged as "
                f"numbers, without variances. To federate a posterior take {OTHERS[package]}"
            )
            return


def make_engine(
    settings: FederationSettings,
    context: TrainingContext,
    model: ResidentModel,
    loader: FederatedLoader,
    *,
    writes: bool = True,
) -> Engine:
    """Return the engine that ``settings.engine`` names. For "auto" the faster one, with a line that says which.

    "auto" stacks the clients if the module allows it, a round has at least two of them, and a step of one client is at
    most :data:`LARGEST_STEP`. Raise CannotVectorize if "vectorized" is asked for and impossible.
    """
    name = "vectorized" if isinstance(settings.engine, int) else settings.engine
    options: dict[str, Any] = {"method": settings.method, "seed": settings.seed, "writes": writes}
    options |= {"keep_optimizer": context.keeps_state(settings), "keep_posteriors": settings.keeps_posteriors}
    options["folder"] = settings.kept.folder
    names, sizes = loader.clients.names, loader.clients.sizes
    one_by_one = partial(SequentialEngine, context, model, loader, is_alone=len(sizes) == 1, **options)
    if name == "sequential":
        return one_by_one()
    cohort = choose_cohort(0, len(sizes), settings.fraction, settings.seed)
    if settings.schedule is not None:
        cohort = cohort[: settings.schedule.together(len(sizes))[1]]  # so many start at once
    largest = sorted(cohort * 2, key=lambda number: -sizes[number])[:: 2 if len(cohort) > 1 else 1]
    pair = [Client(number, names[number], sizes[number], 0, i, 2) for i, number in enumerate(largest[:2])]
    device = "cpu" if context.device.type == "cpu" else "cuda"
    try:
        if name == "auto" and len(cohort) == 1:
            raise CannotVectorize("a round has one client")
        try:
            from lightning_fedbayes.clients.vectorized import VectorizedEngine, probe  # here: only when it is used
        except ImportError as missing:
            raise CannotVectorize(f"torch lacks a private name that stacking needs: {missing}") from missing
        still, all_ = (sum(p.numel() for p in each.values()) for each in (model.frozen, model.parameters))
        longest = (LARGEST_SHARED_STEP if still / max(all_, 1) >= MOSTLY_FROZEN else LARGEST_STEP)[device]
        probed = probe(context, model, loader, pair, longest if name == "auto" else float("inf"))
        if name == "auto" and context.is_coarse:
            raise CannotVectorize("in half precision a stack rounds otherwise than each client alone")
        most = max(1, STACK_BYTES[device] // max(probed.bytes_per_client, 1))
        at_once = settings.engine if isinstance(settings.engine, int) else most
        together = min(at_once, len(cohort))
        if name == "auto" and probed.flops > (longest if together > 1 else LARGEST_STEP[device]):
            raise CannotVectorize(f"a step is long ({probed.flops / 1e6:.0f} million operations), so it is faster")
    except CannotVectorize as reason:
        if name == "vectorized":
            why = f"{reason}. Use engine='auto' or 'sequential'"
            raise CannotVectorize(f"engine='vectorized' cannot be used: {why}") from reason
        rank_zero_info(f"Engine: sequential, because {reason}.")
        return one_by_one()
    rank_zero_info(f"Engine: vectorized, {together} clients at once.")
    return VectorizedEngine(context, model, loader, probed=probed, clients_at_once=at_once, **options)
