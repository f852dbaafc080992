r"""Posteriors of small networks that owe nothing to the package: draws by NUTS, and the best Gaussians.

A network is its sizes, from inputs to classes, with ReLUs between linear layers; one of two sizes is a logistic
regression. Its parameters are one vector of P entries, layer by layer weight and bias, as those of ``modules.mlp``. The
prior is N(0, 1) for each of them, and the likelihood is categorical.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus
from torch.utils.data import TensorDataset
from tqdm import trange

import lightning_fedbayes as fb

CHAINS, WARMUP, KEPT = 4, 1000, 2000
"""Chains of NUTS, and draws of each that are dropped and kept."""
STEPS, DRAWS = 10_000, 8
"""Of the Gaussian with a full covariance: steps, at rates from 1e-2 to 1e-4, and draws in each."""
NODES = 32
"""Nodes of the Gauss-Hermite quadrature."""


def size(sizes: Sequence[int]) -> int:
    """Return the number of parameters P."""
    return sum((before + 1) * after for before, after in pairwise(sizes))


def outputs(parameters: Any, inputs: Any, sizes: Sequence[int]) -> Any:
    """Return the logits of a network; all are tensors of torch, or all arrays of jax.

    Args:
        parameters: shape (P,), or (draws, P).
        inputs: shape (batch, sizes[0]).
        sizes: of the network.

    Returns: shape (batch, sizes[-1]), or (draws, batch, sizes[-1]).
    """
    values, start = inputs, 0
    for number, (before, after) in enumerate(pairwise(sizes)):
        if number:
            values = values * (values > 0)
        stop = start + before * after
        weight = parameters[..., start:stop].reshape(*parameters.shape[:-1], after, before)
        values = values @ weight.swapaxes(-1, -2) + parameters[..., None, stop : stop + after]
        start = stop + after
    return values


# -- NUTS --------------------------------------------------------------------------------------------------------------


def nuts(data: TensorDataset, sizes: Sequence[int], seed: int = 0) -> Tensor:
    """Return draws from the exact posterior, shape (chains, draws, P); each chain starts from a draw of the prior.

    Raises:
        FedBayesError: numpyro is missing.
    """
    try:
        jax, numpy, infer = (import_module(name) for name in ("jax", "jax.numpy", "numpyro.infer"))
    except ImportError as missing:
        raise fb.FedBayesError(
            f"NUTS needs numpyro ({missing}): pip install --group benchmarks/pyproject.toml:truth"
        ) from missing
    inputs, classes = (numpy.asarray(each.numpy()) for each in data.tensors)
    rows = numpy.arange(len(classes))

    def energy(parameters: Any) -> Any:
        logs = jax.nn.log_softmax(outputs(parameters, inputs, sizes))
        return (parameters**2).sum() / 2 - logs[rows, classes].sum()

    sampler = infer.MCMC(
        infer.NUTS(potential_fn=energy),
        num_warmup=WARMUP,
        num_samples=KEPT,
        num_chains=CHAINS,
        chain_method="sequential",
    )
    first, key = jax.random.split(jax.random.PRNGKey(seed))
    sampler.run(key, init_params=jax.random.normal(first, (CHAINS, size(sizes))))
    return torch.from_numpy(np.array(sampler.get_samples(group_by_chain=True)))


def split_rhat(values: Tensor) -> Tensor:
    r"""Return the potential scale reduction :math:`\hat R` of half chains: 1 where all have the same distribution.

    Args:
        values: shape (chains, draws, \*).

    Returns: the shape of ``*``; 1 where all values are the same.

    Source: Gelman et al. 2013, §11.4.
    """
    half = values.shape[1] // 2
    halves = torch.cat([values[:, :half], values[:, -half:]])
    within, between = halves.var(1).mean(0), halves.mean(1).var(0)
    return torch.where(within > 0, ((half - 1) / half + between / within).sqrt(), 1.0)


# -- Gaussians ---------------------------------------------------------------------------------------------------------


def bound(mean: Tensor, root: Tensor, data: TensorDataset, sizes: Sequence[int], draws: int) -> Tensor:
    r"""Estimate the evidence lower bound of :math:`N(\mu, L L^\top)`, in nats.

    Args:
        mean: :math:`\mu`, shape (P,).
        root: L, lower triangular with a positive diagonal, shape (P, P).
        data: inputs and classes.
        sizes: of the network.
        draws: of the parameters; the divergence from the prior is exact.
    """
    inputs, classes = data.tensors
    drawn = mean + torch.randn(draws, len(mean), dtype=mean.dtype) @ root.T
    logits = outputs(drawn, inputs, sizes)
    losses = cross_entropy(logits.flatten(0, 1), classes.repeat(draws), reduction="sum") / draws
    divergence = (root.square().sum() + mean.square().sum() - len(mean)) / 2 - root.diagonal().log().sum()
    return -losses - divergence


def full_covariance(data: TensorDataset, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\mu` and L of the Gaussian with the largest bound, from σ = 0.1 and the weights of a new network.

    Adam, with reparameterised draws on all examples; L has the exponential of what is trained on its diagonal.
    """
    with torch.no_grad():
        start = torch.nn.utils.parameters_to_vector(fb.modules.mlp(sizes[0], sizes[-1], sizes[1:-1]).parameters())
    mean = start.clone().requires_grad_()
    raw = torch.diag(torch.full_like(start, math.log(0.1))).requires_grad_()
    optimizer = torch.optim.Adam([mean, raw], lr=1e-2)
    for step in trange(STEPS, desc="full covariance", leave=False):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 10 ** (-2 * step / STEPS)
        optimizer.zero_grad()
        (-bound(mean, cholesky(raw), data, sizes, DRAWS) / len(data)).backward()
        optimizer.step()
    return mean.detach(), cholesky(raw).detach()


def cholesky(raw: Tensor) -> Tensor:
    """Return the lower triangular matrix with the exponential of ``raw`` on its diagonal."""
    return raw.tril(-1) + raw.diagonal().exp().diag()


def mean_field(data: TensorDataset) -> tuple[Tensor, Tensor]:
    """Return means and variances of the best mean-field Gaussian of a logistic regression, to the last digits.

    Two classes, one linear layer with two outputs. The difference of the logits is Gaussian, so that the expected loss
    is an integral over one variable, and L-BFGS needs no draws.

    Returns: shape (P,) each, float64.
    """
    inputs, classes = data.tensors
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], 1).double()
    inputs = inputs * (2 * classes - 1)[:, None]  # so that a positive difference is right
    nodes, weights = (torch.from_numpy(each) for each in np.polynomial.hermite_e.hermegauss(NODES))
    mean = torch.zeros(2, inputs.shape[1], dtype=torch.float64, requires_grad=True)
    log_std = torch.full_like(mean, math.log(0.1)).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [mean, log_std],
        max_iter=1000,
        history_size=50,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        centre = inputs @ (mean[1] - mean[0])
        spread = (inputs.square() @ (2 * log_std).exp().sum(0)).sqrt()
        losses = softplus(-(centre[:, None] + spread[:, None] * nodes)) @ weights / math.sqrt(2 * math.pi)
        total = losses.sum() + ((2 * log_std).exp() + mean.square() - 1 - 2 * log_std).sum() / 2
        total.backward()
        return total

    optimizer.step(loss)
    # a layer has the weights of all outputs first, then the biases
    in_order = [torch.cat([each[:, :-1].flatten(), each[:, -1]]).detach() for each in (mean, (2 * log_std).exp())]
    return in_order[0], in_order[1]
