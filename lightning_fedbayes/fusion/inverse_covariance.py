"""Inverse-covariance weighting: the covariance of the clients' errors is inferred from the updates."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

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
from lightning_fedbayes.fusion.latent_noise import Latent, climb, least_squares, start, update_spread
from lightning_fedbayes.fusion.registry import register_fusion

KEPT = 2 / 3
"""Part of y that the coefficients of eq. (3) must keep; with less, much of y is taken for error."""
ERRORS = 2.0
"""Standard errors by which the fused update must be shorter than the average for its coefficients to count."""
CERTAIN = 3.0
"""Standard errors from which on a client, or the result, certainly lacks part of y."""
LONG = 4.0
"""Squared length of an update, in units of the lower quartile, from which on its coefficient in the average falls."""
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
        """Return coefficients of generalised least squares, shape (K,); see :meth:`InferredRule.infer`."""


@register_fusion("icov_vb")
class InverseCovarianceVB(_InverseCovariance):
    r"""Generalised least squares with the covariance of the clients' errors inferred by variational Bayes.

    .. math:: x_j = y + u^\top v_j + e_j, \quad e_j \sim N(0, \sigma_j^2), \qquad
              y = \frac{1^\top \Phi^{-1} x}{1^\top \Phi^{-1} 1}, \quad \Phi = V V^\top + \mathrm{diag}(\sigma^2)

    When to use it: clients share data or have correlated errors, so that equal weights count the same evidence many
    times. With the right number of latent features it comes close to the best linear estimate. It costs more than
    ``ivar_vb``, which is as good where errors are independent.

    What tells a group that is wrong together from one that is right together is that errors are independent of y: of
    two combinations of sum 1 the shorter has the smaller error. This can fail in three ways, each with its bound.

    * *Clients that do not hold the whole of y* send noise, the opposite sign, or 0. Then the shortest combination has
      no part in y. Coefficients therefore stay within what the clients have in common, the span of
      :math:`\tau^2 1 1^\top + V V^\top`. Where certainly less than two thirds of y would be kept, the geometric
      median takes their place.
    * *Few parameters*: in P of them y and errors are orthogonal only up to :math:`1/\sqrt P`. So the result stays on
      the average, but for the part of the way that makes it shorter by two standard errors.
    * *The end of training*: where clients keep their data, y becomes the opposite of the errors that the global model
      has taken up, and whatever combination was used is 0. So a round counts in proportion to the squared length of
      the fused update of the round before.

    What holds (``tests/fusion/test_inverse_covariance.py``): of 3,000 parameters, within 10 % of the best linear
    estimate for groups with a common error. Of 50, in regression on data that three of five parties share, the average
    and hardly better: there the clients' lengths do not show who is wrong. With a shared noise of 40 one of eight seeds
    lost 17 %, in the mean 2.6 % with a standard error as large. An update 30 times as long as the others costs little
    however few parameters there are.

    What does not hold: with 50 parameters, noise of honest length counts as much as in the average; with 4, so does an
    opposite update. With many, such noise costs less than in the average, but not nothing. If half of the clients send
    the opposite, the result is the average.

    y and u are inferred jointly, and the free energy is maximised by L-BFGS (see ``latent_noise.py``). The source
    factorises them and uses coordinate ascent; where clients share data that stays at nearly equal weights.

    Args:
        latent: number of latent features D: groups of clients with a common error. At most K − 1 are used.
        memory: discount of earlier rounds, see :class:`~lightning_fedbayes.fusion.InferredRule`.
        floor: least noise variance in units of the lower quartile of the clients' mean squared distances to the
            geometric median, where the search starts.

    Source: [Untrusted] Algorithm 2, eq. (3), (8), (14) to (23).
    """

    by_progress: ClassVar[bool] = True

    def __init__(self, latent: int = 2, memory: float = 1.0, floor: float = 1e-3) -> None:
        super().__init__(latent, memory, floor)

    def solve(self, distances: Tensor, size: int) -> Tensor:
        """Maximise the free energy, solve eq. (3), and go from the average towards the result as far as is certain."""
        scale, begun, least = self.begin(distances)
        products = gram_about_last(distances) / scale
        model = self.fitted(begun, products, size, least)
        coefficients, gains = in_common(model, size)
        agreed = consensus(distances)
        kept = least_squares(model.covariance()) @ gains.masked_fill(against_the_rest(model, size), 0)
        if kept < KEPT - CERTAIN / math.sqrt(size):
            coefficients = agreed
            gains = products @ agreed / (agreed @ products @ agreed)
        return as_far_as_certain(bounded_average(products, agreed, size), coefficients, gains, products, size)

    @staticmethod
    def fitted(begun: Latent, products: Tensor, size: int, least: float) -> Latent:
        """Return the estimates of the highest free energy that the search from ``begun`` finds."""
        model = begun
        for _ in range(OUTER):
            model = climb(update_spread(model, products, size), products, size, least, INNER)
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


def in_common(model: Latent, size: int) -> tuple[Tensor, Tensor]:
    r"""Return the coefficients of eq. (3) within what the clients have in common, and their gains: the y in each.

    In units of the clients' noise the common part :math:`\tau^2 1 1^\top + V V^\top` has eigenvalues λ and
    eigenvectors q. Of each q counts the part :math:`\lambda^2 / (\lambda^2 + \lambda_0^2)`: in a sample of P, noise
    alone has eigenvalues up to :math:`\lambda_0 = (1 + \sqrt{K / P})^2 - 1`, the Marchenko–Pastur edge. The gains are
    what is left of the vector 1, the coefficients what is left of :math:`\sum_q q (q^\top 1) / (1 + \lambda)`.

    Returns: the coefficients, shape (K,), of gain 1, and the gains, shape (K,), which are 1 where the model holds.
    """
    unit = model.noise.rsqrt()
    common = model.features @ model.features.T + model.signal
    values, vectors = torch.linalg.eigh(unit[:, None] * common * unit)
    ones = vectors.T @ unit
    edge = (1 + math.sqrt(len(unit) / size)) ** 2 - 1
    counted = ones * values.square() / (values.square() + edge**2)
    coefficients = unit * (vectors @ (counted / (1 + values.clamp_min(0))))
    gains = (vectors @ counted) / unit
    return coefficients / (coefficients @ gains), gains


def against_the_rest(model: Latent, size: int) -> Tensor:
    r"""Return a mask, shape (K,): True for a client whose errors take back more than half of y from most others.

    Its product with half of the clients, :math:`\tau^2 + v_j \cdot v_k`, is then below :math:`\tau^2 / 2`. Shared data
    make no such errors, for covariances by eq. (5) are not negative; a client that sends noise does.
    """
    products = model.features @ model.features.T + model.signal
    lengths = products.diagonal() + model.noise
    doubt = CERTAIN * (lengths[:, None] * lengths / size).sqrt()
    return (products + doubt).median(1).values < model.signal / 2


def bounded_average(products: Tensor, agreed: Tensor, size: int) -> Tensor:
    r"""Return the average's coefficients, shape (K,), of sum 1, with bounds on what a single client can do.

    A client counts :math:`\min(1, 4 l / l_j)`, where :math:`l_j` is the squared length of its update and l the lower
    quartile, which a majority that sends noise does not raise; and 0 if its cosine with the geometric median is below
    :math:`-3 / \sqrt P`, three standard errors below 0. Lengths, and not distances: where three of five clients have a
    common error they lie near each other and far from the other two, but all five have nearly the same length.

    Args:
        products: mean products of the clients' updates, shape (K, K).
        agreed: coefficients of the geometric median, shape (K,).
        size: number of parameters P.
    """
    lengths, along = products.diagonal(), products @ agreed
    against = along < -CERTAIN * (lengths * (agreed @ along) / size).sqrt()
    weights = (LONG * least_noise(lengths, 1.0) / lengths).clamp_max(1).masked_fill(against, 0)
    return weights / weights.sum()


def as_far_as_certain(begin: Tensor, towards: Tensor, gains: Tensor, products: Tensor, size: int) -> Tensor:
    r"""Return :math:`\kappa a + (1 - \kappa) b`, the part κ of the way from coefficients b to a.

    .. math:: \kappa = \frac{x_b^\top d - 2 \|x_a\| \|d\| / \sqrt P}{\|d\|^2}, \qquad d = x_b - x_a

    between 0 and 1, where :math:`x_a = a^\top x` and :math:`x_b = b^\top x`. d contains errors alone; if they are
    independent of y, :math:`x_b^\top d / \|d\|^2` estimates the part of the way at which the error is least, with a
    standard error of :math:`\|y\| / (\|d\| \sqrt P)`.

    Args:
        begin: b, shape (K,), of sum 1.
        towards: a, shape (K,), of gain 1.
        gains: part of y that each client holds, shape (K,); a is compared at the gain of b.
        products: mean products of the clients' updates, shape (K, K).
        size: number of parameters P.
    """
    gain = begin @ gains
    apart = begin - gain * towards
    spread, length = apart @ products @ apart, towards @ products @ towards
    if spread <= 0:
        return towards
    doubt = ERRORS * gain.abs() * (length * spread / size).clamp_min(0).sqrt()
    part = ((begin @ products @ apart - doubt) / spread).clamp(0, 1)
    return part * towards + (1 - part) * begin


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
