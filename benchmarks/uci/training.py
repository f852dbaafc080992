"""Federated training of all splits at once, by the package's public names."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_fedbayes as fb
from benchmarks.uci.data import CLIENTS, Splits, deal

EVALUATION_BATCH = 256


class Plan(NamedTuple):
    """Settings of the training on a data set.

    Attributes:
        rate: of the optimizer; for SGD a tensor, shape (copies,), for one rate per copy.
        rounds: communication rounds of networks; the linear model has one.
        local_epochs: passes over a client's data per round, E.
        hidden: units of the hidden layer.
        seed: of shards, initial values and the order of the examples.
        on_round: called after every round.
        clients: that the training examples are dealt out to.
    """

    rate: float | Tensor
    rounds: int = 5
    local_epochs: int = 40
    hidden: int = 50
    seed: int = 0
    on_round: Callable[[], Any] = lambda: None
    clients: int = CLIENTS

    @property
    def batch_size(self) -> int:
        """Examples of a step: all clients together see ten, however many they are."""
        return CLIENTS // self.clients

    def pooled(self) -> Plan:
        """Return the plan with the data in one place: as many steps and gradients as the ten clients take."""
        return self._replace(clients=1)


class RatedRegressor(fb.HybridBayesianRegressor):
    """Copies with one learning rate each: under SGD of rate 1, the factor of a copy's squared error is its rate.

    A copy that has diverged (an error beyond a thousand standard deviations) is no longer trained, so that it does not
    affect the others.
    """

    def __init__(self, network: torch.nn.Module, rates: Tensor, **options: Any) -> None:
        super().__init__(network, **options)
        self.rates = rates

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        root = self.rates.sqrt()
        outputs = torch.where((targets - outputs).abs() < 1e3, outputs, targets)
        return super().negative_log_likelihood(root * outputs, root * targets)

    @property
    def noise_variance(self) -> Tensor:
        return super().noise_variance / self.rates


def regressor(network: torch.nn.Module, splits: Splits, plan: Plan) -> fb.HybridBayesianRegressor:
    """Return a module that minimises the squared error by SGD, as in [FedAG], and tracks the residual variance."""
    options = {"noise": "residual", "targets": splits.number, "predictive": "bootstrap", "scaler": False}
    if isinstance(plan.rate, Tensor):
        optimizer = functools.partial(torch.optim.SGD, lr=1.0)
        return RatedRegressor(network, plan.rate, optimizer=optimizer, **options)
    return fb.HybridBayesianRegressor(network, optimizer=functools.partial(torch.optim.SGD, lr=plan.rate), **options)


class AfterRound(L.Callback):
    """Callback that calls a function after every round."""

    def __init__(self, what: Callable[[], Any]) -> None:
        self.what = what

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.what()


def federate(
    module: L.LightningModule, splits: Splits, plan: Plan, fusion: str = "gaussian_fit"
) -> tuple[fb.FederatedBayes, float]:
    """Train ``module`` on all clients of the plan. Return the federation and the seconds.

    A client that has all data goes on with its optimizer from round to round, as without a federation.
    """
    federation = fb.FederatedBayes(
        local_epochs=plan.local_epochs,
        fusion=fusion,
        weighting="equal",
        seed=plan.seed,
        keep=["optimizer"] if plan.clients == 1 else (),
    )
    loader = DataLoader(deal(splits.train, plan.seed, plan.clients), batch_size=plan.batch_size, shuffle=True)
    trainer = L.Trainer(
        max_epochs=plan.rounds,
        accelerator="cpu",
        logger=False,
        callbacks=[federation, AfterRound(plan.on_round)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.perf_counter()
    trainer.fit(module, loader)
    module.eval()
    return federation, time.perf_counter() - start


@torch.no_grad()
def predictions(module: Any, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return predictive mean, aleatoric and epistemic variance, shape (examples, splits) each."""
    parts = [module.predict_step(batch) for batch in inputs.split(EVALUATION_BATCH)]
    return tuple(torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "aleatoric", "epistemic"))  # type: ignore[return-value]
