"""Inverse-variance weighting: every client has a noise of its own, inferred from the updates."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion.distances import consensus, gram_about_last, residuals, signal_of, squared_lengths
from lightning_fedbayes.fusion.inferred import InferredRule
from lightning_fedbayes.fusion.noise_scale import least_noise
from lightning_fedbayes.fusion.registry import register_fusion


class _InverseVariance(InferredRule):
    """What both ways of estimating share: the least noise, and when to stop."""

    def __init__(
        self, memory: float = 1.0, floor: float = 0.01, tolerance: float = 1e-10, max_iterations: int = 1000
    ) -> None:
        super().__init__(memory)
        for name, value in (("floor", floor), ("tolerance", tolerance), ("max_iterations", max_iterations)):
            if not value > 0:
                raise FusionError(f"{name} must be positive, got {value}")
        self.floor = floor
        self.tolerance = tolerance
        self.max_iterations = max_iterations


@register_fusion("ivar_mle")
class InverseVarianceMLE(_InverseVariance):
    r"""Maximum likelihood of the ground truth y and of one noise variance per client.

    .. math:: y_i \leftarrow \frac{\sum_{j \in J_i} x_{ij} / \sigma_j^2}{\sum_{j \in J_i} 1/\sigma_j^2}, \qquad
              \sigma_j^2 \leftarrow \max\Bigl(\varepsilon,
                \frac{1}{P |I_j|} \sum_{i \in I_j} \|x_{ij} - y_i\|^2\Bigr)

    When to use it: clients of unknown quality, more than a few. It needs neither weights nor a bound on the number of
    bad clients. The likelihood is unbounded (a client whose variance goes to 0 captures y), so three things belong to
    the method: it starts at the geometric median, which a minority of arbitrary clients cannot move far; variances
    stay above ε; and the number of iterations is bounded. One client may still capture y, mostly of a handful of
    near-equal ones; the answer then is that client's. ``ivar_vb`` has no such trap.

    Args:
        memory: how much a round counts in the next, see :class:`~lightning_fedbayes.fusion.InferredRule`.
        floor: ε in units of the lower quartile of the clients' mean squared distances to the geometric median.
        tolerance: stop when no share changes by more.
        max_iterations: stop after so many iterations in any case; each costs O(K²).

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
    :math:`\sigma_j^2 = \lambda + \|x_j - \bar y\|^2 / P` (averages over rounds). x and y are updates, so what the
    prior pulls towards is the previous global posterior; the pull is noticeable only where the clients' noise
    drowns the update.

    When to use it: the default among rules for clients that cannot be trusted. The posterior variance λ enters every
    noise variance, so that a client captures y less easily than under maximum likelihood; of few clients and few
    parameters one still can. It follows those who agree: clients with much data of their own kind may look like noise.

    Args:
        memory: how much a round counts in the next, see :class:`~lightning_fedbayes.fusion.InferredRule`.
        floor: least noise variance in units of the lower quartile of the clients' mean squared distances to the
            geometric median, where the iterations start.
        tolerance: stop when no share changes by more.
        max_iterations: stop after so many iterations in any case; each costs O(K²).

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
    """One pass of eq. (10) to (13): the coefficients of the posterior mean, the new noise and signal variances.

    Args:
        distances: see :meth:`InferredRule.infer`.
        noise: σ², shape (K,).
        signal: τ², a scalar.
        least: bound of the noise variances.
    """
    posterior_variance = 1 / (1 / signal + (1 / noise).sum())
    coefficients = posterior_variance / noise
    point = torch.cat([coefficients, 1 - coefficients.sum(0, keepdim=True)])
    squares = squared_lengths(distances, torch.eye(len(point), dtype=torch.float64) - point[:, None])
    moments = posterior_variance + squares
    return coefficients, moments[:-1].clamp_min(least), moments[-1]


def evidence(distances: Tensor, noise: Tensor, signal: Tensor) -> Tensor:
    r"""The log evidence per parameter, :math:`\log N(x; 0, \tau^2 1 1^\top + \mathrm{diag}(\sigma^2))`.

    It is the free energy of eq. (10) and (11), whose posterior is exact.

    Args:
        distances, noise, signal: see :func:`coordinate_ascent`.
    """
    covariance = signal + torch.diag(noise)
    quadratic = (torch.linalg.inv(covariance) * gram_about_last(distances)).sum()
    constant = len(noise) * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))
    return -(constant + torch.logdet(covariance) + quadratic) / 2
