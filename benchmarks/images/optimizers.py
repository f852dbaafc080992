"""The optimizer of a cell."""

from __future__ import annotations

from typing import Any

import torch
from settings import Settings, called, parse_call
from torch import nn

from lightning_fedbayes.errors import FederationError, nearest
from lightning_fedbayes.layers.sites import gaussian_sites

OPTIMIZERS = ("sgd", "adam")


def make_optimizer(settings: Settings, network: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a cell; FederationError for an unknown name or a bad argument."""
    name, positional, named = parse_call(settings.optimizer)
    if name not in OPTIMIZERS:
        raise FederationError(f"unknown optimizer '{name}'; {nearest(name, OPTIMIZERS)}")
    groups = called(parameter_groups, settings.optimizer, settings, network, *positional, **named)
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if name == "adam":
        return torch.optim.Adam(groups, **options)
    return torch.optim.SGD(groups, momentum=settings.momentum, **options)


def parameter_groups(settings: Settings, network: nn.Module, rho_rate: float | None = None) -> list[dict[str, Any]]:
    """All parameters in one group, or the ρ of the Bayesian layers in another.

    Args:
        settings: of the cell.
        network: with or without Bayesian layers.
        rho_rate: learning rate of ρ as a multiple of the others', then without weight decay: that pulls ρ to 0, which
            is σ = 0.69, and under a tempered KL it would outweigh the prior. None: ρ is trained as all parameters.
    """
    parameters = list(network.parameters())
    if rho_rate is None:
        return [{"params": parameters}]
    if not isinstance(rho_rate, int | float) or not rho_rate > 0:
        raise FederationError(f"'{settings.optimizer}': rho_rate={rho_rate!r} has to be positive")
    rhos = {id(site.rho): site.rho for site in gaussian_sites(network).values()}
    others = [parameter for parameter in parameters if id(parameter) not in rhos]
    fast = {"params": list(rhos.values()), "lr": rho_rate * settings.learning_rate, "weight_decay": 0.0}
    return [{"params": others}, fast] if rhos else [{"params": others}]
