r"""Inverse-covariance weighting: the covariance of the clients' errors is inferred from the updates.

In all functions ``products``, shape (K, K), are the mean products :math:`S_{jk} = x_j \cdot x_k / P` of the clients'
updates, and ``size`` is the number of parameters P.
"""

import contextlib
import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # pyright: ignore[reportAttributeAccessIssue]

from lightning_fedbayes.core.errors import FusionError, check_at_least, check_flag, check_number
from lightning_fedbayes.fusion import inferred
from lightning_fedbayes.fusion.registry import register_fusion

MOVED = ("features", "noise", "signal")
"""Estimates that :func:`climb` changes."""
UNLIKE = 0.2
"""Part by which the products among clients that gain may differ from the products across."""
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

PRINTED = 100
"""Number of times that the equations of the source are applied as they are printed."""


@dataclass(frozen=True)
class Latent:
    r"""Estimates of the latent noise model, K clients and D features: errors of clients have common causes.

    .. math:: x_j = y + u^\top v_j + e_j, \qquad e_j \sim N(0, \sigma_j^2), \quad u \sim N(0, I_D), \quad
              y \sim N(0, \tau^2)

    for every parameter: [Untrusted] eq. (8) with :math:`\sigma_u = 1` (v has the scale) and the noise per client of
    Algorithm 2, line 2. ``features`` are posterior means of v, (K, D), with covariances ``spread``, (K, D, D), and
    prior variance ``feature_variance``. ``noise`` is :math:`\sigma_j^2`, (K,), and ``signal`` τ².
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


def as_printed(products: Tensor, size: int, features: Tensor, steps: int = PRINTED) -> Tensor:
    r"""Return the covariance of the clients' errors, (K, K), after ``steps`` times eq. (14) to (23) of the source.

    .. math:: x_j = y + u^\top v_j + e_j, \quad e_j \sim N(0, \sigma^2), \qquad
              \Phi = \sigma_u^2 V V^\top + \sigma^2 I

    They begin with ``features`` V, (K, D), and with all variances at 1. Means are linear in the updates,
    :math:`\bar y = \sum_j a_j x_j` and :math:`\bar u = \sum_j b_j x_j`, so that products are enough.
    """
    eye, each = (torch.eye(n, dtype=products.dtype) for n in features.shape[::-1])
    signal = spread_u = spread_v = noise = torch.ones((), dtype=products.dtype)
    covariances, of_u = eye.expand(len(each), -1, -1), torch.zeros_like(features)
    for _ in range(steps):
        precision = (1 / noise).expand(len(each))
        doubt = 1 / (1 / signal + precision.sum())  # (14)
        of_y = doubt * (precision - of_u @ (features.T @ precision))  # (15)
        loadings = features * precision[:, None]
        covariance = torch.linalg.inv(
            eye / spread_u + (precision[:, None, None] * covariances).sum(0) + loadings.T @ features
        )  # (16)
        of_u = (loadings - torch.outer(of_y, loadings.sum(0))) @ covariance  # (17)
        moments = covariance + of_u.T @ products @ of_u
        covariances = torch.linalg.inv(eye / spread_v + size * precision[:, None, None] * moments)  # (18)
        residual = each - of_y[:, None]  # column j: x_j - y
        along = residual.T @ products @ of_u
        features = size * precision[:, None] * (covariances @ along[..., None])[..., 0]  # (19)
        squares = covariances + features[:, :, None] * features[:, None, :]
        signal, spread_u = doubt + of_y @ products @ of_y, moments.diagonal().mean()  # (20), (21)
        spread_v = squares.diagonal(dim1=1, dim2=2).mean()  # (22)
        left = doubt + (residual * (products @ residual)).sum(0) - 2 * (along * features).sum(1)
        noise = (left + (moments * squares).sum((1, 2))).mean()  # (23)
    return spread_u * features @ features.T + noise * each


def posterior_of_truth(latent: Latent) -> tuple[Tensor, Tensor]:
    r"""Return the Gaussian q(y, u): one precision for all parameters, and a mean that is linear in x.

    With :math:`z_j = (1, v_j)` its precision is
    :math:`A = \mathrm{diag}(1/\tau^2, I) + \sum_j \sigma_j^{-2} (z_j z_j^\top + \mathrm{diag}(0, \Psi_j))` and its mean
    :math:`A^{-1} \sum_j \sigma_j^{-2} z_j x_j`. The source's factorised bound, eq. (14) to (17), is looser.

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
    """Return the lower bound of the log evidence per parameter for the best q(y, u)."""
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
    return replace(latent, spread=spread, feature_variance=squares / max(latent.features.numel(), 1))


