"""Inverse-variance weighting: each client has its own noise variance, inferred from the updates."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, check_at_least, check_number
from lightning_fedbayes.fusion.inferred import (
    InferredRule,
    consensus,
    least_noise,
    residuals,
    signal_of,
    squared_lengths,
)
from lightning_fedbayes.fusion.registry import register_fusion


class _InverseVariance(InferredRule):
    """Arguments of both ways of estimating: the least noise, and when to stop."""

    def __init__(
        self, memory: float = 1.0, floor: float = 0.01, tolerance: float = 1e-10, max_iterations: int = 1000
    ) -> None:
        super().__init__(memory)
        check_number("floor", floor, "(0, inf)", error=FusionError)
        check_number("tolerance", tolerance, "(0, inf)", error=FusionError)
        check_at_least("max_iterations", max_iterations, 1, error=FusionError)
        self.floor = floor
        self.tolerance = tolerance
        self.max_iterations = max_iterations


@register_fusion("ivar_mle")
class InverseVarianceMLE(_InverseVariance):
    r"""Maximum likelihood of the ground truth y and of one noise variance per client.

    .. math:: y_i \leftarrow \frac{\sum_{j \in J_i} x_{ij} / \sigma_j^2}{\sum_{j \in J_i} 1/\sigma_j^2}, \qquad
              \sigma_j^2 \leftarrow \max\Bigl(\varepsilon,
                \frac{1}{P |I_j|} \sum_{i \in I_j} \|x_{ij} - y_i\|^2\Bigr)

    When to use it: more than a few clients of unknown quality. It needs neither weights nor a bound on the number of
    bad clients. The likelihood is unbounded (y can be one client's update, whose variance goes to 0), so the method
    starts at the geometric median, which a minority of arbitrary clients cannot move far, keeps variances above ε,
    and bounds the number of iterations. Still y may end at one client's update, mostly with a handful of nearly
    equal clients, and with so few parameters that several clients are equally likely to be it, rounding decides which;
    ``ivar_vb`` prevents that.

    Args:
        memory: discount of earlier rounds, see :class:`~lightning_fedbayes.fusion.InferredRule`.
        floor: ε in units of the lower quartile of the clients' mean squared distances to the geometric median.
        tolerance: stop when no share changes by more.
        max_iterations: bound of the number of iterations; each costs O(K²).

    Source: [Untrusted] Algorithm 1, eq. (6), (7).
    """

    def infer(self, distances: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """See :meth:`InferredRule.infer`."""
        clients = distances[:-1, :-1]
        shares = consensus(distances)
        noise = residuals(clients, shares)
        least = least_noise(noise, self.floor)
        for _ in range(self.max_iterations):
            before, precision = shares, 1 / noise.clamp_min(least)
            shares = precision / precision.sum()
            noise = residuals(clients, shares)
            if bool((shares - before).abs().max() <= self.tolerance):
                break
        return shares, shares


@register_fusion("ivar_vb")
class InverseVarianceVB(_InverseVariance):
    r"""Posterior of the ground truth y under a Gaussian prior, with one noise variance per client.

    .. math:: \lambda_i = \Bigl(\frac{1}{\tau^2} + \sum_{j \in J_i} \frac{1}{\sigma_j^2}\Bigr)^{-1}, \qquad
              \bar y_i = \lambda_i \sum_{j \in J_i} \frac{x_{ij}}{\sigma_j^2}

    and the variances that maximise the evidence, :math:`\tau^2 = \lambda + \|\bar y\|^2 / P` and
    :math:`\sigma_j^2 = \lambda + \|x_j - \bar y\|^2 / P` (averages over rounds). x and y are updates, so the prior
    pulls towards the previous global posterior; noticeably only where the clients' noise is much larger than the
    update.

    When to use it: the default among rules for clients that cannot be trusted. The posterior variance λ is part of
    every noise variance, so y ends at one client's update less easily than under maximum likelihood; with few clients
    and few parameters it still can. It follows clients that agree: clients with unusual data may look like noise.

    Args:
        memory: discount of earlier rounds, see :class:`~lightning_fedbayes.fusion.InferredRule`.
        floor: least noise variance in units of the lower quartile of the clients' mean squared distances to the
            geometric median, where the iterations start.
        tolerance: stop when no share changes by more.
        max_iterations: bound of the number of iterations; each costs O(K²).

    Source: [Untrusted] eq. (10) to (13).
    """

    def __init__(
        self, memory: float = 1.0, floor: float = 1e-6, tolerance: float = 1e-10, max_iterations: int = 1000
    ) -> None:
        super().__init__(memory, floor, tolerance, max_iterations)

    def infer(self, distances: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """See :meth:`InferredRule.infer`."""
        shares = consensus(distances)
        noise = residuals(distances[:-1, :-1], shares)
        least = least_noise(noise, self.floor)
        noise, signal = noise.clamp_min(least), signal_of(distances, shares)
        coefficients = shares
        for _ in range(self.max_iterations):
            before = shares
            coefficients, noise, signal = coordinate_ascent(distances, noise, signal, least)
            shares = coefficients / coefficients.sum()
            if bool((shares - before).abs().max() <= self.tolerance):
                break
        return coefficients, shares


def coordinate_ascent(
    distances: Tensor, noise: Tensor, signal: Tensor, least: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the coefficients of the posterior mean, the new noise and the new signal variances: eq. (10) to (13).

    The noise σ² is of shape (K,), none below ``least``; the signal τ² is a scalar.
    """
    posterior_variance = 1 / (1 / signal + (1 / noise).sum())
    coefficients = posterior_variance / noise
    point = torch.cat([coefficients, 1 - coefficients.sum(0, keepdim=True)])
    squares = squared_lengths(distances, torch.eye(len(point), dtype=torch.float64) - point[:, None])
    moments = posterior_variance + squares
    return coefficients, moments[:-1].clamp_min(least), moments[-1]
