"""The state of a head at the server: sums, weights and curvature, and the step that an exchange allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.modules.head.slopes import HeadSlopes, design_of
from lightning_fedbayes.modules.linear_regression import most_evident
from lightning_fedbayes.modules.linear_statistics import LinearStatistics
from lightning_fedbayes.sources.curvature import KroneckerPosterior
from lightning_fedbayes.sources.curvature.evidence import chosen_precision
from lightning_fedbayes.sources.curvature.systems import KroneckerSystem

SETTLED = 1e-7
"""Nats per example that a step may still gain, at which the weights have arrived."""
SETTLED_PRIOR = 1e-3
"""Relative change of the prior's precision at which it has arrived."""
DAMPED = 0.5
"""Length of a step of the variational posterior: one of length 1 goes to and fro."""
MEMORY = 10
"""Steps that L-BFGS remembers."""


@dataclass(frozen=True, eq=False)
class HeadFit:
    r"""A head as far as the exchanges have brought it; see :class:`~lightning_fedbayes.BayesianHead`.

    Attributes:
        sums: of all clients.
        likelihood: of the head.
        weights: mean of the weights, the bias in the last column, shape (outputs, features + 1), float64.
        terms: curvature of the data as Kronecker products, pairs (A, B).
        prior_precision: :math:`s^{-2}`.
        noise: variance σ² of the targets; 1 for a softmax.
        loss: of the pooled data at :attr:`weights` before the last step, in nats; NaN for none.
        exchanges: number of exchanges of slopes so far.
        is_done: True if there is nothing to exchange any more.
        is_variational: True if the next exchange is of expectations under the posterior.
        takes_pairs: True if clients send the curvature of every pair of classes.
    """

    sums: LinearStatistics
    likelihood: str
    weights: Tensor
    terms: list[tuple[Tensor, Tensor]]
    prior_precision: float
    noise: float = 1.0
    loss: float = math.nan
    exchanges: int = 0
    is_done: bool = False
    is_variational: bool = False
    takes_pairs: bool = True
    _fixed_prior: bool = False
    _variational: bool = False
    _most: int = 0
    _last: tuple[Tensor, Tensor, float] | None = None  # weights, slope and loss of the best exchange so far
    _memory: tuple[tuple[Tensor, Tensor], ...] = field(default=())

    @cached_property
    def posterior(self) -> KroneckerPosterior:
        r"""Posterior of :meth:`linear`, whose outputs are means, or logits: of a "one_hot" :math:`f / \sigma^2`."""
        weights, scale = self.weights, 1 / self.noise if self.likelihood == "one_hot" else 1.0
        terms = [(a, b / scale**2) for a, b in self.terms]
        mean = {"weight": weights[:, :-1] * scale, "bias": weights[:, -1] * scale}
        mean = {name: value.to(torch.get_default_dtype()) for name, value in mean.items()}
        posterior = KroneckerPosterior(mean, {"": terms}, {"": self.prior_precision / scale**2})
        vars(posterior)["systems"] = {"": self._system(terms, self.prior_precision / scale**2)}
        return posterior

    def _system(self, terms: list[tuple[Tensor, Tensor]], prior_precision: float) -> KroneckerSystem:
        """Return the system of these terms; the Gram matrix, which a single one has, is taken apart once."""
        has_gram = len(terms) == 1 and (not self.takes_pairs or self.likelihood != "softmax")
        return KroneckerSystem(terms, prior_precision, self.sums.spectrum if has_gram else None)

    def moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return mean, shape (batch, outputs), and covariance, shape (batch, outputs, outputs), of :meth:`linear`.

        .. math:: \bar W \tilde\phi, \qquad (I \otimes \tilde\phi)^\top \Lambda^{-1} (I \otimes \tilde\phi)

        Args:
            features: shape (batch, features).
        """
        design = design_of(features)
        mean = design @ (self.weights * (1 / self.noise if self.likelihood == "one_hot" else 1.0)).T.to(design)
        return mean, self.posterior.systems[""].covariance_of_linear(design)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> HeadFit:
        """Return the fit that ``dataclasses.asdict`` has taken apart."""
        return cls(**{**state, "sums": LinearStatistics(**state["sums"])})

    def linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """Return the head as a layer, with the mean of the posterior.

        Args:
            dtype: of its weights; None: torch's default.
        """
        outputs, columns = self.weights.shape
        layer = nn.Linear(columns - 1, outputs, dtype=dtype)
        layer.load_state_dict({name: value.to(layer.weight.dtype) for name, value in self.posterior.mean.items()})
        return layer.requires_grad_(False)


def first_fit(
    sums: LinearStatistics, likelihood: str, prior_std: float | None, variational: bool, pairs: bool, most: int
) -> HeadFit:
    """Return the fit of sums alone: that of the Gaussian model, or the start of a softmax, W = 0.

    Raises:
        FedBayesError: the targets fit exactly.
    """
    examples, gram = sums.num_examples, sums.gram
    eye = torch.eye(sums.moment.shape[1]).to(gram)
    if likelihood == "softmax":
        centred = (eye - 1 / len(eye)) / 2  # Böhning's bound of the curvature of a softmax
        return HeadFit(
            sums, likelihood, torch.zeros_like(sums.moment.T), [(gram, centred)],
            1.0 if prior_std is None else float(prior_std) ** -2, takes_pairs=pairs,
            _fixed_prior=prior_std is not None, _variational=variational, _most=most,
        )
    std, noise = most_evident(gram, sums.moment, sums.square, examples, prior_std)
    if not noise > 0:
        raise FedBayesError(
            f"the {examples} examples of all clients are fitted exactly, so the noise has no variance: give more "
            "examples, fewer features, or a prior_std"
        )
    precision = float(std) ** -2
    root = torch.linalg.cholesky(gram / noise + precision * torch.eye(len(gram)).to(gram))
    weights = torch.cholesky_solve(sums.moment / noise, root).T
    return HeadFit(sums, likelihood, weights, [(gram, eye / noise)], precision, noise, is_done=True)


def next_fit(fit: HeadFit, found: HeadSlopes) -> HeadFit:
    """Return the fit after an exchange: a step, a shorter one if the last went too far, or the end."""
    exchanges, examples = fit.exchanges + 1, fit.sums.num_examples
    if fit.is_variational:
        return _variational_step(fit, found)
    loss = float(found.loss) + fit.prior_precision / 2 * float(fit.weights.square().sum())
    if fit._last is not None:
        before = float(fit._last[2]) + fit.prior_precision / 2 * float(fit._last[0].square().sum())
        if loss > before + SETTLED * examples:  # halve the step, and forget how it was found
            return replace(
                fit, weights=(fit.weights + 3 * fit._last[0]) / 4, exchanges=exchanges, _memory=(),
                is_done=exchanges >= fit._most,
            )
    terms = found.terms(fit.sums.gram)
    system = fit._system(terms, fit.prior_precision)
    precision = fit.prior_precision
    if not fit._fixed_prior and fit.exchanges:  # before the first step there are no weights to choose a prior by
        precision = chosen_precision([system.eigenvalues()], [fit.weights])
    system = system.with_prior(precision)
    memory = fit._memory
    if fit._last is not None and not fit.takes_pairs:
        memory = (*memory, (fit.weights - fit._last[0], found.slope - fit._last[1]))[-MEMORY:]
    slope = found.slope + precision * fit.weights
    step = _two_loops(system, memory, slope, precision)
    gain = float((slope * step).sum()) / 2
    settled = gain < SETTLED * examples and abs(math.log(precision / fit.prior_precision)) < SETTLED_PRIOR
    finished = settled or exchanges >= fit._most
    return replace(
        fit, weights=fit.weights - step, terms=terms, prior_precision=precision, loss=float(found.loss),
        exchanges=exchanges, is_done=finished and not fit._variational,
        is_variational=finished and fit._variational, _last=(fit.weights, found.slope, float(found.loss)),
        _memory=memory,
    )


def _variational_step(fit: HeadFit, found: HeadSlopes) -> HeadFit:
    """Return the fit after an exchange of expectations: a natural-gradient step of length :data:`DAMPED`."""
    new = found.terms(fit.sums.gram)
    terms = [(a + DAMPED * (own - a), b + DAMPED * (spread - b)) for (a, b), (own, spread) in zip(fit.terms, new)]
    system = fit._system(terms, fit.prior_precision)
    slope = found.slope + fit.prior_precision * fit.weights
    step = system.solve(slope)
    gain = float((slope * step).sum()) / 2
    exchanges = fit.exchanges + 1
    return replace(
        fit, weights=fit.weights - DAMPED * step, terms=terms, loss=float(found.loss), exchanges=exchanges,
        is_done=gain < SETTLED * fit.sums.num_examples or exchanges >= 2 * fit._most,
    )


def _two_loops(
    system: KroneckerSystem, memory: tuple[tuple[Tensor, Tensor], ...], slope: Tensor, precision: float
) -> Tensor:
    r"""Return L-BFGS's :math:`H g` for the slope g, from the system as the first guess of the curvature.

    Args:
        system: the guess.
        memory: moves of the weights, and those of the slope of the loss without the prior.
        slope: g, with the prior's.
        precision: of the prior.

    Source: Nocedal and Wright 2006, algorithm 7.4.
    """
    pairs = [(s, y + precision * s) for s, y in memory]
    pairs = [(s, y, 1 / float((s * y).sum())) for s, y in pairs if float((s * y).sum()) > 0]
    lengths: list[float] = []
    for s, y, rho in reversed(pairs):
        lengths.append(rho * float((s * slope).sum()))
        slope = slope - lengths[-1] * y
    step = system.solve(slope)
    for (s, y, rho), length in zip(pairs, reversed(lengths)):
        step = step + (length - rho * float((y * step).sum())) * s
    return step