def climb(
    latent: Latent, products: Tensor, size: int, least: float, steps: int, moved: tuple[str, ...] = MOVED
) -> Latent:
    """Maximise the free energy over ``moved`` by L-BFGS, noise from ``least``: coordinate ascent is far too slow."""
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

    ends: dict[str, Any] = {"max_iter": steps, "tolerance_grad": 1e-9, "tolerance_change": 1e-12}
    optimizer = torch.optim.LBFGS(free.values(), history_size=20, line_search_fn="strong_wolfe", **ends)
    with torch.enable_grad(), contextlib.suppress(LinAlgError):  # singular: keep the best so far
        optimizer.step(loss)  # pyright: ignore[reportArgumentType]
    return best


def start(residual: Tensor, noise: Tensor, signal: Tensor, count: int) -> Latent:
    """Return first estimates for ``count`` features: 0.3 times the leading principal components of ``residual``."""
    values, vectors = torch.linalg.eigh(residual)
    features = 0.3 * vectors.flip(1)[:, :count] * values.flip(0)[:count].clamp_min(0).sqrt()
    prior = features.square().mean().clamp_min(float(noise.mean()) * 1e-3) if count else signal
    spread = torch.eye(count, dtype=noise.dtype).expand(len(noise), count, count) * (prior * 1e-3)
    return Latent(features.contiguous(), spread, prior, noise, signal)


class _InverseCovariance(inferred.InferredRule):
    """Arguments of both estimators: the number of features, and the least noise."""

    def __init__(self, latent: int, memory: float, floor: float) -> None:
        super().__init__(memory)
        check_at_least("latent", latent, 0, error=FusionError)
        check_number("floor", floor, "[1e-12, inf)", error=FusionError, why="less has no inverse")
        self.latent, self.floor = latent, floor

    def infer(self, distances: Tensor, size: int) -> tuple[Tensor, Tensor]:
        one = len(distances) == 2  # clients that all send nearly the same count as one
        coefficients = torch.ones(1, dtype=torch.float64) if one else self.solve(distances, size)
        positive = coefficients.clamp_min(0)
        return coefficients, positive / positive.sum()

    @abstractmethod
    def solve(self, distances: Tensor, size: int) -> Tensor:
        """Return coefficients of generalised least squares, shape (K,), of sum 1. See :meth:`InferredRule.infer`."""


