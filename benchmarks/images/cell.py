"""Network, partition, fusion rule and optimizer of a cell, made from its settings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lightning_fedbayes as fb
from benchmarks.images.data import Digits, make_data
from benchmarks.images.settings import Settings, called, parse_call
from benchmarks.networks import lenet, resnet20
from benchmarks.readers import ImageDataModule
from lightning_fedbayes.core.errors import FederationError, nearest
from lightning_fedbayes.data.partition import Partition
from lightning_fedbayes.fusion import FusionRule, SumRule
from lightning_fedbayes.fusion.registry import get_rule
from lightning_fedbayes.fusion.rule import Statistics, add
from lightning_fedbayes.methods import Method, get_method
from lightning_fedbayes.modules import mlp

PARTITIONS = {
    "iid": fb.IIDPartition,
    "classes": fb.ClassPartition,
    "dirichlet": fb.DirichletPartition,
    "dirichlet_per_client": lambda clients, alpha: fb.DirichletPartition(clients, alpha, per="client"),
}


def make_network(settings: Settings, data: ImageDataModule | Digits) -> nn.Module:
    """Return the deterministic network of a cell."""
    channels, size, _ = data.shape
    if isinstance(data, Digits):
        return mlp(channels * size * size, data.num_classes, hidden=(32, 32))
    if settings.network == "resnet20":
        return resnet20(channels, data.num_classes)
    return lenet(channels, data.num_classes, size)


def make_bayesian(settings: Settings, network: nn.Module, pretrained: bool = False) -> nn.Module:
    """Return ``network`` with the Bayesian layers or the dropout of a cell.

    Raises:
        ConversionError: more Bayesian layers than there are layers.
        FederationError: both Bayesian layers and dropout.
    """
    if settings.dropout > 0:
        if settings.bayesian_last != 0:
            raise FederationError(
                f"dropout={settings.dropout} and bayesian_last={settings.bayesian_last}: a network has Monte Carlo "
                "dropout or Bayesian layers; set bayesian_last to 0"
            )
        return fb.with_mc_dropout(network, settings.dropout)
    if settings.bayesian_last == 0:
        return network
    which: dict[str, Any] = {"last": settings.bayesian_last}
    if settings.bayesian_last == "all":
        which = {"types": [nn.Conv2d, nn.Linear]}
    if pretrained:
        which["init"] = "pretrained"
    elif settings.log_variance is not None:
        which["posterior_std"] = math.exp(settings.log_variance / 2)
    return fb.bayesianize(
        network,
        estimator=settings.estimator,  # type: ignore[arg-type]
        prior_std=settings.prior_std,
        bayesian_bias=settings.bayesian_bias,
        **which,
    )


def make_partition(settings: Settings) -> Partition:
    """Return the partition of a cell; raise FederationError for an unknown name."""
    name, positional, named = parse_call(settings.partition)
    if name not in PARTITIONS:
        raise FederationError(f"unknown partition '{name}'; {nearest(name, PARTITIONS)}")
    return called(PARTITIONS[name], settings.partition, settings.clients, *positional, **named)


def make_rule(text: str) -> str | FusionRule | Method:
    """Return the fusion rule of a cell, or its method; raise FusionError for an unknown name."""
    if text == "auto":
        return text
    name, positional, named = parse_call(text)
    if name == "normalised_weighted_sum":
        kind: Any = NormalisedWeightedSum
    else:
        found = get_method(name)
        kind = type(get_rule(name) if isinstance(found, fb.methods.Averaging) else found)
    return called(kind, text, *positional, **named)


def make_federation(settings: Settings) -> fb.FederatedBayes:
    """Return the callback of a cell."""
    rule: Any = make_rule(settings.fusion)
    return fb.FederatedBayes(
        make_partition(settings),
        local_epochs=settings.local_epochs,
        weighting=settings.weighting,
        seed=settings.seed,
        fusion=rule if settings.prior == "fixed" else fb.methods.Averaging(rule, "global"),
    )


def make_optimizer(settings: Settings, network: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a cell."""
    if settings.optimizer == "ivon":
        published: dict[str, Any] = (
            {}
            if settings.hessian_init is None
            else {
                "hessian_init": settings.hessian_init,
                "betas": (settings.momentum, settings.curvature_decay),
                "curvature": "ivon",
            }
        )
        return fb.IVON(
            network.parameters(),
            settings.learning_rate,
            prior_std=settings.prior_std,
            temperature=settings.kl_weight,
            **published,
        )
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.optimizer == "adam":
        return torch.optim.Adam(network.parameters(), **options)
    return torch.optim.SGD(network.parameters(), momentum=settings.momentum, **options)


def check(settings: Settings, folder: Path | None) -> None:
    """Raise the package's errors for a cell that cannot be trained, without training it."""
    data = make_data(settings, folder)
    make_federation(settings)
    make_optimizer(settings, make_bayesian(settings, make_network(settings, data)))
    if settings.fusion == "auto" and not settings.validation_fraction:
        raise FederationError("fusion='auto' chooses on validation images: set validation_fraction, such as 0.1")


class NormalisedWeightedSum(SumRule):
    r"""Weighted sum with the variance in the code of [BA-BFL], :math:`\sum\omega^2\sigma_k^2 / \sum\omega^2`.

    Unlike ``weighted_sum`` it does not divide the variance by the number of clients.
    """

    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        """Add the mean and the variance of a client."""
        add(statistics, "weight", mean.new_tensor(weight))
        add(statistics, "squares", mean.new_tensor(weight * weight))
        add(statistics, "mean", mean, weight)
        add(statistics, "variance", variance, weight * weight)

    def compute(
        self, statistics: Statistics, like: fb.GaussianPosterior, previous: fb.GaussianPosterior | None
    ) -> tuple[Tensor, Tensor]:
        """Return the fused mean and variance."""
        return statistics["mean"] / statistics["weight"], statistics["variance"] / statistics["squares"]
