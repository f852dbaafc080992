"""Monte Carlo samples of a network's output, all in one pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from weakref import WeakSet

import torch
from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import Tensor, nn

from lightning_fedbayes.layers import MCDropout
from lightning_fedbayes.layers.conv import BayesianConv

_ONE_BY_ONE: WeakSet[nn.Module] = WeakSet()
"""Networks that turned out not to vectorise."""

CONVOLUTIONS = (nn.modules.conv._ConvNd, BayesianConv)
LARGE_BATCH = 2**16
"""Inputs from which a batch of images is large."""

ENTRIES = 2**22
"""Parameters and inputs that the draws of one pass may have together, where more draws in a pass spare nothing: beyond,
what they compute leaves the caches of a CPU."""


def is_stochastic(network: nn.Module) -> bool:
    """Whether two passes through ``network`` in evaluation mode can differ."""
    return any(isinstance(module, BaseVariationalLayer_ | MCDropout) for module in network.modules())


def sample_outputs(network: nn.Module, inputs: Tensor, samples: int) -> Tensor:
    """``samples`` independent draws of the network's output.

    One vectorised pass: layers before the first Bayesian one run once for all samples. A large network that has no such
    layers takes several passes on a CPU. A network that cannot be vectorised (an LSTM, a branch on a value, layers of
    bayesian-torch that draw noise in place) runs once per sample. A network without randomness runs once, and its one
    sample is all there is.

    Args:
        network: maps ``inputs`` to a tensor; a tuple's first element counts (bayesian-torch returns the KL second).
            In evaluation mode, so that BatchNorm updates nothing.
        inputs: shape (batch, *).
        samples: number of draws S, at least 1.

    Returns: shape (S, batch, *); (1, batch, *) for a network without randomness.
    """

    def forward() -> Tensor:
        output = network(inputs)
        return output[0] if isinstance(output, tuple) else output

    if samples == 1 or not is_stochastic(network):
        return forward().unsqueeze(0)
    if network not in _ONE_BY_ONE and not convolves_noise(network, inputs):
        devices = [inputs.device] if inputs.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # a failed attempt must draw nothing
            chunk = draws_per_pass(network, inputs)
            outputs = _vectorized(forward, samples, chunk, inputs.device) if may_vectorize(network) else None
            states = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
        if outputs is not None:
            torch.set_rng_state(states[0])
            for device, state in zip(devices, states[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            return outputs
        _ONE_BY_ONE.add(network)
    return torch.stack([forward() for _ in range(samples)])


def _vectorized(
    forward: Callable[[], Tensor], samples: int, chunk: int | None, device: torch.device
) -> Tensor | None:
    """All draws, ``chunk`` or all of them in a pass, or None if the network does not vectorise."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*There is a performance drop.*")  # slower, but right
        try:
            draw = torch.func.vmap(lambda _: forward(), randomness="different", chunk_size=chunk)
            return draw(torch.empty(samples, device=device))
        except (RuntimeError, ValueError):  # if the network itself is wrong, it will say so when it runs alone
            return None


def convolves_noise(network: nn.Module, inputs: Tensor) -> bool:
    """Whether convolutions of what differs from draw to draw are most of the work, on a CPU.

    They take twice as long side by side as one after the other, where the batch alone fills the caches.
    """
    if inputs.device.type != "cpu" or inputs.numel() < LARGE_BATCH:
        return False
    noisy = False
    for module in network.modules():  # the order of definition
        if isinstance(module, CONVOLUTIONS) and (noisy or isinstance(module, BayesianConv)):
            return True
        noisy = noisy or isinstance(module, BaseVariationalLayer_ | MCDropout)
    return False


def draws_per_pass(network: nn.Module, inputs: Tensor) -> int | None:
    """How many draws one pass makes; None is all of them."""
    if inputs.device.type != "cpu":
        return None
    for module in network.modules():  # the order of definition
        if isinstance(module, BaseVariationalLayer_ | MCDropout):
            return max(1, ENTRIES // (inputs.numel() + sum(p.numel() for p in network.parameters())))
        if next(module.parameters(recurse=False), None) is not None:
            return None
    return None


def may_vectorize(network: nn.Module) -> bool:
    """Whether it is worth trying: known to fail are recurrent networks and layers that draw noise in place."""
    return not any(
        isinstance(module, nn.RNNBase)
        or (isinstance(module, BaseVariationalLayer_) and not module.__module__.startswith("lightning_fedbayes."))
        for module in network.modules()
    )