@register_fusion("icov_vb")
class InverseCovarianceVB(_InverseCovariance):
    r"""Generalised least squares with the covariance of the clients' errors inferred by variational Bayes.

    .. math:: x_j = y + u^\top v_j + e_j, \quad e_j \sim N(0, \sigma_j^2), \qquad
              y = \frac{1^\top \Phi^{-1} x}{1^\top \Phi^{-1} 1}, \quad \Phi = V V^\top + \mathrm{diag}(\sigma^2)

    When to use it: clients share data or have correlated errors, so that equal weights count the same evidence many
    times. With the right number of latent features it comes close to the best linear estimate. It costs more than
    ``ivar_vb``, which is as good where errors are independent.

    Clients that hold only a part of y violate the model. So the result starts from an average and moves to the model's
    estimate only as far as the updates show that this is better: see :func:`bounded_average`, :func:`plausible`,
    :func:`as_far_as_certain` and :func:`~lightning_fedbayes.fusion.inferred.progress`. With few parameters it stays at
    the average. ``benchmarks/untrusted`` has figures.

    y and u are inferred jointly by L-BFGS on the free energy. The source factorises them, has one σ² for all clients,
    and uses coordinate ascent: ``printed`` does as it says.

    Args:
        latent: number of latent features D: groups of clients with a common error. At most K − 1 are used, with
            ``printed`` all.
        memory: discount of earlier rounds, see :class:`~lightning_fedbayes.fusion.InferredRule`.
        floor: least noise variance in units of the lower quartile of the clients' mean squared distances to the
            geometric median, the start of the search.
        printed: take :func:`as_printed` alone, from V ~ N(0, 1) and variances of 1 in the updates' own unit.
            Independent adversaries take one feature each, so ``latent`` must be at least their number.
        seed: of these draws.

    Source: [Untrusted] Algorithm 2, eq. (3), (8), (14) to (23).
    """

    by_progress: ClassVar[bool] = True

    def __init__(
        self, latent: int = 2, memory: float = 1.0, floor: float = 1e-3, printed: bool = False, seed: int = 0
    ) -> None:
        super().__init__(latent, memory, floor)
        check_flag("printed", printed, error=FusionError)
        check_at_least("latent", latent, int(printed), error=FusionError)
        check_at_least("seed", seed, 0, 2**63 - 1, error=FusionError)
        self.printed, self.seed = printed, seed

    def solve(self, distances: Tensor, size: int) -> Tensor:
        """Go from the average of clients that may hold y towards the estimate among them, as far as is certain."""
        products = inferred.gram_about_last(distances)
        if self.printed:
            drawn = torch.Generator().manual_seed(self.seed)
            features = torch.randn(len(products), self.latent, generator=drawn, dtype=torch.float64)
            return least_squares(as_printed(products, size, features))
        average = bounded_average(products, size)
        holders = average > 0
        points = torch.cat([holders, torch.ones(1, dtype=torch.bool)])
        among, begin = distances[points][:, points], average[holders]
        if len(begin) > 1:
            average[holders] = self.improved(begin, among, size)
        return average

    def improved(self, begin: Tensor, distances: Tensor, size: int) -> Tensor:
        """Move ``begin`` towards the first plausible solution of eq. (3), with y's prior or with a flat one."""
        scale, begun, least = self.begin(distances)
        products = inferred.gram_about_last(distances) / scale
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
        shares = inferred.consensus(distances)
        noise = inferred.residuals(distances[:-1, :-1], shares)
        least = inferred.least_noise(noise, self.floor)
        noise, signal = noise.clamp_min(least), inferred.signal_of(distances, shares).clamp_min(least)
        scale = noise.median()
        residual = inferred.centred_products(distances[:-1, :-1], shares)
        begun = start(residual / scale, noise / scale, signal / scale, min(self.latent, len(noise) - 1))
        return scale, begun, least / float(scale)


def bounded_average(products: Tensor, size: int) -> Tensor:
    r"""Return the average's coefficients, shape (K,), of sum 1, with bounds on what a client can do.

    It counts :math:`\min(1, 4 l / l_j)^2`, with squared lengths :math:`l_j` of updates and lower quartile l, which no
    majority of noise raises, and 0 if it lacks y or its product with this is below 0 by three standard errors.
    """
    lengths = products.diagonal()
    least = lengths[inferred.lower_quartile(lengths)]
    weights = torch.where(lengths > LONG * least, LONG * least / lengths, 1.0).square()
    weights = weights.masked_fill(lacking(products, weights, size), 0)
    average = weights / weights.sum()
    along = products @ average
    left = weights.masked_fill(along < -CERTAIN * (lengths * (average @ along) / size).sqrt(), 0)
    return left / left.sum()


