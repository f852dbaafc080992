"""Draws of a network's parameters from a posterior or from clients, and what the network makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_fedbayes.errors import PosteriorError
from lightning_fedbayes.layers import mean_only
from lightning_fedbayes.layers.sites import gaussian_sites
from lightning_fedbayes.posterior import GaussianPosterior, is_zero

ParameterSets = dict[str, Tensor]
"""Name in the posterior → values of shape (sets, *shape)."""


def draws_from_posterior(
    posterior: GaussianPosterior, draws: int, generator: torch.Generator | None = None
) -> ParameterSets:
    r"""Independent draws of all parameters, :math:`\theta_m \sim N(\mu, \mathrm{diag}(\sigma^2))`.

    [FedAG] calls predictions with them ordinary Monte Carlo (OMC).

    Args:
        posterior: the global posterior; deterministic parameters are the same in every draw.
        draws: number of draws M.
        generator: where the noise comes from; None: the global one.
    """
    sets = {}
    for name, mean in posterior.mean.items():
        values = mean.expand(draws, *mean.shape)
        if not is_zero(posterior.variance[name]):
            noise = torch.randn(values.shape, generator=generator, dtype=mean.dtype, device=mean.device)
            values = mean + posterior.variance[name].sqrt() * noise
        sets[name] = values
    return sets


def draws_from_clients(clients: Sequence[GaussianPosterior]) -> ParameterSets:
    """The clients themselves as draws, one each: their means if they are deterministic, else a draw of each.

    [FedAG] calls this the non-parametric bootstrap.
    """
    parts = [client.sample() for client in clients]
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def outputs_with(network: nn.Module, sets: ParameterSets, inputs: Tensor) -> Tensor:
    """The network's output with each set of parameters, all in one pass.

    Args:
        network: maps ``inputs`` to a tensor; its own noise (Bayesian layers, Monte Carlo dropout) is off.
        sets: see :data:`ParameterSets`; parameters that are not named keep their value.
        inputs: shape (batch, *).

    Returns: shape (sets, batch, *).

    Raises:
        PosteriorError: a name that the network does not have.
    """
    paths = parameter_paths(network)
    unknown = sorted(sets.keys() - paths.keys())
    if unknown:
        raise PosteriorError(f"the network has no parameter {', '.join(unknown)}: the posterior is of another network")
    values = {paths[name]: value for name, value in sets.items()}

    def forward(parameters: Mapping[str, Tensor]) -> Tensor:
        output = torch.func.functional_call(network, dict(parameters), (inputs,))
        return output[0] if isinstance(output, tuple) else output

    with mean_only(network):
        return torch.func.vmap(forward)(values)


def parameter_paths(network: nn.Module) -> dict[str, str]:
    """Name in the posterior → path of the parameter that holds the mean."""
    paths = {name: name for name, _ in network.named_parameters()}
    objects = {id(parameter): name for name, parameter in network.named_parameters()}
    for name, site in gaussian_sites(network).items():
        paths[name] = objects[id(site.mean)]
    return paths


def within(posterior: GaussianPosterior, prefix: str) -> GaussianPosterior:
    """The part of ``posterior`` whose names begin with ``prefix``, without it."""
    names = [name for name in posterior.names if name.startswith(prefix)]
    return GaussianPosterior(
        {name.removeprefix(prefix): posterior.mean[name] for name in names},
        {name.removeprefix(prefix): posterior.variance[name] for name in names},
    )
