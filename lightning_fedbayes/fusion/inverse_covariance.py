"""Inverse-covariance weighting: the covariance of the clients' errors is inferred from the updates."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
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
    lower_quartile,
    residuals,
    signal_of,
)
from lightning_fedbayes.fusion.latent_noise import MOVED, Latent, climb, least_squares, start, update_spread
from lightning_fedbayes.fusion.registry import register_fusion

UNLIKE = 0.2
"""Part by which the products of the clients that gain may differ from those across."""
CERTAIN = 3.0
"""Standard errors from which on a client certainly lacks part of y."""
SURE = 2.0
"""Standard errors from which on that difference counts."""
LONG = 4.0
"""Squared length of an update, in units of the lower quartile, from which on its coefficient in the average falls."""
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
        alone = len(distances) == 2  # clients that all send nearly the same count as one
        coefficients = torch.ones(1, dtype=torch.float64) if alone else self.solve(distances, size)
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

    The model has errors independent of y, and then of two combinations of sum 1 the shorter has the smaller error.
    Clients that do not hold the whole of y violate that. So the result starts from an average and leaves it for the
    estimate of the model only as far as the updates show that this is better:

    * Clients that certainly lack y or send its opposite count 0, long updates less, see :func:`bounded_average`.
    * The clients that gain must be able to hold the whole of y, see :func:`plausible`.
    * The result goes towards the estimate up to the shortest point, less a standard error, see
      :func:`as_far_as_certain`. With few parameters that is not far.
    * A round counts less the less the fused update of the round before moved the global model, see
      :func:`~lightning_fedbayes.fusion.inferred.progress`.

    What holds (``tests/fusion/test_inverse_covariance.py``): an error that half of the clients share costs next to
    nothing, however large it is, from some 1,000 parameters on (at most 10 % more than the best linear estimate). In
    regression on 50 parameters, where three of five clients have the same data, the result is the average or better.
    One of five clients, or three of ten, that send the opposite, nothing, ten times their update or noise cost at most
    10 % with 3,000 parameters.

    What does not: noise of one to three times the honest length from two of five clients is taken in as by the
    average, and with 50 parameters so is such noise from one. Products of updates need not tell: three of five clients
    with one error, and three that are right beside two who hold less of y and have one, can have the same. Where
    clients differ otherwise than by errors that are independent of y (other steps, other curvature), the estimate can
    be worse than the average, by a tenth in regression with five examples for each parameter.

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
        """Go from the average of those that may hold y towards the estimate among them, as far as is certain."""
        average = bounded_average(gram_about_last(distances), size)
        holders = average > 0
        points = torch.cat([holders, torch.ones(1, dtype=torch.bool)])
        among, begin = distances[points][:, points], average[holders]
        if len(begin) > 1:
            average[holders] = self.improved(begin, among, size)
        return average

    def improved(self, begin: Tensor, distances: Tensor, size: int) -> Tensor:
        """Maximise the free energy, solve eq. (3), and move ``begin`` towards the first result that is plausible.

        If that with y's prior is not, the prior is made flat: only differences between clients count then.
        """
        scale, begun, least = self.begin(distances)
        products = gram_about_last(distances) / scale
        for model, moved in ((begun, MOVED), (replace(begun, signal=FLAT * begun.signal), ("features", "noise"))):
            fitted = model
            for _ in range(OUTER):
                fitted = climb(update_spread(fitted, products, size), products, size, least, INNER, moved)
            estimate = least_squares(fitted.covariance())
            if plausible(estimate, products, size):
                return as_far_as_certain(begin, estimate, products, size)
        return begin

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


def bounded_average(products: Tensor, size: int) -> Tensor:
    r"""Return the average's coefficients, shape (K,), of sum 1, with bounds on what a client can do.

    A client counts :math:`\min(1, 4 l / l_j)^2`, where :math:`l_j` is the squared length of its update and l the lower
    quartile, which a majority that sends noise does not raise. Lengths, and not distances: where three of five clients
    have a common error they lie near each other and far from the other two, but all five have nearly the same length.

    It counts 0 if it certainly lacks y, see :func:`lacking`, or if its product with that average is below 0 by three
    standard errors.

    Args:
        products: mean products of the clients' updates, shape (K, K).
        size: number of parameters P.
    """
    lengths = products.diagonal()
    least = lengths[lower_quartile(lengths)]
    weights = torch.where(lengths > LONG * least, LONG * least / lengths, 1.0).square()
    weights = weights.masked_fill(lacking(products, weights, size), 0)
    average = weights / weights.sum()
    along = products @ average
    left = weights.masked_fill(along < -CERTAIN * (lengths * (average @ along) / size).sqrt(), 0)
    return left / left.sum()


def lacking(products: Tensor, weights: Tensor, size: int) -> Tensor:
    r"""Return a mask, shape (K,): True for a client that certainly holds less than half of y.

    Where errors are independent of y, :math:`x_j \cdot x_k` is y's squared length, unless j and k share an error. So
    that length is the median over the clients of each one's median product with the others, if most hold y and no more
    than half of one's products are with a group of its own. A client lacks y if its median product is below half of
    that, and its mean product with the others of whom that is not so is below it by three standard errors.

    Args:
        products: mean products of the clients' updates, shape (K, K).
        weights: of the others in the mean, shape (K,).
        size: number of parameters P.
    """
    count = len(products)
    apart = ~torch.eye(count, dtype=torch.bool)
    others = products[apart].view(count, count - 1)
    medians = others.sort(1).values[:, (count - 2) // 2]
    half = medians.sort().values[(count - 1) // 2] / 2
    means = weights * (apart & (medians >= half))
    means = means / means.sum(1, keepdim=True)
    mean, lengths = (means * products).sum(1), (means @ products * means).sum(1)
    doubt = CERTAIN * ((products.diagonal() * lengths + mean.square()) / size).sqrt()
    return (half > 0) & (medians < half) & (mean + doubt < half)


def as_far_as_certain(begin: Tensor, towards: Tensor, products: Tensor, size: int) -> Tensor:
    r"""Return :math:`\kappa a + (1 - \kappa) b`, the part κ of the way from coefficients b to a, both of sum 1.

    .. math:: \kappa = \frac{x_b^\top d - \|x_a\| \|d\| / \sqrt P}{\|d\|^2}, \qquad d = x_b - x_a

    between 0 and 1, where :math:`x_a = a^\top x` and :math:`x_b = b^\top x`. d contains errors alone; if they are
    independent of y, :math:`x_b^\top d / \|d\|^2` estimates the part of the way at which the error is least, with a
    standard error of :math:`\|y\| / (\|d\| \sqrt P)`.

    Args:
        begin: b, shape (K,).
        towards: a, shape (K,).
        products: mean products of the clients' updates, shape (K, K).
        size: number of parameters P.
    """
    apart = begin - towards
    spread, length = apart @ products @ apart, towards @ products @ towards
    if spread <= 0:
        return towards
    doubt = (length * spread / size).clamp_min(0).sqrt()
    part = ((begin @ products @ apart - doubt) / spread).clamp(0, 1)
    return part * towards + (1 - part) * begin


def plausible(coefficients: Tensor, products: Tensor, size: int) -> bool:
    r"""Return whether those who gain over the average may hold as much of y in common as they share with the others.

    With gains :math:`a = (c - 1/K)_+` and losses :math:`b = (1/K - c)_+`, where errors are independent of y and the
    two sides share none, both sides of

    .. math:: \frac{\sum_{j \ne k} a_j a_k \, x_j \cdot x_k}{\sum_{j \ne k} a_j a_k} \approx
              \frac{\sum_{jk} a_j b_k \, x_j \cdot x_k}{\sum_{jk} a_j b_k}

    are y's squared length. Clients that hold a part g of y alone, since they take fewer steps say, have :math:`g^2` on
    the left and g on the right; those who send noise have 0, and the opposite of y a negative right side. So they must
    not differ by more than a fifth and two standard errors, and the right side must be above 0 by as many. One client
    that gains alone has no such products. Fewer than half of the clients may be those who hold the same part of y, so
    with their coefficients at least four fifths of the average's update must be left.

    Args:
        coefficients: c, shape (K,), of sum 1.
        products: mean products of the clients' updates, shape (K, K).
        size: number of parameters P.
    """
    count = len(coefficients)
    gains, losses = (coefficients - 1 / count).clamp_min(0), (1 / count - coefficients).clamp_min(0)
    among = torch.outer(gains, gains).fill_diagonal_(0)
    across = torch.outer(gains, losses)
    kept, whole = float(coefficients @ products.mean(1)), float(products.mean())
    if not bool(among.any()) or (2 * int((gains > 0).sum()) < count and kept < (1 - UNLIKE) * whole):
        return False
    among, across = among / among.sum(), (across + across.T) / (2 * across.sum())
    both = float((across * products).sum())
    apart, doubt = float((among * products).sum()) - both, SURE * standard_error(among - across, products, size)
    return both > SURE * standard_error(across, products, size) and abs(apart) <= UNLIKE * both + doubt


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
        self,
        latent: int = 2,
        memory: float = 1.0,
        floor: float = 0.01,
        tolerance: float = 1e-6,
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
