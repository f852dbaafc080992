"""Predictive distribution: parameters drawn from the layers, the global posterior or the clients, or a closed form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fedbayes.core.errors import FedBayesError, check_choice
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.modules.sampling import within

Predictive = Literal["layers", "omc", "bootstrap", "closed_form"]
PREDICTIVES: tuple[Predictive, ...] = ("layers", "omc", "bootstrap", "closed_form")

NETWORK = "network."
"""Prefix of a network's parameters in the posterior of its module."""


@dataclass
class GlobalRound:
    """Result of a finished round, as far as predictions need it.

    Args:
        posterior: the global posterior.
        clients: the clients' updates, if the module asked for them.
    """

    posterior: GaussianPosterior | None = None
    clients: list[GaussianPosterior] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values from which :meth:`from_state_dict` rebuilds this."""
        assert self.posterior is not None
        return {"posterior": self.posterior.state_dict(), "clients": [each.state_dict() for each in self.clients]}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> GlobalRound:
        """Rebuild the round that :meth:`state_dict` stored."""
        restore = GaussianPosterior.from_state_dict
        return cls(restore(state["posterior"]), [restore(each) for each in state["clients"]])


def check_predictive(predictive: str, network: nn.Module) -> None:
    """Raise FedBayesError unless ``predictive`` is known and the network allows it."""
    check_choice("predictive", predictive, PREDICTIVES, error=FedBayesError)
    if predictive == "closed_form":
        linear_layer(network)


def linear_layer(network: nn.Module) -> tuple[str, nn.Linear]:
    """Path and layer of a network that is one linear layer, whose predictive distribution has a closed form.

    Raises:
        FedBayesError: the network is something else.
    """
    holders = [(path, each) for path, each in network.named_modules() if any(True for _ in each.parameters(False))]
    if len(holders) == 1 and _is_nothing_else(network):
        path, layer = holders[0]
        assert isinstance(layer, nn.Linear)
        return path, layer
    raise FedBayesError(
        f"predictive='closed_form' is for a network that is one nn.Linear, not {type(network).__name__}: the variance "
        "of any other network has no closed form; use 'omc' or 'bootstrap'"
    )


def _is_nothing_else(network: nn.Module) -> bool:
    """True if ``network`` is a linear layer, or a Sequential that holds nothing else."""
    return type(network) is nn.Linear or (
        type(network) is nn.Sequential and len(network) == 1 and _is_nothing_else(network[0])
    )


def linear_moments(network: nn.Module, posterior: GaussianPosterior, inputs: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean and variance of a linear model's output under a mean-field posterior.

    .. math:: \mu_w^\top x + \mu_b, \qquad \sum_i \sigma_{w,i}^2 x_i^2 + \sigma_b^2

    Args:
        network: see :func:`linear_layer`.
        posterior: of the module that holds the network under the name "network".
        inputs: shape (batch, features).

    Returns: shape (batch, targets) each.

    Source: [FedAG] eq. (6), without the noise 1/β.
    """
    path, layer = linear_layer(network)
    prefix = f"{NETWORK}{path}." if path else NETWORK
    part = within(posterior, prefix).to(inputs.device)

    def moments(name: str, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance; a parameter that clients do not share is not in the posterior, and has variance 0."""
        known = name in part.mean
        return (part.mean[name], part.variance[name]) if known else (parameter, torch.zeros_like(parameter))

    weight, weight_variance = moments("weight", layer.weight)
    mean, variance = inputs @ weight.T, inputs.square() @ weight_variance.T
    if layer.bias is not None:
        bias, bias_variance = moments("bias", layer.bias)
        mean, variance = mean + bias, variance + bias_variance
    return mean, variance
