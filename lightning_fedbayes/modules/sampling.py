"""Draws of a network's parameters or of its noise, its output for each draw, and predictive distributions."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakSet

import torch
from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import Tensor, nn

from lightning_fedbayes.core import posterior as gaussians
from lightning_fedbayes.core.batches import output_of
from lightning_fedbayes.core.errors import FedBayesError, PosteriorError, check_at_least, check_kind, listed
from lightning_fedbayes.core.posterior import GaussianPosterior, check_posterior, check_tensor
from lightning_fedbayes.layers import MCDropout, mean_only
from lightning_fedbayes.layers.affine import BayesianConv
from lightning_fedbayes.layers.posterior_view import parameter_paths

ParameterSets = dict[str, Tensor]
"""Name in the posterior → values of shape (sets, *shape). A value that is expanded is the same in all sets."""


def draws_from_clients(clients: Sequence[GaussianPosterior]) -> ParameterSets:
    """Take each client as one draw, from its posterior if it has variances: [FedAG]'s non-parametric bootstrap."""
    check_kind("clients", clients, Sequence, "give the clients' posteriors, at least one", error=FedBayesError)
    if not clients:
        raise FedBayesError("there are no clients to draw: give their posteriors, at least one")
    for number, client in enumerate(clients):
        check_posterior(client, f"client {number}")
        gaussians.check_same_structure(clients[0].mean, client.mean, "client 0", f"client {number}")
    parts = [client.sample() for client in clients]
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def outputs_with(
    network: nn.Module,
    sets: ParameterSets,
    inputs: Any,
    vectorized: bool = True,
    buffers: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Compute the network's output with each set of parameters, shape (sets, batch, *).

    Args:
        network: maps ``inputs`` to a tensor (:func:`~lightning_fedbayes.core.batches.output_of`). Its noise (Bayesian
            layers, Monte Carlo dropout) is off.
        sets: see :data:`ParameterSets`. Other parameters keep their value.
        inputs: of a batch.
        vectorized: all sets in one pass, by ``torch.func.vmap``. Otherwise one after the other.
        buffers: in place of the network's, by name.

    Raises PosteriorError: the network has no parameter of a name.
    """
    paths = parameter_paths(network)
    unknown = sorted(sets.keys() - paths.keys())
    if unknown:
        raise PosteriorError(f"the network has no parameter {listed(unknown)}: the posterior is of another network")
    count = len(next(iter(sets.values())))
    fixed, drawn = dict(buffers or {}), dict[str, Tensor]()
    for name, value in sets.items():
        if count > 1 and value.stride(0) == 0:
            fixed[paths[name]] = value[0]
        else:
            drawn[paths[name]] = value

    def forward(parameters: Mapping[str, Tensor]) -> Tensor:
        return output_of(network, inputs, {**fixed, **parameters})

    with mean_only(network):
        if not drawn:
            output = forward({})
            return output.expand(count, *output.shape)
        if vectorized:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*There is a performance drop.*")  # slower, but correct
                return torch.func.vmap(forward)(drawn)
        return torch.stack([forward({path: value[s] for path, value in drawn.items()}) for s in range(count)])


def within(posterior: GaussianPosterior, prefix: str) -> GaussianPosterior:
    """Return the part of ``posterior`` with names that begin with ``prefix``, without the prefix."""
    names = [name for name in posterior.names if name.startswith(prefix)]
    return GaussianPosterior(
        {name.removeprefix(prefix): posterior.mean[name] for name in names},
        {name.removeprefix(prefix): posterior.variance[name] for name in names},
    )


_ONE_BY_ONE: WeakSet[nn.Module] = WeakSet()
"""Networks that failed to vectorise."""

CONVOLUTIONS = (nn.modules.conv._ConvNd, BayesianConv)
LARGE_BATCH = 2**16
"""Number of input entries from which a batch of images is large."""

ENTRIES = 2**22
"""Largest number of parameters and inputs in one pass on a CPU: beyond, intermediate values leave the caches, and
more draws per pass save no time."""


def is_stochastic(network: nn.Module) -> bool:
    """Return whether two passes through ``network`` in evaluation mode can differ."""
    check_kind("network", network, nn.Module, "give a torch.nn.Module", error=FedBayesError)
    return any(isinstance(module, BaseVariationalLayer_ | MCDropout) for module in network.modules())


def sample_outputs(network: nn.Module, inputs: Tensor, samples: int) -> Tensor:
    """Return ``samples`` independent draws of the network's output, shape (S, batch, *).

    One vectorised pass: layers before the first Bayesian one run once for all samples. A network that cannot be
    vectorised (such as an LSTM behind noise) runs once per sample. One without randomness runs once.

    Args:
        network: maps ``inputs`` to a tensor. A tuple's first element counts (bayesian-torch returns the KL second). In
            evaluation mode, so that BatchNorm updates no statistics.
        inputs: shape (batch, *).
        samples: number of draws S, at least 1.
    """
    check_kind("network", network, nn.Module, "give a torch.nn.Module", error=FedBayesError)
    check_at_least("samples", samples, 1, error=FedBayesError)
    check_tensor("inputs", inputs, error=FedBayesError)

    def forward() -> Tensor:
        output = network(inputs)
        return output[0] if isinstance(output, tuple) else output

    if samples == 1 or not is_stochastic(network):
        return forward().unsqueeze(0)
    if network not in _ONE_BY_ONE and not convolves_noise(network, inputs):
        devices = [inputs.device] if inputs.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # a failed attempt must leave the generators unchanged
            outputs = _vectorized(forward, samples, draws_per_pass(network, inputs), inputs.device)
            states = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
        if outputs is not None:
            torch.set_rng_state(states[0])
            for device, state in zip(devices, states[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            return outputs
        _ONE_BY_ONE.add(network)
    return torch.stack([forward() for _ in range(samples)])


def _vectorized(forward: Callable[[], Tensor], samples: int, chunk: int | None, device: torch.device) -> Tensor | None:
    """Return all draws, ``chunk`` per pass (None: all), or None if the network does not vectorise."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*There is a performance drop.*")  # slower, but correct
        try:
            draw = torch.func.vmap(lambda _: forward(), randomness="different", chunk_size=chunk)
            return draw(torch.empty(samples, device=device))
        except (RuntimeError, ValueError):  # an error of the network shows when it runs once per sample
            return None