def lacking(products: Tensor, weights: Tensor, size: int) -> Tensor:
    r"""Return a mask, shape (K,): True for a client that certainly holds less than half of y.

    The median of the clients' median products :math:`x_j \cdot x_k` estimates y's squared length, if most hold y and at
    most half share an error. A client lacks y if its median product is below half of that, and its mean product with
    those that do not lack y, by ``weights``, is so by three standard errors.
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
    r"""Return :math:`\kappa a + (1 - \kappa) b`, the part κ of the way from ``begin`` b to ``towards`` a, of sum 1.

    .. math:: \kappa = \frac{x_b^\top d - \|x_a\| \|d\| / \sqrt P}{\|d\|^2}, \qquad d = x_b - x_a

    between 0 and 1, where :math:`x_a = a^\top x` and :math:`x_b = b^\top x`: :math:`x_b^\top d / \|d\|^2` estimates the
    part with the least error, if errors are independent of y, with a standard error of :math:`\|y\| / (\|d\| \sqrt P)`.
    """
    apart = begin - towards
    spread, length = apart @ products @ apart, towards @ products @ towards
    if spread <= 0:
        return towards
    doubt = (length * spread / size).clamp_min(0).sqrt()
    part = ((begin @ products @ apart - doubt) / spread).clamp(0, 1)
    return part * towards + (1 - part) * begin


def plausible(coefficients: Tensor, products: Tensor, size: int) -> bool:
    r"""Return True if clients that gain over the average may hold as much of y as they share with the others.

    With gains :math:`a = (c - 1/K)_+` and losses :math:`b = (1/K - c)_+` of the ``coefficients`` c, both sides of

    .. math:: \frac{\sum_{j \ne k} a_j a_k \, x_j \cdot x_k}{\sum_{j \ne k} a_j a_k} \approx
              \frac{\sum_{jk} a_j b_k \, x_j \cdot x_k}{\sum_{jk} a_j b_k}

    are y's squared length, if errors are independent. They may differ by at most a fifth and two standard errors, and
    the right side must exceed 0 by as many: a part g of y gives :math:`g^2` and g, noise 0. If fewer than half of the
    clients gain, at least four fifths of the average's update must be left.
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
    :math:`\delta = x - y 1`, by expectation maximisation, which needs no step size.

    When to use it: for comparison. The likelihood is unbounded and y is not integrated out, so errors common to the
    clients near y are not found. The source also finds it unreliable. Use ``icov_vb``.

    Args: see :class:`InverseCovarianceVB`. Iterations end at ``max_iterations``, or at moves within ``tolerance``.

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
        self.tolerance, self.max_iterations = tolerance, max_iterations

    def solve(self, distances: Tensor, size: int) -> Tensor:
        """Alternate between eq. (3) and a step of expectation maximisation for the covariance."""
        clients = distances[:-1, :-1]
        coefficients = inferred.consensus(distances)
        noise = inferred.residuals(clients, coefficients)
        least = inferred.least_noise(noise, self.floor)
        count = min(self.latent, len(noise) - 1)
        scale = noise.clamp_min(least).median()
        begun = start(inferred.centred_products(clients, coefficients), noise.clamp_min(least), scale, count)
        features, noise = begun.features, begun.noise
        for _ in range(self.max_iterations):
            before = coefficients
            residual = inferred.centred_products(clients, coefficients)
            features, noise = expectation_maximisation(features, noise, residual, least)
            coefficients = least_squares(features @ features.T + torch.diag(noise))
            if bool((coefficients - before).abs().max() <= self.tolerance):
                break
        return coefficients


def expectation_maximisation(
    features: Tensor, noise: Tensor, residual: Tensor, least: float = 0.0
) -> tuple[Tensor, Tensor]:
    r"""Return V and σ² of :math:`\Phi = V V^\top + \mathrm{diag}(\sigma^2)` after a step of factor analysis."""
    towards = torch.linalg.solve(features @ features.T + torch.diag(noise), features)
    moments = torch.eye(features.shape[1], dtype=noise.dtype) - towards.T @ features + towards.T @ residual @ towards
    loaded = residual @ towards
    features = torch.linalg.solve(moments, loaded.T).T
    return features, (residual.diagonal() - (features * loaded).sum(1)).clamp_min(least)
