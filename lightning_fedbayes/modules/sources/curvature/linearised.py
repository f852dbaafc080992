r"""Outputs of a network that is linearised at the mean of its posterior: their mean, covariance and draws."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_fedbayes.core.batches import number_of_examples, output_of
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.core.posterior import GaussianPosterior, at_least_float32, is_random
from lightning_fedbayes.layers import mean_only
from lightning_fedbayes.layers.posterior_view import parameter_paths
from lightning_fedbayes.modules.sources.curvature.diagonal import ENTRIES, output_of_one, rows
from lightning_fedbayes.modules.sources.curvature.kronecker import KroneckerPosterior, joined

Tensors = dict[str, Tensor]


def linearised_outputs(
    network: nn.Module, posterior: GaussianPosterior | KroneckerPosterior, inputs: Any, vectorized: bool = True
) -> tuple[Tensor, Tensor]:
    r"""Return mean and covariance of the outputs of the network linearised at the mean of its posterior.

    .. math:: f(x) \sim N\left(f(x; \hat\theta),\ J \Sigma J^\top\right), \qquad
              J = \nabla_\theta f(x; \theta) \big|_{\hat\theta}

    with :math:`\hat\theta` and :math:`\Sigma` the mean and the covariance of the posterior.

    When to use it: for Laplace posteriors. Their variances hold for this linear model.

    Args:
        network: maps inputs to a tensor (:func:`~lightning_fedbayes.core.batches.output_of`), each example by itself.
            In evaluation mode. Its noise is off.
        posterior: of its parameters. Others, and those of variance 0, are fixed.
        inputs: a batch: a tensor of shape (batch, \*), a collection of such, or another input of the network, such as
            a graph, which is not divided into examples: one pass, and one back for every output of every example.
        vectorized: all examples of a chunk in one pass, by ``torch.func.vmap``. Otherwise one by one.

    Returns: the means, (batch, \*outputs), and the covariances between the O outputs of an example, (batch, O, O).
    Source: Immer, Korzepa and Bauer 2021.
    """
    paths = parameter_paths(network)
    if isinstance(posterior, GaussianPosterior):
        buffers, random = {}, [name for name in posterior.names if is_random(posterior.variance[name])]
    else:
        own = [f"{layer}.{part}".lstrip(".") for layer in posterior.terms for part in ("weight", "bias")]
        buffers, random = posterior.buffers, [name for name in own if name in posterior.mean]
    names = {name: paths[name] for name in random}
    with torch.inference_mode(False), torch.no_grad(), mean_only(network):
        count = number_of_examples(inputs)
        inputs = copy.deepcopy(inputs) if count is None else apply_to_collection(inputs, Tensor, _differentiable)
        values = {paths[name]: _differentiable(value) for name, value in posterior.mean.items()}
        fixed = {**buffers, **{path: value for path, value in values.items() if path not in names.values()}}

        def output(part: Any, parameters: Tensors) -> Tensor:
            return output_of(network, part, {**fixed, **parameters})

        def of_one(parameters: Tensors, example: Any) -> tuple[Tensor, Tensor]:
            found = output_of_one(network, {**fixed, **parameters}, example)
            return found.reshape(-1), found

        if not names:  # a point mass
            mean = output_of(network, inputs, fixed)
            return mean, mean.new_zeros(len(mean), *2 * [mean[0].numel()])
        at = {path: values[path] for path in names.values()}
        size = sum(value.numel() for value in at.values())

        def parts() -> Iterator[tuple[Tensor, Tensors]]:
            if count is None or not vectorized:
                for part in [inputs] if count is None else (rows(inputs, slice(i, i + 1)) for i in range(count)):
                    yield from _jacobians_by_row(partial(output, part), at)
                return
            of_part = torch.func.vmap(torch.func.jacrev(of_one, has_aux=True), in_dims=(None, 0))
            start, chunk = 0, 1  # the first example tells the number of outputs
            while start < count:
                part = rows(inputs, slice(start, start + chunk))
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*There is a performance drop.*")  # slower, but correct
                    jacobians, mean = of_part(at, part)
                yield mean, jacobians
                start, chunk = start + chunk, max(1, ENTRIES // max(1, size * mean[0].numel()))

        means, covariances = [], []
        for mean, jacobians in parts():
            means.append(mean)
            by_name = {name: jacobians[path] for name, path in names.items()}
            covariances.append(_covariance(posterior, by_name, mean.reshape(len(mean), -1)))
    return torch.cat(means), torch.cat(covariances)


def draws_of_outputs(mean: Tensor, covariance: Tensor, draws: int) -> Tensor:
    r"""Return draws from :math:`N(f, C)`, shape (draws, batch, \*outputs), spread evenly.

    They are one scrambled Sobol sequence, the same for all examples, and their averages are unbiased.

    Args:
        mean: f, shape (batch, \*outputs).
        covariance: C, positive semidefinite, shape (batch, O, O). FedBayesError if it is not finite.
        draws: number of draws.
    """
    wrong = int((~covariance.isfinite()).flatten(1).any(1).sum())
    if wrong:
        those = f"the linearised outputs of {wrong} of {len(covariance)} examples"
        raise FedBayesError(f"{those} have no finite covariance: look for NaN in their inputs, or leave them out")
    values, vectors = torch.linalg.eigh(at_least_float32(covariance))
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2) @ vectors.mT  # symmetric, so continuous in C
    seed = int(torch.randint(2**31, ()))
    uniform = torch.quasirandom.SobolEngine(root.shape[-1], scramble=True, seed=seed).draw(draws, dtype=torch.float64)
    noise = torch.special.ndtri(uniform + 0.5**31).to(root)  # half a step, away from 0 and 1
    return mean + torch.einsum("nij,sj->sni", root, noise).reshape(draws, *mean.shape).to(mean)


def _covariance(
    posterior: GaussianPosterior | KroneckerPosterior, jacobians: Mapping[str, Tensor], mean: Tensor
) -> Tensor:
    r"""Return :math:`J \Sigma J^\top`, (batch, O, O). Overwrite J, name → (batch, O, \*shape). Mean: (batch, O)."""
    total = mean.new_zeros(*mean.shape, mean.shape[1])
    if isinstance(posterior, GaussianPosterior):
        for name, jacobian in jacobians.items():
            scaled = jacobian.mul_(posterior.variance[name].sqrt()).flatten(2)
            total += scaled @ scaled.mT
        return total
    for layer, system in posterior.systems.items():
        total += system.covariance(joined(layer, jacobians, leading=2)).to(total)
    return total


def _jacobians_by_row(output: Callable[[Tensors], Tensor], at: Tensors) -> Iterator[tuple[Tensor, Tensors]]:
    r"""Yield the output, shape (1, \*outputs), and its Jacobians, path → (1, O, \*shape), for each example."""
    leaves = {path: value.detach().clone().requires_grad_() for path, value in at.items()}
    with torch.enable_grad():
        found = output(leaves)
        entries = [row.reshape(-1).unbind() for row in found]
    parameters = list(leaves.values())
    for row, own in zip(found.detach(), entries):
        gradients = [torch.autograd.grad(each, parameters, retain_graph=True, materialize_grads=True) for each in own]
        yield row[None], {path: torch.stack(each)[None] for path, each in zip(at, zip(*gradients))}


def _differentiable(tensor: Tensor) -> Tensor:
    """Return a tensor that derivatives may be taken with, outside of inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()
