r"""The latent noise model: clients whose errors have common causes.

.. math:: x_j = y + u^\top v_j + e_j, \qquad e_j \sim N(0, \sigma_j^2), \quad u \sim N(0, I_D), \quad
          y \sim N(0, \tau^2)

for every parameter, with features :math:`v_j \in R^D` of the clients that all parameters share: [Untrusted] eq. (8),
with :math:`\sigma_u = 1` (the scale is in v) and the noise per client of Algorithm 2, line 2. All functions need only
the clients' mean products :math:`S_{jk} = x_j \cdot x_k / P`.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # pyright: ignore[reportAttributeAccessIssue]

MOVED = ("features", "noise", "signal")
"""Estimates that :func:`climb` changes."""


@dataclass(frozen=True)
class Latent:
    """Estimates of the latent noise model for K clients and D features.

    Args:
        features: posterior means of v, shape (K, D).
        spread: their posterior covariances Ψ, shape (K, D, D).
        feature_variance: prior variance of the features σ_v², a scalar.
        noise: σ_j², shape (K,).
        signal: τ², a scalar.
    """

    features: Tensor
    spread: Tensor
    feature_variance: Tensor
    noise: Tensor
    signal: Tensor

    def covariance(self) -> Tensor:
        r"""Return the covariance of the clients' errors, :math:`V V^\top + \mathrm{diag}(\sigma^2)`, shape (K, K)."""
        return self.features @ self.features.T + torch.diag(self.noise)


def least_squares(covariance: Tensor) -> Tensor:
    r"""Return :math:`\Phi^{-1} 1 / (1^\top \Phi^{-1} 1)`, shape (K,): generalised least squares, eq. (3)."""
    solution = torch.linalg.solve(covariance, torch.ones(len(covariance), dtype=covariance.dtype))
    return solution / solution.sum()


def posterior_of_truth(latent: Latent) -> tuple[Tensor, Tensor]:
    r"""Return the Gaussian q(y, u): one precision for all parameters, and a mean that is linear in x.

    With :math:`z_j = (1, v_j)` its precision is
    :math:`A = \mathrm{diag}(1/\tau^2, I) + \sum_j \sigma_j^{-2} (z_j z_j^\top + \mathrm{diag}(0, \Psi_j))`
    and its mean :math:`A^{-1} \sum_j \sigma_j^{-2} z_j x_j`. y and u are inferred jointly: factorised, as in eq. (14)
    to (17), the bound is looser, and its maximum stays near equal weights where clients share data.

    Returns: A, shape (D + 1, D + 1), and the rows :math:`z_j / \sigma_j^2`, shape (K, D + 1).
    """
    precision = 1 / latent.noise
    ones = torch.ones(len(precision), 1, dtype=precision.dtype)
    loadings = torch.cat([ones, latent.features], 1)
    rows = loadings * precision[:, None]
    prior = torch.cat([1 / latent.signal[None], torch.ones(latent.features.shape[1], dtype=precision.dtype)])
    uncertain = torch.einsum("k,kij->ij", precision, latent.spread)
    return loadings.T @ rows + torch.diag(prior) + torch.nn.functional.pad(uncertain, (1, 0, 1, 0)), rows


def free_energy(latent: Latent, products: Tensor, size: int) -> Tensor:
    r"""Return the lower bound of the log evidence per parameter for the best q(y, u).

    Args:
        latent: q(V) and the variances.
        products: :math:`S`, shape (K, K).
        size: number of parameters P.
    """
    clients, count = latent.features.shape
    precision, rows = posterior_of_truth(latent)
    explained = (torch.linalg.inv(precision) * (rows.T @ products @ rows)).sum()
    data = clients * math.log(2 * math.pi) + latent.noise.log().sum() + latent.signal.log() + torch.logdet(precision)
    data = data + (products.diagonal() / latent.noise).sum() - explained
    squares = latent.features.square().sum() + latent.spread.diagonal(dim1=1, dim2=2).sum()
    divergence = squares / latent.feature_variance - clients * count * (1 - latent.feature_variance.log())
    return -(data + (divergence - torch.logdet(latent.spread).sum()) / size) / 2


def update_spread(latent: Latent, products: Tensor, size: int) -> Latent:
    """Update the posterior covariances of the features, eq. (18), and then their prior variance, eq. (22)."""
    precision, rows = posterior_of_truth(latent)
    inverse = torch.linalg.inv(precision)
    towards = rows @ inverse
    moments = (inverse + towards.T @ products @ towards)[1:, 1:]
    eye = torch.eye(len(moments), dtype=products.dtype)
    spread = torch.linalg.inv(eye / latent.feature_variance + size * moments / latent.noise[:, None, None])
    squares = latent.features.square().sum() + spread.diagonal(dim1=1, dim2=2).sum()
    variance = squares / max(latent.features.numel(), 1)
    return replace(latent, spread=spread, feature_variance=variance)


def climb(
    latent: Latent, products: Tensor, size: int, least: float, steps: int, moved: tuple[str, ...] = MOVED
) -> Latent:
    """Return features, noise and signal of a free energy that is at least that of ``latent``, by L-BFGS.

    Coordinate ascent has the same stationary points, but takes thousands of passes where the noise is small. No noise
    becomes less than ``least``; only what is named in ``moved`` changes.
    """
    above = (latent.noise - least).clamp_min(1e-3 * least)
    begun = {"features": latent.features, "noise": above.log(), "signal": latent.signal.log()}
    free = {name: begun[name].detach().clone().requires_grad_() for name in moved}
    best, highest = latent, float(free_energy(latent, products, size))

    def at() -> Latent:
        values = {**begun, **free}
        noise = values["noise"].exp() + least
        return replace(latent, features=values["features"], noise=noise, signal=values["signal"].exp())

    def loss() -> Tensor:
        nonlocal best, highest
        optimizer.zero_grad()
        reached = at()
        value = free_energy(reached, products, size)
        if not bool(torch.isfinite(value)):
            raise LinAlgError("beyond double precision")
        if value.item() > highest:
            highest = value.item()
            best = replace(reached, **{name: getattr(reached, name).detach().clone() for name in MOVED})
        value = -value
        value.backward()
        return value

    optimizer = torch.optim.LBFGS(
        free.values(),
        max_iter=steps,
        history_size=20,
        tolerance_grad=1e-9,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )
    with torch.enable_grad(), contextlib.suppress(LinAlgError):  # singular: keep the best so far
        optimizer.step(loss)  # pyright: ignore[reportArgumentType]
    return best


def start(residual: Tensor, noise: Tensor, signal: Tensor, count: int) -> Latent:
    """Return first estimates: the features are 0.3 times the leading principal components of the clients' residuals.

    Args:
        residual: mean products of the clients' differences to a consensus, shape (K, K).
        noise, signal: first estimates of the variances.
        count: number of features D.
    """
    values, vectors = torch.linalg.eigh(residual)
    features = 0.3 * vectors.flip(1)[:, :count] * values.flip(0)[:count].clamp_min(0).sqrt()
    prior = features.square().mean().clamp_min(float(noise.mean()) * 1e-3) if count else signal
    spread = torch.eye(count, dtype=noise.dtype).expand(len(noise), count, count) * (prior * 1e-3)
    return Latent(features.contiguous(), spread, prior, noise, signal)
