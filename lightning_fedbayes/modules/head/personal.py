"""A client's own head: what the federation knows as its prior, and its own examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from lightning_fedbayes.modules.head.fit import DAMPED, SETTLED, HeadFit
from lightning_fedbayes.modules.head.slopes import HeadSlopes
from lightning_fedbayes.modules.linear_statistics import LinearStatistics
from lightning_fedbayes.sources.curvature.systems import KroneckerSystem

HALVINGS = 30
"""Times that a step is halved before the search ends."""
STEPS = 100
"""Most steps; they are the client's own, and cost no exchange."""

Terms = list[tuple[Tensor, Tensor]]


def mixed_sums(sums: LinearStatistics, own: LinearStatistics, weight: float) -> LinearStatistics:
    """Return the sums of a client's own examples, once, and of all others', each of them 1 - ``weight`` times."""
    parts = {
        name: (1 - weight) * getattr(sums, name) + weight * getattr(own, name) for name in ("gram", "moment", "square")
    }
    return LinearStatistics(**parts, num_examples=round((1 - weight) * sums.num_examples + weight * own.num_examples))


def personal_softmax(
    fit: HeadFit, own: LinearStatistics, slopes_at: Callable[[HeadFit], HeadSlopes], weight: float, variational: bool
) -> HeadFit:
    r"""Return a client's own softmax.

    Newton's steps on :math:`L_k(W) + (1 - w) (Q - Q_k)(W) + \tfrac{1}{2 s^2} \|W\|^2`, halved where they overshoot:
    of the others the client knows the quadratic Q of the federation's posterior, without its own part
    :math:`Q_k`. Of a variational posterior :math:`L_k` is an expectation, whose curvature is damped.

    Args:
        fit: of the federation.
        own: sums of the client.
        slopes_at: fit → the client's slopes there.
        weight: w.
        variational: True if slopes are expectations.
    """
    centre, prior, share = fit.weights, fit.prior_precision, 1 - weight
    sums, first = mixed_sums(fit.sums, own, weight), slopes_at(fit)
    begun = first.terms(own.gram)

    def slope_of(found: HeadSlopes, weights: Tensor) -> Tensor:
        moved = weights - centre
        others = (KroneckerSystem(terms, 1.0).product(moved) - moved for terms in (fit.terms, begun))
        known = next(others) - next(others) - prior * centre - first.slope
        return found.slope + share * known + prior * weights

    def joint(terms: Terms) -> Terms:
        if fit.takes_pairs:
            return [(a + share * (b - c), d) for (a, d), (b, _), (c, _) in zip(terms, fit.terms, begun)]
        count, everybody = own.num_examples, fit.sums.num_examples
        spread = count * terms[0][1] + share * (everybody * fit.terms[0][1] - count * begun[0][1])
        return [(sums.gram, spread / (count + share * (everybody - count)))]

    at, terms, found = replace(fit, sums=sums, terms=joint(begun)), begun, first
    for _ in range(STEPS):
        new = found.terms(own.gram)
        part = DAMPED if variational else 1.0
        terms = [(a + part * (c - a), b + part * (d - b)) for (a, b), (c, d) in zip(terms, new)]
        at = replace(at, terms=joint(terms))
        slope = slope_of(found, at.weights)
        step = at._system(at.terms, prior).solve(slope)
        begin, length = at.weights, 1.0
        descent = float((slope * step).sum())
        for _ in range(HALVINGS):
            at = replace(at, weights=(begin - length * step).contiguous())
            found = slopes_at(at)
            if float((slope_of(found, at.weights) * step).sum()) >= -descent:  # by the trapezoidal rule the loss fell
                break
            length /= 2
        if descent / 2 < SETTLED * own.num_examples:
            break
    return replace(at, loss=float(found.loss))
