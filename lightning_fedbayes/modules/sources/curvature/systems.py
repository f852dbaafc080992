r"""Linear systems with a sum of Kronecker products as matrix, and the prior of a Laplace approximation by its evidence.

The standard deviation :math:`s = a^{-1/2}` has a half-Cauchy prior of scale 1, because the evidence can have its
maximum at s = 0 with few data. Per log a that is :math:`\sqrt{a} / (1 + a)`, negligible with many parameters.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

CONVERGED = 1e-8
"""Norm of the residual, relative to the right side, at which a solution is taken."""
CONVERGED_FORM = 1e-4
"""The same for a covariance, whose error is about the square of this."""
DENSE = 1024
"""Unknowns up to which a sum of several products is taken as the whole matrix."""
MAX_ITERATIONS = 5000
"""Steps of conjugate gradients after which the best solution so far is taken."""
LARGEST = 1e6
"""Bounds of the search for a prior precision: a standard deviation of 0.001 to 1,000."""
GRID = 50
"""Precisions of the first search, evenly spaced in their logarithm."""


@dataclass(frozen=True)
class KroneckerSystem:
    r"""The equation :math:`\sum_k B_k X A_k + p X = T` for X, shape (out, in), with p the ``prior_precision`` > 0.

    ``terms`` are symmetric, positive semidefinite (A, B), float64. The preconditioner is one Kronecker product of their
    sums, exact for a single term. ``inner`` are the eigenvalues and eigenvectors of a single A, if they are known.
    """

    terms: Sequence[tuple[Tensor, Tensor]]
    prior_precision: float
    inner: tuple[Tensor, Tensor] | None = None

    @cached_property
    def _whole(self) -> Tensor | None:
        """The sum of several products as one matrix, if it is small."""
        if len(self.terms) == 1 or self.terms[0][0].shape[0] * self.terms[0][1].shape[0] > DENSE:
            return None
        whole = torch.zeros(())
        for a, b in self.terms:
            whole = whole.to(a) + torch.kron(b.contiguous(), a.contiguous())
        return whole

    @cached_property
    def _root(self) -> Tensor:
        """Cholesky factor of the whole matrix with the prior's precision."""
        assert self._whole is not None
        return torch.linalg.cholesky(self._whole + self.prior_precision * torch.eye(len(self._whole)).to(self._whole))

    @cached_property
    def _eigenvectors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvectors of the preconditioner, (out, out) and (in, in), and its eigenvalues, (out, in)."""
        traces = [b.trace() for _, b in self.terms]
        total = torch.stack(traces).sum().clamp_min(torch.finfo(torch.float64).tiny)
        inner, outer = torch.zeros_like(self.terms[0][0]), torch.zeros_like(self.terms[0][1])
        for (a, b), trace in zip(self.terms, traces):
            inner, outer = inner + a * trace, outer + b
        inner = torch.linalg.eigh(inner / total) if self.inner is None else self.inner
        outer = torch.linalg.eigh(outer)
        scale = torch.outer(outer[0].clamp_min(0), inner[0].clamp_min(0)) + self.prior_precision
        return outer[1], inner[1], scale

    def with_prior(self, prior_precision: float) -> "KroneckerSystem":
        """Return this system with another p. It shares what was computed of the terms."""
        other = KroneckerSystem(self.terms, prior_precision, self.inner)
        known = vars(self)
        if "_whole" in known:
            vars(other)["_whole"] = known["_whole"]
        if "_eigenvectors" in known:
            outer, inner, scale = known["_eigenvectors"]
            vars(other)["_eigenvectors"] = outer, inner, scale + (prior_precision - self.prior_precision)
        return other

    def eigenvalues(self) -> Tensor:
        r"""Return the eigenvalues of :math:`\sum_k B_k \otimes A_k`. Of many and large terms the preconditioner's."""
        if self._whole is not None:
            return torch.linalg.eigvalsh(self._whole).clamp_min(0)
        return (self._eigenvectors[2] - self.prior_precision).clamp_min(0).flatten()

    def coordinates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return :meth:`eigenvalues` and the coordinates of x, (out, in), in their eigenvectors, (out · in,) each."""
        if self._whole is not None:
            values, vectors = torch.linalg.eigh(self._whole)
            return values.clamp_min(0), vectors.T @ x.flatten()
        outer, inner, _ = self._eigenvectors
        return self.eigenvalues(), (outer.T @ x @ inner).flatten()

    def _precondition(self, x: Tensor) -> Tensor:
        outer, inner, scale = self._eigenvectors
        return outer @ ((outer.T @ x @ inner) / scale) @ inner.T

    def product(self, x: Tensor) -> Tensor:
        r"""Return :math:`\sum_k B_k X A_k + p X`, shape (\*, out, in)."""
        return sum((b @ x @ a for a, b in self.terms), self.prior_precision * x)

    def covariance(self, rows: Tensor) -> Tensor:
        r"""Return :math:`J (\sum_k B_k \otimes A_k + p I)^{-1} J^\top`, (batch, O, O), of J, (batch, O, out, in)."""
        if len(self.terms) == 1:  # the preconditioner is the matrix
            outer, inner, scale = (each.to(rows) for each in self._eigenvectors)
            white = (outer.T @ rows @ inner / scale.sqrt()).flatten(2)
            return white @ white.mT
        rows = rows.to(self.terms[0][0])
        if self._whole is not None:
            white = torch.linalg.solve_triangular(self._root, rows.flatten(2).mT, upper=False)
            return white.mT @ white
        x = self.solve(rows, CONVERGED_FORM)
        found = rows.flatten(2) @ x.flatten(2).mT
        return found + found.mT - x.flatten(2) @ self.product(x).flatten(2).mT  # errors of x count by their squares

    def covariance_of_linear(self, inputs: Tensor) -> Tensor:
        """Return :meth:`covariance` of a linear layer's outputs: (batch, in), float64 → (batch, out, out), faster."""
        if self._whole is None and len(self.terms) > 1:
            eye = torch.eye(len(self.terms[0][1])).to(inputs)
            return self.covariance(torch.einsum("ni,oj->noji", inputs, eye))
        if self._whole is None:
            outer, inner, scale = (each.to(inputs) for each in self._eigenvectors)
            variances = (inputs @ inner).square() @ scale.reciprocal().T
            return torch.einsum("oc,nc,pc->nop", outer, variances, outer)
        outputs = len(self.terms[0][1])
        blocks = torch.cholesky_inverse(self._root).to(inputs).unflatten(0, (outputs, -1)).unflatten(2, (outputs, -1))
        found = inputs.new_empty(len(inputs), outputs, outputs)
        for o in range(outputs):
            for p in range(o + 1):
                found[:, o, p] = found[:, p, o] = ((inputs @ blocks[o, :, p]) * inputs).sum(1)
        return found

    def solve(self, target: Tensor, converged: float = CONVERGED) -> Tensor:
        r"""Return X for each T, (\*, out, in). Warn of a residual above ``converged`` times the norm of T."""
        if self._whole is not None:
            flat = target.reshape(-1, len(self._whole))
            return torch.cholesky_solve(flat.T, self._root).T.reshape(target.shape)
        x = torch.zeros_like(target)
        residual, bound = target.clone(), converged * _norm(target)
        step = direction = self._precondition(residual)
        slope = (residual * step).sum((-2, -1), keepdim=True)
        for _ in range(MAX_ITERATIONS):
            is_open = _norm(residual) > bound
            if not bool(is_open.any()):
                break
            moved = self.product(direction)
            length = torch.where(is_open, slope / (direction * moved).sum((-2, -1), keepdim=True), 0.0)
            x = x + length * direction
            residual = residual - length * moved
            step, before = self._precondition(residual), slope
            slope = (residual * step).sum((-2, -1), keepdim=True)
            direction = step + torch.where(is_open, slope / before, 0.0) * direction
        else:
            worst = float((_norm(residual) / _norm(target)).nan_to_num(0.0).max())
            what = f"the equations of a layer's weights are solved to {worst:.1e} only"
            warnings.warn(f"{what}: take a smaller prior_std, or damping=0.1", stacklevel=3)
        return x


