"""Loss of a module on held-out data, by which an AutoFusion chooses between rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lightning_fedbayes.clients.evaluation import nll_of, predicted
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.core.seeding import derive_seed, seed_everything
from lightning_fedbayes.fusion.auto import AutoFusion, Score
from lightning_fedbayes.layers import evaluation_mode
from lightning_fedbayes.metrics.likelihoods import examples_in
from lightning_fedbayes.modules import BayesianModule


def check_score(auto: AutoFusion, module: L.LightningModule) -> None:
    """Raise FederationError if ``auto`` does not know how to score ``module``."""
    if auto.score is None and not isinstance(module, BayesianModule):
        raise FederationError(
            f"fusion='auto' does not know how to score a {type(module).__name__}: pass "
            "AutoFusion(score=lambda module, batch: ...), the mean loss of the module on a batch"
        )


def held_out_loss(
    module: L.LightningModule, batches: Iterable[Any], score: Score | None, seed: int, round: int
) -> float:
    """Return the mean loss of ``module`` over ``batches``, with the same noise for every candidate of a round."""
    total, count = 0.0, 0
    context = module.trainer.precision_plugin.forward_context
    with evaluation_mode(module), torch.no_grad(), torch.random.fork_rng(), context():
        seed_everything(derive_seed(seed, "validation", round))
        for batch in batches:
            size = extract_batch_size(batch)
            total += float((score or predictive_nll)(module, batch)) * size
            count += size
    return total / count if count else math.nan


def own_hook(module: L.LightningModule) -> Callable[..., None] | None:
    """Return the hook of our modules that takes a candidate's posterior; None for other modules.

    A user's ``on_round_end`` is called only once, with the posterior of the chosen rule.
    """
    return partial(BayesianModule.on_round_end, module) if isinstance(module, BayesianModule) else None


def predictive_nll(module: L.LightningModule, batch: Any) -> Tensor:
    """Return the negative log-likelihood, per example in nats, of the module's ``predict_step`` on a batch."""
    rows = predicted(module, batch)
    return nll_of(rows).sum() / examples_in(rows)


@contextmanager
def kept_attributes(module: object, *names: str) -> Iterator[None]:
    """Restore the attributes ``names`` of ``module`` at the end, whatever happens inside."""
    kept = {name: getattr(module, name) for name in names if hasattr(module, name)}
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
