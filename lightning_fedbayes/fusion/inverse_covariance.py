"""Inverse-covariance weighting: the covariance of the clients' errors is inferred from the updates."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, check_at_least, check_number
from lightning_fedbayes.fusion.inferred import (
    InferredRule,
    centred_products,
    consensus,
    gram_about_last,
    least_noise,
    residuals,
    signal_of,
)
from lightning_fedbayes.fusion.latent_noise import MOVED, Latent, climb, least_squares, start, update_spread
from lightning_fedbayes.fusion.registry import register_fusion

PLAUSIBLE = 0.8
"""Part of the consensus' update below which the result shows that errors depend on y, against the model."""
SURE = 2.0
"""Standard errors within which the products of the clients that gain must agree with those across."""
FLAT = 1e3
"""Factor of the prior variance of y where only differences between clients shall count."""
OUTER, INNER = 2, 60
"""Number of updates of the features' posterior, and of quasi-Newton steps after each."""


class _InverseCovariance(InferredRule):
    """Arguments of both ways of estimating: the number of features, and the least noise."""

    def __init__(self, latent: int, memory: float, floor: float) -> None:
        super().__init__(memory)
        check_at_least("latent", latent, 0, error=FusionError)
        check_number("floor", floor, "[1e-12, inf)", error=FusionError, why="less has no inverse")
        self.latent = latent
        self.floor = floor

    def infer(self, distances: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """See :meth:`InferredRule.infer`."""
        coefficients = self.solve(distances, size)
        positive = coefficients.clamp_min(0)
        return coefficients, positive / positive.sum()

    @abstractmethod
    def solve(self, distances: Tensor, size: int) -> Tensor:
        """Return coefficients of generalised least squares, shape (K,), of sum 1; see :meth:`InferredRule.infer`."""


@register_fusion("icov_vb")
class InverseCovarianceVB(_InverseCovariance):
    r"""Generalised least squares with the covariance of the clients' errors inferred by variational Bayes.

    .. math:: x_j = y + u^\top v_j + e_j, \quad e_j \sim N(0, \sigma_j^2), \qquad
              y = \frac{1^\top \Phi^{-1} x}{1^\top \Phi^{-1} 1}, \quad \Phi = V V^\top + \mathrm{diag}(\sigma^2)

    When to use it: clients share data or have correlated errors, so that equal weights count the same evidence many
    times. With the right number of latent features it comes close to the best linear estimate. It costs more than
    ``ivar_vb``, which is as good where errors are independent.

    The model has errors independent of y. Clients whose updates differ in length, have the opposite sign or are 0
    violate that, and the model would then take part of what the others agree on for error. So where less than four
    fifths of the geometric median's update would be left, the clients that gain have to confirm each other, see
    :func:`confirmed`. Else the prior of y is made flat: only differences between clients count then, and nothing that
    all of them have in common is taken for error.

    What holds: an error that half of the clients share costs next to nothing, however large it is, from some 1,000
    parameters on (at most 10 % more than the best linear estimate; ``tests/fusion/test_inverse_covariance.py``).

    What does not: with fewer parameters, or where more than half of the clients share an error, a tight group is taken
    for precise, and the result can be worse than the average. Products of updates need not tell: three of five clients
    with one error, and three that are right beside two who hold less of y and have one, can have the same.

    y and u are inferred jointly, and the free energy is maximised by L-BFGS (see ``latent_noise.py``). The source
    factorises them and uses coordinate ascent; where clients share data that stays at nearly equal weights.

    Args:
        latent: number of latent features D: groups of clients with a common error. At most K − 1 are used.
        memory: discount of earlier rounds, see :class:`~lightning_fedbayes.fusion.InferredRule`.
        floor: least noise variance in units of the lower quartile of the clients' mean squared distances to the
            geometric median, where the search starts.

    Source: [Untrusted] Algorithm 2, eq. (3), (8), (14) to (23).
    """

    def __init__(self, latent: int = 2, memory: float = 1.0, floor: float = 1e-3) -> None:
        super().__init__(latent, memory, floor)

    def solve(self, distances: Tensor, size: int) -> Tensor:
        """Maximise the free energy, then solve eq. (3)."""
        scale, begun, least = self.begin(distances)
        products = gram_about_last(distances) / scale
        coefficients = least_squares(self.fitted(begun, products, size, least).covariance())
        agreed = consensus(distances)
        kept = float(coefficients @ products @ agreed) / float(agreed @ products @ agreed)
        if kept >= PLAUSIBLE or confirmed(coefficients, products, size):
            return coefficients
        flat = replace(begun, signal=begun.signal * FLAT)
        return least_squares(self.fitted(flat, products, size, least, ("features", "noise")).covariance())

    @staticmethod
    def fitted(begun: Latent, products: Tensor, size: int, least: float, moved: tuple[str, ...] = MOVED) -> Latent:
        """Return the estimates of the highest free energy that the search from ``begun`` finds."""
        model = begun
        for _ in range(OUTER):
            model = climb(update_spread(model, products, size), products, size, least, INNER, moved)
        return model

    def begin(self, distances: Tensor) -> tuple[Tensor, Latent, float]:
        """Return the unit of variance and, in that unit, first estimates and the least noise variance."""
        shares = consensus(distances)
        noise = residuals(distances[:-1, :-1], shares)
        least = least_noise(noise, self.floor)
        scale = noise.clamp_min(least).median()
        residual = centred_products(distances[:-1, :-1], shares)
        signal = signal_of(distances, shares).clamp_min(least)
        count = min(self.latent, len(noise) - 1)
        begun = start(residual / scale, noise.clamp_min(least) / scale, signal / scale, count)
        return scale, begun, least / float(scale)


def confirmed(coefficients: Tensor, products: Tensor, size: int) -> bool:
    r"""Return whether those who gain over the average hold as much of y in common as they share with the others.

    With gains :math:`a = (c - 1/K)_+` and losses :math:`b = (1/K - c)_+`, where errors are independent of y and the
    two sides share none, both sides of

    .. math:: \frac{\sum_{j \ne k} a_j a_k \, x_j \cdot x_k}{\sum_{j \ne k} a_j a_k} \approx
              \frac{\sum_{jk} a_j b_k \, x_j \cdot x_k}{\sum_{jk} a_j b_k}

    are y's squared length. Clients that hold a part g of y alone, since they take fewer steps say, have :math:`g^2` on
    the left and g on the right; those who send noise have 0, and the opposite of y a negative right side. The two must
    agree within a fifth, two standard errors included, and at least half of the clients must gain: a smaller group
    can choose its products, and one client has none.

    Args:
        coefficients: c, shape (K,), of sum 1.
        products: mean products of the clients' updates, shape (K, K).
        size: number of parameters P.
    """
    count = len(coefficients)
    gains, losses = (coefficients - 1 / count).clamp_min(0), (1 / count - coefficients).clamp_min(0)
    if 2 * int((gains > 0).sum()) < max(count, 4):
        return False
    among = torch.outer(gains, gains).fill_diagonal_(0)
    across = torch.outer(gains, losses)
    among, across = among / among.sum(), (across + across.T) / (2 * across.sum())
    both = float((across * products).sum())
    apart = float((among * products).sum()) - both
    return abs(apart) + SURE * standard_error(among - across, products, size) <= (1 - PLAUSIBLE) * both


def standard_error(form: Tensor, products: Tensor, size: int) -> float:
    r"""Return the standard error of :math:`\mathrm{tr}(M G)`, G the mean products of normal updates of P parameters.

    .. math:: \sqrt{2 \, \mathrm{tr}(M G M G) / P}
    """
    spread = form @ products
    return math.sqrt(max(2 * float((spread * spread.T).sum()), 0.0) / size)


@register_fusion("icov_mle")
class InverseCovarianceMLE(_InverseCovariance):
    r"""Generalised least squares with the covariance of the clients' errors inferred by maximum likelihood.

    .. math:: y \leftarrow \frac{1^\top \Phi^{-1} x}{1^\top \Phi^{-1} 1}, \qquad
              \Phi = V V^\top + \mathrm{diag}(\sigma^2)

    where V and σ² maximise the log-likelihood :math:`-\log|\Phi| - \delta^\top \Phi^{-1} \delta`,
    :math:`\delta = x - y 1`, by expectation maximisation, which has the stationary points of the gradients (9a) to
    (9c) and no step size.

    When to use it: for comparison. The likelihood is unbounded and y is not integrated out, so errors common to the
    clients near y are not found; the source also finds it unreliable. Use ``icov_vb``.

    Args:
        latent: number of latent features D; at most K − 1 are used.
        memory: discount of earlier rounds, see :class:`~lightning_fedbayes.fusion.InferredRule`.
        floor: ε, least noise variance in units of the lower quartile of the clients' mean squared distances to the
            geometric median, where the iterations start.
        tolerance: stop when no coefficient changes by more.
        max_iterations: bound of the number of iterations.

    Source: [Untrusted] eq. (3), (9a) to (9c), Algorithm 2.
    """

    def __init__(
        self, latent: int = 2, memory: float = 1.0, floor: float = 0.01, tolerance: float = 1e-6,
        max_iterations: int = 100,
    ) -> None:
        super().__init__(latent, memory, floor)
        check_number("tolerance", tolerance, "[0, inf)", error=FusionError)
        check_at_least("max_iterations", max_iterations, 1, error=FusionError)
        self.tolerance = tolerance
        self.max_iterations = max_iterations

    def solve(self, distances: Tensor, size: int) -> Tensor:
        """Alternate between eq. (3) and a step of expectation maximisation for the covariance."""
        clients = distances[:-1, :-1]
        coefficients = consensus(distances)
        noise = residuals(clients, coefficients)
        least = least_noise(noise, self.floor)
        count = min(self.latent, len(noise) - 1)
        scale = noise.clamp_min(least).median()
        begun = start(centred_products(clients, coefficients), noise.clamp_min(least), scale, count)
        features, noise = begun.features, begun.noise
        for _ in range(self.max_iterations):
            before = coefficients
            residual = centred_products(clients, coefficients)
            features, noise = expectation_maximisation(features, noise, residual, least)
            coefficients = least_squares(features @ features.T + torch.diag(noise))
            if bool((coefficients - before).abs().max() <= self.tolerance):
                break
        return coefficients


def expectation_maximisation(
    features: Tensor, noise: Tensor, residual: Tensor, least: float = 0.0
) -> tuple[Tensor, Tensor]:
    r"""Return V and σ² of :math:`\Phi = V V^\top + \mathrm{diag}(\sigma^2)` after one step (factor analysis).

    Args:
        features: V, shape (K, D).
        noise: σ², shape (K,).
        residual: mean products of the clients' differences to y, shape (K, K).
        least: bound below the noise variances.
    """
    towards = torch.linalg.solve(features @ features.T + torch.diag(noise), features)
    moments = torch.eye(features.shape[1], dtype=noise.dtype) - towards.T @ features + towards.T @ residual @ towards
    loaded = residual @ towards
    features = torch.linalg.solve(moments, loaded.T).T
    return features, (residual.diagonal() - (features * loaded).sum(1)).clamp_min(least)