def _norm(x: Tensor) -> Tensor:
    """Return the Frobenius norms, shape (*, 1, 1)."""
    return x.square().sum((-2, -1), keepdim=True).sqrt()


def chosen_precision(information: Iterable[Tensor], mean: Iterable[Tensor]) -> float:
    r"""Return the most probable precision a of the prior N(0, 1/a), by Laplace's evidence. 1 without information.

    .. math:: \log p(D \mid a) \approx \log p(D \mid \hat\theta)
              + \tfrac12 \sum_i \left(\log a - a \hat\theta_i^2 - \log(F_i + a)\right)

    with fixed mean and information F, of equal shapes: bisection finds the one solution of
    :math:`a \|\hat\theta\|^2 = \gamma + (1 - a) / (1 + a)` with :math:`\gamma = \sum_i F_i / (F_i + a)`. Source: MacKay
    1992; Immer, Bauer, Fortuin, Rätsch and Khan 2021, for networks; Gelman 2006 for the half-Cauchy.
    """
    information = torch.cat([each.flatten().double() for each in information])
    size = sum(float(each.detach().double().square().sum()) for each in mean)
    low, high = -math.log(LARGEST), math.log(LARGEST)
    while high - low > 1e-9:
        middle = (low + high) / 2
        precision = math.exp(middle)
        determined = float((information / (information + precision)).sum())
        low, high = (middle, high) if determined + _pull(precision) > precision * size else (low, middle)
    return math.exp((low + high) / 2)