def convolves_noise(network: nn.Module, inputs: Tensor) -> bool:
    """Return True if vectorising is slower: most work is convolutions that differ between draws, on a CPU."""
    if inputs.device.type != "cpu" or inputs.numel() < LARGE_BATCH:
        return False
    noisy = False
    for module in network.modules():  # the order of definition
        if isinstance(module, CONVOLUTIONS) and (noisy or isinstance(module, BayesianConv)):
            return True
        noisy = noisy or isinstance(module, BaseVariationalLayer_ | MCDropout)
    return False


def draws_per_pass(network: nn.Module, inputs: Tensor) -> int | None:
    """Return the number of draws per pass. None: all."""
    if inputs.device.type != "cpu":
        return None
    for module in network.modules():  # the order of definition
        if isinstance(module, BaseVariationalLayer_ | MCDropout):
            return max(1, ENTRIES // (inputs.numel() + sum(p.numel() for p in network.parameters())))
        if next(module.parameters(recurse=False), None) is not None:
            return None
    return None


Predictive = Literal["layers", "omc", "bootstrap", "closed_form"]
PREDICTIVES: tuple[Predictive, ...] = ("layers", "omc", "bootstrap", "closed_form")

NETWORK = "network."
"""Prefix of a network's parameters in the posterior of its module."""


@dataclass
class GlobalRound:
    """Result of a finished round, as far as predictions need it: the global posterior and the clients' updates."""

    posterior: GaussianPosterior | None = None
    clients: list[GaussianPosterior] = field(default_factory=list)


def linear_layer(network: nn.Module) -> tuple[str, nn.Linear]:
    """Return a network that is one linear layer, and the prefix of its parameters. Raise FedBayesError for others."""
    prefix, layer = "", network
    while type(layer) is nn.Sequential and len(layer) == 1:
        [(name, layer)] = layer.named_children()
        prefix += f"{name}."
    if type(layer) is nn.Linear:
        return prefix, layer
    what = f"predictive='closed_form' is for a network that is one nn.Linear, not {type(network).__name__}"
    raise FedBayesError(f"{what}: the variance of any other network has no closed form; use 'omc' or 'bootstrap'")


def linear_moments(network: nn.Module, posterior: GaussianPosterior, inputs: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return mean and variance, (batch, targets) each, of a linear model's output under a mean-field posterior.

    .. math:: \mu_w^\top x + \mu_b, \qquad \sum_i \sigma_{w,i}^2 x_i^2 + \sigma_b^2

    ``posterior`` belongs to the module that holds the network (:func:`linear_layer`) under the name "network".

    Source: [FedAG] eq. (6), without the noise 1/β.
    """
    prefix, layer = linear_layer(network)
    part = within(posterior, NETWORK + prefix).to(inputs.device)

    def moments(name: str, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance. A parameter that clients do not share is not in the posterior, and has variance 0."""
        known = name in part.mean
        return (part.mean[name], part.variance[name]) if known else (parameter, torch.zeros_like(parameter))

    weight, weight_variance = moments("weight", layer.weight)
    mean, variance = inputs @ weight.T, inputs.square() @ weight_variance.T
    if layer.bias is not None:
        bias, bias_variance = moments("bias", layer.bias)
        mean, variance = mean + bias, variance + bias_variance
    return mean, variance
