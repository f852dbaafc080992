"""Context managers that change how a whole network samples, and change it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import nn

from lightning_fedbayes.layers.base import BayesianAffine, BayesianLayer, check_estimator
from lightning_fedbayes.layers.dropout import MCDropout
from lightning_fedbayes.layers.functional import Estimator
from lightning_fedbayes.layers.sites import sites_of


@contextmanager
def mean_only(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` runs at its posterior mean: no noise, no dropout, the cost of the deterministic network.

    A bayesian-torch layer has no such mode; it runs with σ = 0, which gives the same output at its usual cost.

    >>> layer = MCDropout(0.5)
    >>> with mean_only(layer):
    ...     layer(torch.ones(3))
    tensor([1., 1., 1.])
    """
    switched = [m for m in module.modules() if isinstance(m, BayesianLayer | MCDropout)]
    before = [m.mean_only for m in switched]
    foreign = [site for m in module.modules() if isinstance(m, BaseVariationalLayer_)
               and not isinstance(m, BayesianLayer) for site in sites_of(m)]
    rhos = [site.layer._parameters[site.rho_name] for site in foreign]
    try:
        for m in switched:
            m.mean_only = True
        for site in foreign:
            zero_std = torch.full((), -torch.inf, dtype=site.rho.dtype, device=site.rho.device)
            site.layer._parameters[site.rho_name] = zero_std.expand(site.rho.shape)  # pyright: ignore
        yield
    finally:
        for m, value in zip(switched, before):
            m.mean_only = value
        for site, rho in zip(foreign, rhos):
            site.layer._parameters[site.rho_name] = rho


@contextmanager
def use_estimator(module: nn.Module, name: Estimator) -> Iterator[None]:
    """Inside, the linear and convolutional layers of ``module`` use the estimator ``name``.

    :class:`~lightning_fedbayes.layers.Reparameterized` modules and bayesian-torch layers know one estimator only and
    keep it.

    Args:
        module: any network.
        name: "reparameterization", "local_reparameterization" or "flipout".

    Raises:
        ConversionError: ``name`` is no estimator.
    """
    name = check_estimator(name)
    switched = [m for m in module.modules() if isinstance(m, BayesianAffine)]
    before: list[Estimator] = [m.estimator for m in switched]
    try:
        for m in switched:
            m.estimator = name
        yield
    finally:
        for m, value in zip(switched, before):
            m.estimator = value