def evident_precision(information: Tensor, pull: Tensor, near: float | None = None, factor: float = 2.0) -> float:
    r"""Return the most probable precision a of the prior N(0, 1/a) with a quadratic loss.

    .. math:: L(\theta) = \tfrac12 \theta^\top F \theta - t^\top \theta, \qquad
              \log p(D \mid a) = \text{const} + \tfrac12 \sum_i \left(\frac{t_i^2}{F_i + a} - \log(1 + F_i / a)\right)

    ``information`` are F's eigenvalues, (parameters,), ``pull`` is t in their eigenvectors, and the search is within a
    ``factor`` of ``near``. Unlike in :func:`chosen_precision` the mode moves with a, to the same point (MacKay 1992).
    """
    known = information > information.max() * torch.finfo(torch.float64).eps * len(information)  # the rest is rounding
    information, squares = information[known].double(), pull[known].double().square()

    def evidence(log: float) -> float:
        a = math.exp(log)
        found = float((squares / (information + a)).sum() - torch.log1p(information / a).sum())
        return found + log - 2 * math.log1p(a)

    low, high = -math.log(LARGEST), math.log(LARGEST)
    if near is not None:
        low, high = max(low, math.log(near / factor)), min(high, math.log(near * factor))
    grid = torch.linspace(low, high, GRID).tolist()
    best = max(range(GRID), key=[evidence(each) for each in grid].__getitem__)
    low, high = grid[max(0, best - 1)], grid[min(GRID - 1, best + 1)]
    while high - low > 1e-12:  # of the slope: the maximum itself is flat, and rounding moves it by 1e-8
        middle = (low + high) / 2
        a = math.exp(middle)
        slope = float((information / (information + a)).sum() - a * (squares / (information + a).square()).sum())
        low, high = (middle, high) if slope + _pull(a) > 0 else (low, middle)
    return math.exp((low + high) / 2)


def _pull(precision: float) -> float:
    """Return twice the slope of the half-Cauchy's logarithm by that of the precision."""
    return (1 - precision) / (1 + precision)
