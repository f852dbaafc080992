"""Many independent networks of one shape as one network: every parameter has a first dimension of copies."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fedbayes.layers import Reparameterized


class CopiesLinear(nn.Module):
    """A linear layer per copy: inputs (batch, copies, features) to outputs (batch, copies, outputs).

    Initial values are those of :class:`torch.nn.Linear`.
    """

    def __init__(self, copies: int, features: int, outputs: int) -> None:
        super().__init__()
        self.weight = initial(features, copies, features, outputs)
        self.bias = initial(features, copies, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.bmm(inputs.transpose(0, 1), self.weight).transpose(0, 1) + self.bias


class CopiesDot(nn.Module):
    """A linear layer of one output per copy: inputs (batch, copies, features) to outputs (batch, copies).

    For a batch of one example a product and a sum are faster than a batched matrix product.
    """

    def __init__(self, copies: int, features: int) -> None:
        super().__init__()
        self.weight = initial(features, copies, features)
        self.bias = initial(features, copies)

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * self.weight).sum(-1) + self.bias


class LocallyReparameterized(Reparameterized):
    """A Gaussian layer that is linear in its parameters and samples its outputs, of mean f(x; μ), variance f(x²; σ²).

    Source: Kingma et al. (2015) eq. (6).
    """

    def _output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        mean = self.module(*args, **kwargs)
        if self.mean_only:
            return mean
        variances = {each.path.removeprefix("module."): each.variance for each in self.gaussian_parameters()}
        variance = functional_call(self.module, variances, tuple(each.square() for each in args), kwargs)
        return mean + variance.sqrt() * torch.randn_like(mean)


class TargetsLast(nn.Module):
    """Layer from (batch, copies, outputs) to (batch, outputs · copies): all copies' first outputs, then the second."""

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs.transpose(1, 2).flatten(1)


def initial(features: int, *shape: int) -> nn.Parameter:
    """Return a parameter with the initial values of torch.nn.Linear: uniform on ±1/√features."""
    bound = 1 / math.sqrt(features)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def networks(copies: int, features: int, hidden: int) -> nn.Sequential:
    """One output per copy, shape (batch, copies): one hidden layer of ReLU, or with ``hidden`` 0 a linear model."""
    if not hidden:
        return nn.Sequential(CopiesDot(copies, features))
    return nn.Sequential(CopiesLinear(copies, features, hidden), nn.ReLU(), CopiesDot(copies, hidden))


def two_headed(copies: int, features: int, hidden: int) -> nn.Sequential:
    """Mean and raw variance per copy, shape (batch, 2 · copies)."""
    return nn.Sequential(
        CopiesLinear(copies, features, hidden), nn.ReLU(), CopiesLinear(copies, hidden, 2), TargetsLast()
    )


def variational(copies: int, features: int, hidden: int) -> nn.Sequential:
    """The networks of :func:`networks` with Gaussian parameters of prior N(0, 1)."""
    first, between, last = networks(copies, features, hidden)
    return nn.Sequential(LocallyReparameterized(first), between, LocallyReparameterized(last))
