"""Methods: each trains all splits of a data set once and returns one or several rows of the tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn

import lightning_fedbayes as fb
from benchmarks.uci.data import Splits, deal
from benchmarks.uci.network import networks, two_headed, variational
from benchmarks.uci.training import Plan, federate, predictions, regressor

SAMPLES = 50
MEMBERS = 5

Prediction = tuple[Tensor, Tensor]
"""Mean and variance of the standardised target, shape (examples, splits)."""


class Outcome(NamedTuple):
    """Result of a method.

    Attributes:
        by_round: predictions of the test examples after every round: row → prediction.
        seconds: of training.
        upload: bytes that a client sends per round.
        engine: name of the engine.
    """

    by_round: list[dict[str, Prediction]]
    seconds: float
    upload: int
    engine: str

    @property
    def predictions(self) -> dict[str, Prediction]:
        """Row → its prediction after the last round."""
        return self.by_round[-1]


def upload(module: nn.Module, splits: Splits, plan: Plan) -> int:
    """Return the bytes of the parameters of one split's model; 0 where the data are in one place."""
    return sum(parameter.numel() for parameter in module.parameters()) // splits.number * 4 * (plan.clients > 1)


def linear(splits: Splits, plan: Plan) -> Outcome:
    """FedAG without hidden layer: one round, and the closed form (6) with two readings of its noise."""
    module = regressor(networks(splits.number, splits.features, 0), splits, plan)
    federation, seconds = federate(module, splits, plan._replace(rounds=1))
    inputs, posterior = splits.test[0], federation.posterior
    mean, variance = (
        {name.removeprefix("network.0."): part for name, part in each.items() if "network" in name}
        for each in (posterior.mean, posterior.variance)
    )
    with torch.no_grad():
        means = (inputs * mean["weight"]).sum(-1) + mean["bias"]
        spread = (inputs.square() * variance["weight"]).sum(-1) + variance["bias"]
        rows = {"fedag_linear": (means, spread + module.noise_variance), "fedag_linear_target": (means, spread + 1)}
    return Outcome([rows], seconds, upload(module, splits, plan), engine(federation))


def by_rounds(module: L.LightningModule, splits: Splits, plan: Plan, fusion: str, **rows: bool) -> Outcome:
    """Train ``module`` and predict after every round.

    Args:
        fusion: rule.
        rows: row → whether its variance is that of the noise and of the draws together, or of the draws alone.
    """
    found: list[dict[str, Prediction]] = []

    def after_round() -> None:
        mean, noise, spread = predictions(module, splits.test[0])
        found.append({row: (mean, noise + spread if is_noisy else spread) for row, is_noisy in rows.items()})
        plan.on_round()

    federation, seconds = federate(module, splits, plan._replace(on_round=after_round), fusion)
    sent = upload(module, splits, plan)
    if fusion == "sites":  # more than a posterior
        sent = round(1e6 * federation.history[-1]["megabytes_up"] / plan.clients / splits.number)
    return Outcome(found, seconds, sent, engine(federation))


def network(splits: Splits, plan: Plan) -> Outcome:
    """FedAG with one hidden layer: the bootstrap, without noise as published, and with the residual variance."""
    module = regressor(networks(splits.number, splits.features, plan.hidden), splits, plan)
    return by_rounds(module, splits, plan, "gaussian_fit", fedag=False, fedag_noise=True)


def mean_variance(splits: Splits, plan: Plan) -> Outcome:
    """FedAG whose clients' networks predict mean and variance; the mixture of the ten clients predicts."""
    module = ensemble_of(1, splits, plan)
    module.predictive = "bootstrap"
    return by_rounds(module, splits, plan, "gaussian_fit", mean_variance=True)


def ensemble(splits: Splits, plan: Plan) -> Outcome:
    """Deep ensembles: five networks per client that predict mean and variance, averaged member by member."""
    return by_rounds(ensemble_of(MEMBERS, splits, plan), splits, plan, "weighted_average", ensemble=True)


