"""Monte Carlo samples of a network's output, all in one pass."""

from __future__ import annotations

import torch
from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import Tensor, nn

from lightning_fedbayes.layers import MCDropout


def is_stochastic(network: nn.Module) -> bool:
    """Whether two passes through ``network`` in evaluation mode can differ."""
    return any(isinstance(module, BaseVariationalLayer_ | MCDropout) for module in network.modules())


def sample_outputs(network: nn.Module, inputs: Tensor, samples: int) -> Tensor:
    """``samples`` independent draws of the network's output.

    One vectorised pass: layers before the first Bayesian one run once for all samples. Networks with an operation
    that cannot be vectorised (an LSTM, layers of bayesian-torch that draw noise in place) run once per sample. A
    network without randomness runs once, and its one sample is all there is.

    Args:
        network: maps ``inputs`` to a tensor; a tuple's first element counts (bayesian-torch returns the KL second).
        inputs: shape (batch, *).
        samples: number of draws S, at least 1.

    Returns: shape (S, batch, *); (1, batch, *) for a network without randomness.
    """

    def forward() -> Tensor:
        output = network(inputs)
        return output[0] if isinstance(output, tuple) else output

    if samples == 1 or not is_stochastic(network):
        return forward().unsqueeze(0)
    draws = torch.empty(samples, device=inputs.device)
    if network_vectorizes(network):
        return torch.func.vmap(lambda _: forward(), randomness="different")(draws)
    return torch.stack([forward() for _ in range(samples)])


def network_vectorizes(network: nn.Module) -> bool:
    """Whether one vectorised pass can draw all samples: known not to be for LSTMs and bayesian-torch's own layers."""
    return not any(
        isinstance(module, nn.RNNBase)
        or (isinstance(module, BaseVariationalLayer_) and not module.__module__.startswith("lightning_fedbayes."))
        for module in network.modules()
    )
