"""Which engine trains the clients, and why."""

from __future__ import annotations

from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from lightning_fedbayes.engines.client import Client
from lightning_fedbayes.engines.engine import Engine
from lightning_fedbayes.engines.loader import FederatedLoader
from lightning_fedbayes.engines.plan import choose_cohort
from lightning_fedbayes.engines.sequential import SequentialEngine
from lightning_fedbayes.engines.state import ResidentModel
from lightning_fedbayes.engines.vectorized import VectorizedEngine
from lightning_fedbayes.engines.vectorized.reasons import CannotVectorize
from lightning_fedbayes.engines.vectorized.trial import Trial, try_two_clients

EngineName = Literal["auto", "sequential", "vectorized"]

LARGEST_STEP = {"cpu": 30e6, "cuda": 30e9}
"""Floating-point operations of one client's step up to which stacking pays, by type of device: above, the arithmetic
takes longer than what one by one would cost in calls."""

STACK_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}
"""Memory for a stack of clients, by type of device. It is fixed, not what happens to be free, so that the number of
clients in a stack, on which the noise depends, is the same on every machine."""


def make_engine(
    name: EngineName, trainer: L.Trainer, model: ResidentModel, loader: FederatedLoader,
    clients_at_once: int | None, **options: Any,
) -> Engine:
    """The engine called ``name``; for "auto" the faster one, by a rule, with a line that says which.

    "auto" stacks the clients if the module allows it, a round has at least two of them, and a step of one client is
    at most :data:`LARGEST_STEP`.

    Args:
        name: "auto", "sequential" or "vectorized".
        trainer: in ``fit``, with its optimizers.
        model: the resident network.
        loader: the federation's loader.
        clients_at_once: most clients in a stack; None: as many as :data:`STACK_BYTES` hold.
        options: ``optimizer_state`` and ``seed`` of the engine.

    Raises:
        CannotVectorize: "vectorized" is asked for and impossible.
    """
    names, sizes = loader.clients.names, loader.clients.sizes
    if name == "sequential":
        return SequentialEngine(trainer, model, names, sizes, **options)
    cohort = choose_cohort(0, len(sizes), loader.batching.fraction, loader.batching.seed)
    largest = sorted(cohort * 2, key=lambda number: -sizes[number])[:: 2 if len(cohort) > 1 else 1]
    pair = [Client(number, names[number], sizes[number], 0, i, 2) for i, number in enumerate(largest[:2])]
    device = trainer.strategy.root_device.type
    try:
        if name == "auto" and len(cohort) == 1:
            raise CannotVectorize("a round has one client")
        trial = try_two_clients(trainer, model, loader, pair)
        if name == "auto" and trial.flops > LARGEST_STEP.get(device, LARGEST_STEP["cuda"]):
            raise CannotVectorize(f"a step is long ({trial.flops / 1e6:.0f} million operations), so it is faster")
    except CannotVectorize as reason:
        if name == "vectorized":
            raise CannotVectorize(
                f"engine='vectorized' cannot be used: {reason}. Use engine='auto' or 'sequential'"
            ) from reason
        rank_zero_info(f"Engine: sequential, because {reason}.")
        return SequentialEngine(trainer, model, names, sizes, **options)
    at_once = clients_at_once or clients_that_fit(trial, STACK_BYTES.get(device, STACK_BYTES["cuda"]))
    rank_zero_info(f"Engine: vectorized, {min(at_once, len(cohort))} clients at once.")
    return VectorizedEngine(
        trainer, model, names, sizes, trial=trial, loader=loader, clients_at_once=at_once, **options
    )


def clients_that_fit(trial: Trial, available: int) -> int:
    """How many clients a stack of ``available`` bytes holds, at least 1."""
    return max(1, available // max(trial.bytes_per_client, 1))