def pooled_ensemble(splits: Splits, plan: Plan) -> Outcome:
    """Deep ensemble of five networks on the pooled data."""
    module = ensemble_of(MEMBERS, splits, plan)
    return by_rounds(module, splits, plan.pooled(), "weighted_average", deep_ensemble=True)


def ensemble_of(members: int, splits: Splits, plan: Plan) -> fb.modules.DeepEnsembleRegressor:
    """Return networks that predict mean and variance."""
    each = [two_headed(splits.number, splits.features, plan.hidden) for _ in range(members)]
    return fb.modules.DeepEnsembleRegressor(each, learning_rate=float(plan.rate), scaler=False)


def noisy(network: nn.Module, splits: Splits, **options: Any) -> fb.HybridBayesianRegressor:
    """Return a module that learns the noise of every split."""
    return fb.HybridBayesianRegressor(
        network, noise="learnt", noise_std=0.5, targets=splits.number, samples=SAMPLES, scaler=False, **options
    )


def mean_field(row: str, fusion: str, is_pooled: bool = False, **options: Any) -> Callable[[Splits, Plan], Outcome]:
    """Mean-field variational networks of prior N(0, 1), fused by a rule, or trained on the pooled data."""

    def run(splits: Splits, plan: Plan) -> Outcome:
        layers = variational(splits.number, splits.features, plan.hidden)
        module = noisy(layers, splits, learning_rate=float(plan.rate), **options)
        return by_rounds(module, splits, plan.pooled() if is_pooled else plan, fusion, **{row: True})

    return run


def ivon_sites(splits: Splits, plan: Plan) -> Outcome:
    """Networks without Bayesian layers whose posterior IVON learns, by sites; the noise is a point mass."""

    layers = networks(splits.number, splits.features, plan.hidden)
    module = noisy(layers, splits, optimizer=partial(fb.IVON, lr=float(plan.rate)), predictive="omc")
    return by_rounds(module, splits, plan, "sites", ivon_sites=True)


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
    return Outcome([{"blr": (mean, variance)}], time.perf_counter() - start, sent, "closed form")


def engine(federation: fb.FederatedBayes) -> str:
    """Return the name of the engine."""
    return str(federation.described()["engine"])


TENTH: dict[str, Any] = {"kl_weight": 0.1}
"""Part of the prior that each of ten clients has, so that all together have one."""
METHODS: dict[str, Callable[[Splits, Plan], Outcome]] = {
    "blr": pooled_linear,
    "linear": linear,
    "network": network,
    "mean_variance": mean_variance,
    "vi": mean_field("vi", "weighted_average", is_pooled=True),
    "deep_ensemble": pooled_ensemble,
    "sites": mean_field("sites", "sites"),
    "ivon_sites": ivon_sites,
    "population": mean_field("population", "population", predictive="bootstrap"),
    "ensemble": ensemble,
    "vi_rklb": mean_field("vi_rklb", "reverse_kl_barycenter", **TENTH),
    "vi_wb": mean_field("vi_wb", "wasserstein_barycenter", **TENTH),
    "vi_lp": mean_field("vi_lp", "linear_pool", **TENTH),
}
ROWS = {"linear": ("fedag_linear", "fedag_linear_target"), "network": ("fedag", "fedag_noise")}
"""Method → its rows, where they have other names than the method."""
TITLES = {
    "blr": "BLR, t = 1",
    "fedag_linear": "FedAG linear, t = 1",
    "fedag_linear_target": "FedAG linear, noise = target variance",
    "fedag": "FedAG network, t = 5",
    "fedag_noise": "FedAG network + residual noise",
    "mean_variance": "FedAG of mean-variance networks",
    "vi": "VI, pooled",
    "deep_ensemble": "deep ensemble, pooled",
    "sites": "sites",
    "ivon_sites": "IVON + sites",
    "population": "population",
    "ensemble": "deep-ensemble clients",
    "vi_rklb": "VI, reverse KL barycenter",
    "vi_wb": "VI, Wasserstein barycenter",
    "vi_lp": "VI, linear pool",
}
"""Row → its title."""
