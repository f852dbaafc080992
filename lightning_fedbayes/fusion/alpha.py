"""α-barycenters: a family with one parameter between the reverse-KL barycenter and the linear pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, check_number
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.fusion.averages import LinearPool
from lightning_fedbayes.fusion.products import ReverseKLBarycenter
from lightning_fedbayes.fusion.registry import register_fusion
from lightning_fedbayes.fusion.rule import FusionRule

NODES = 32
"""Gauss–Hermite nodes around each client, per parameter."""
ENTRIES = 2**21
"""Number of log densities that are held at once."""
NEGLIGIBLE = 1e-6
"""Distance of α from 0 or 1 below which the limit is taken."""


@register_fusion("alpha_barycenter")
class AlphaBarycenter(FusionRule):
    r"""Gaussian with the moments of the minimiser of :math:`\sum_k \omega_k D_\alpha(q_k \| q)`, per parameter.

    .. math:: q(\theta) \propto \Bigl(\sum_k \omega_k\, q_k(\theta)^\alpha\Bigr)^{1/\alpha}, \qquad
              D_\alpha(p\|q) = \frac{1 - \int p^\alpha q^{1-\alpha}}{\alpha (1 - \alpha)}

    α → 0 is ``reverse_kl_barycenter``, whose mass lies where all clients have some; α = 1 is ``linear_pool``, whose
    mass lies where any client has some; α = ½ is the Hellinger barycenter. The
    moments are found by Gauss–Hermite quadrature around every client and around the reverse-KL barycenter: to three
    digits for α in [0, 1], less exactly outside.

    When to use it: where held-out data are to choose α (``python -m benchmarks.images.run
    benchmarks/images/configs/alpha.yaml``). It holds all clients of a round and costs O(K² · P) with a large constant:
    for networks, or Bayesian parts of them, of up to about a million parameters.

    Where a client is a point mass, the result is that of the reverse-KL barycenter (except for α = 1).

    Args:
        alpha: α, any finite number; [0, 1] is the range between the two named rules.

    Raises:
        FusionError: ``alpha`` is not finite.

    Source: Amari 2007, "Integration of stochastic models by minimizing α-divergence"; the projection onto Gaussians
    is the one of [FBDL] (12) to (14).
    """

    by_columns: ClassVar[bool] = True

    def __init__(self, alpha: float = 0.5) -> None:
        check_number("alpha_barycenter: alpha", alpha, error=FusionError)
        self.alpha = alpha

    def fuse(
        self, posteriors: Sequence[GaussianPosterior], weights: Tensor, previous: GaussianPosterior | None
    ) -> GaussianPosterior:
        """See :meth:`FusionRule.fuse`."""
        if abs(self.alpha - 1) < NEGLIGIBLE:
            return LinearPool().fuse(posteriors, weights, previous)
        limit = ReverseKLBarycenter().fuse(posteriors, weights, previous)
        if abs(self.alpha) < NEGLIGIBLE:
            return limit
        mean, variance = (each.clone() for each in limit.flatten())
        clients = [posterior.flatten() for posterior in posteriors]
        random = torch.stack([client[1] for client in clients]).amin(0) > 0
        means = torch.stack([client[0][random] for client in clients])
        variances = torch.stack([client[1][random] for client in clients])
        middle = mean[random], variance[random]
        width = max(1, ENTRIES // (len(clients) * (len(clients) + 1) * NODES))
        blocks = zip(*(each.split(width, -1) for each in (means, variances, *middle)), strict=True)
        parts = [alpha_moments(m, v, centre, spread, weights, self.alpha) for m, v, centre, spread in blocks]
        if parts:
            mean[random], variance[random] = (torch.cat(each) for each in zip(*parts, strict=True))
        return posteriors[0].unflatten(mean, variance)


@register_fusion("hellinger_barycenter")
class HellingerBarycenter(AlphaBarycenter):
    r"""The α-barycenter of α = ½, the minimiser of :math:`\sum_k \omega_k H^2(q_k, q)`, projected onto Gaussians.

    .. math:: q(\theta) \propto \Bigl(\sum_k \omega_k \sqrt{q_k(\theta)}\Bigr)^2, \qquad
              H^2(p, q) = 1 - \int \sqrt{p\,q}

    When to use it: half-way between ``reverse_kl_barycenter`` and ``linear_pool``; its divergence is symmetric.
    """

    def __init__(self) -> None:
        super().__init__(0.5)


def alpha_moments(
    means: Tensor, variances: Tensor, middle: Tensor, spread: Tensor, weights: Tensor, alpha: float
) -> tuple[Tensor, Tensor]:
    r"""Return mean and variance of :math:`(\sum_k \omega_k q_k^\alpha)^{1/\alpha}`, normalised, per parameter.

    The integrals are expectations under the mixture of the clients (half of it) and of the reverse-KL barycenter (the
    other half), which is nowhere much smaller than the integrand.

    Args:
        means, variances: of the clients, shape (K, P), variances positive.
        middle, spread: mean and variance of the reverse-KL barycenter, shape (P,).
        weights: shape (K,), of sum 1.
        alpha: not 0.

    Returns: shape (P,) each.
    """
    nodes, masses = (torch.from_numpy(each).to(means) for each in np.polynomial.hermite_e.hermegauss(NODES))
    centres, widths = torch.cat([means, middle[None]]), torch.cat([variances, spread[None]]).sqrt()
    shares = torch.cat([weights.to(means) / 2, means.new_tensor([0.5])])
    around = nodes[:, None] * widths[:, None]  # node n around each centre: shape (K + 1, nodes, P)
    from_clients = ((centres - means[:, None])[:, :, None] + around).flatten(1, 2)  # exact where a client is a spike
    points = ((centres - middle)[:, None] + around).flatten(0, 1)
    mass = (shares[:, None] * masses / masses.sum()).flatten()
    log_clients = _log_density(from_clients, variances[:, None])
    log_weights = weights.to(means).log()[:, None, None]
    log_mixture = torch.logaddexp((log_weights + log_clients).logsumexp(0), _log_density(points, spread)) - math.log(2)
    log_ratio = (log_weights + alpha * log_clients).logsumexp(0) / alpha - log_mixture
    values = mass[:, None] * (log_ratio - log_ratio.amax(0)).exp()
    values = values / values.sum(0)
    offset = (values * points).sum(0)
    return middle + offset, (values * (points - offset).square()).sum(0)


def _log_density(distance: Tensor, variance: Tensor) -> Tensor:
    """Return the log density of Gaussians at ``distance`` from their mean."""
    return -0.5 * (distance.square() / variance + variance.log() + math.log(2 * math.pi))
