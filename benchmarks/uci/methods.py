"""Methods: each trains all splits of a data set once and returns one or several rows of the tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

import lightning_fedbayes as fb
from benchmarks.uci.data import Splits, deal
from benchmarks.uci.network import networks, two_headed, variational
from benchmarks.uci.training import Plan, federate, predictions, regressor

ADAM_RATE = 1e-3
SAMPLES = 50
MEMBERS = 5

Prediction = tuple[Tensor, Tensor]
"""Mean and variance of the standardised target, shape (examples, splits)."""


class Outcome(NamedTuple):
    """Result of a method.

    Attributes:
        predictions: row → its prediction of the test examples.
        seconds: of training.
        upload: bytes that a client sends per round.
        engine: name of the engine.
        rounds: of communication.
    """

    predictions: Mapping[str, Prediction]
    seconds: float
    upload: int
    engine: str
    rounds: int


def upload(module: torch.nn.Module, splits: Splits) -> int:
    """Return the bytes of the parameters of one split's model."""
    return sum(parameter.numel() for parameter in module.parameters()) // splits.number * 4


def linear(splits: Splits, plan: Plan) -> Outcome:
    """FedAG without hidden layer: one round, and the closed form (6) with two readings of its noise."""
    module = regressor(networks(splits.number, splits.features, 0), splits, plan)
    federation, seconds = federate(module, splits, plan, rounds=1)
    inputs, posterior = splits.test[0], federation.posterior
    mean, variance = ({name.removeprefix("network.0."): part for name, part in each.items() if "network" in name}
                      for each in (posterior.mean, posterior.variance))
    with torch.no_grad():
        means = (inputs * mean["weight"]).sum(-1) + mean["bias"]
        spread = (inputs.square() * variance["weight"]).sum(-1) + variance["bias"]
        rows = {"fedag_linear": (means, spread + module.noise_variance), "fedag_linear_target": (means, spread + 1)}
    return Outcome(rows, seconds, upload(module, splits), engine(federation), 1)


def network(splits: Splits, plan: Plan) -> Outcome:
    """FedAG with one hidden layer: the bootstrap, without noise as published, and with the residual variance."""
    module = regressor(networks(splits.number, splits.features, plan.hidden), splits, plan)
    federation, seconds = federate(module, splits, plan, plan.rounds)
    mean, noise, spread = predictions(module, splits.test[0])
    rows = {"fedag": (mean, spread), "fedag_noise": (mean, noise + spread)}
    return Outcome(rows, seconds, upload(module, splits), engine(federation), plan.rounds)


def mean_variance(splits: Splits, plan: Plan) -> Outcome:
    """FedAG whose clients' networks predict mean and variance; the mixture of the ten clients predicts."""
    module = fb.DeepEnsembleRegressor(
        [two_headed(splits.number, splits.features, plan.hidden)], learning_rate=ADAM_RATE
    )
    module.predictive = "bootstrap"
    federation, seconds = federate(module, splits, plan, plan.rounds)
    mean, noise, spread = predictions(module, splits.test[0])
    rows = {"mean_variance": (mean, noise + spread)}
    return Outcome(rows, seconds, upload(module, splits), engine(federation), plan.rounds)


def ensemble(splits: Splits, plan: Plan) -> Outcome:
    """Deep ensembles: five networks per client that predict mean and variance, averaged member by member."""
    members = [two_headed(splits.number, splits.features, plan.hidden) for _ in range(MEMBERS)]
    module = fb.DeepEnsembleRegressor(members, learning_rate=ADAM_RATE)
    federation, seconds = federate(module, splits, plan, plan.rounds, "weighted_average")
    mean, noise, spread = predictions(module, splits.test[0])
    return Outcome(
        {"ensemble": (mean, noise + spread)}, seconds, upload(module, splits), engine(federation), plan.rounds
    )


def mean_field(fusion: str, row: str) -> Callable[[Splits, Plan], Outcome]:
    """Mean-field variational clients, noise learnt; each has a tenth of the prior, so that all together have one."""

    def run(splits: Splits, plan: Plan) -> Outcome:
        module = fb.HybridBayesianRegressor(
            variational(splits.number, splits.features, plan.hidden), noise="learnt", noise_std=0.5,
            targets=splits.number, samples=SAMPLES, learning_rate=ADAM_RATE, kl_weight=0.1,
        )
        federation, seconds = federate(module, splits, plan, plan.rounds, fusion)
        mean, noise, spread = predictions(module, splits.test[0])
        rows = {row: (mean, noise + spread)}
        return Outcome(rows, seconds, upload(module, splits), engine(federation), plan.rounds)

    return run


def pooled_linear(splits: Splits, plan: Plan) -> Outcome:
    """Bayesian linear regression in closed form; the clients' sums give the posterior of the pooled data."""
    start = time.perf_counter()
    clients = [dataset.tensors for dataset in deal(splits.train, plan.seed).datasets]  # type: ignore[attr-defined]
    columns = []
    for split in range(splits.number):
        shards = [fb.BayesianLinearRegression.fit(x[:, split], y[:, split]) for x, y in clients]
        prediction = fb.BayesianLinearRegression.conflate(shards).predict(splits.test[0][:, split])
        columns.append((prediction.mean[:, 0], prediction.variance[:, 0]))
    mean, variance = (torch.stack(each, 1) for each in zip(*columns))
    size = splits.features + 1
    sent = 8 * (size * (size + 1) // 2 + size + 1)
    return Outcome({"blr": (mean, variance)}, time.perf_counter() - start, sent, "closed form", 1)


def engine(federation: fb.FederatedBayes) -> str:
    """Return the name of the engine."""
    return str(federation.described()["engine"])


METHODS: dict[str, Callable[[Splits, Plan], Outcome]] = {
    "blr": pooled_linear,
    "linear": linear,
    "network": network,
    "mean_variance": mean_variance,
    "ensemble": ensemble,
    "vi_rklb": mean_field("reverse_kl_barycenter", "vi_rklb"),
    "vi_wb": mean_field("wasserstein_barycenter", "vi_wb"),
    "vi_lp": mean_field("linear_pool", "vi_lp"),
}
TITLES = {
    "blr": "BLR, t = 1",
    "fedag_linear": "FedAG linear, t = 1",
    "fedag_linear_target": "FedAG linear, noise = target variance",
    "fedag": "FedAG network, t = 5",
    "fedag_noise": "FedAG network + residual noise",
    "mean_variance": "FedAG of mean-variance networks",
    "ensemble": "deep-ensemble clients",
    "vi_rklb": "VI, reverse KL barycenter",
    "vi_wb": "VI, Wasserstein barycenter",
    "vi_lp": "VI, linear pool",
}
"""Row → its title."""
