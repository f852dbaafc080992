"""The state of a head at the server, what clients send, and the step that an exchange allows."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_kind
from lightning_fedbayes.modules.linear_regression import EXACT, LinearStatistics, check_sums, most_evident, with_bias
from lightning_fedbayes.modules.sources.curvature import KroneckerPosterior
from lightning_fedbayes.modules.sources.curvature.systems import KroneckerSystem, evident_precision


@dataclass(frozen=True, eq=False)
class HeadSlopes:
    r"""Sums over a client's examples at the server's weights W: slope and curvature of a softmax. They add up by ``+``.

    With :math:`p_i = \mathrm{softmax}(W \tilde\phi_i)` and :math:`\tilde\phi = (\phi, 1)`, or expectations of a
    variational posterior. Raises FedBayesError for wrong shapes, and values that are not finite float64.

    Args:
        loss: :math:`-\sum_i \log p_{i y_i}`, in nats, a scalar tensor.
        slope: :math:`\sum_i (p_i - e_{y_i}) \tilde\phi_i^\top`, shape (classes, columns).
        spread: :math:`\sum_i \mathrm{diag}(p_i) - p_i p_i^\top`, shape (classes, classes).
        curvature: :math:`\sum_i p_{ic} p_{id} \tilde\phi_i \tilde\phi_i^\top` for every pair of classes c < d, shape
            (pairs, columns, columns), or no pair, if they are too many.
        num_examples: their number.
    """

    loss: Tensor
    slope: Tensor
    spread: Tensor
    curvature: Tensor
    num_examples: int

    def __post_init__(self) -> None:
        check_at_least("num_examples", self.num_examples, 0, error=FedBayesError)
        for name in ("loss", "slope", "spread", "curvature"):
            check_sums(name, getattr(self, name))
        classes, columns = self.slope.shape if self.slope.ndim == 2 else (0, 0)
        pairs = classes * (classes - 1) // 2
        fits = self.curvature.shape[0] in (0, pairs) and self.curvature.shape[1:] == (columns, columns)
        if not columns or self.loss.ndim or self.spread.shape != (classes, classes) or not fits:
            given = ", ".join(f"{name} {tuple(getattr(self, name).shape)}" for name in ("slope", "spread", "curvature"))
            wanted = "(classes, columns), (classes, classes) and (0 or pairs of classes, columns, columns)"
            raise FedBayesError(f"{given}: give {wanted}")

    @classmethod
    def at_zero(cls, sums: LinearStatistics, pairs: bool) -> "HeadSlopes":
        """Return the sums at W = 0, where every class is as probable, from the sums of the first exchange."""
        gram, classes, count = sums.gram, sums.moment.shape[1], sums.num_examples
        eye = torch.eye(classes).to(gram)
        curvature = (gram / classes**2).expand(classes * (classes - 1) // 2 if pairs else 0, -1, -1)
        slope, spread = gram[-1] / classes - sums.moment.T, count * (eye - 1 / classes) / classes
        return cls(gram.new_tensor(count * math.log(classes)), slope, spread, curvature, count)

    @classmethod
    def of(cls, logits: Tensor, design: Tensor, labels: Tensor, pairs: bool) -> "HeadSlopes":
        """Return the sums for draws of the logits, (draws, examples, classes), and a design, (examples, columns)."""
        logs = logits.log_softmax(-1)
        probs, classes = logs.exp(), logits.shape[-1]
        mean, products = probs.mean(0), torch.einsum("snc,snd->ncd", probs, probs) / len(probs)
        truth = torch.nn.functional.one_hot(labels.long(), classes).to(mean)
        spread = mean.sum(0).diag() - products.sum(0)
        chosen = torch.triu_indices(classes, classes, 1).T.tolist() if pairs else []
        found = [design.T @ (products[:, c, d, None] * design) for c, d in chosen]
        curvature = torch.stack(found) if found else design.new_zeros(0, *2 * design.shape[1:])
        return cls(-(logs.mean(0) * truth).sum(), (mean - truth).T @ design, spread, curvature, len(labels))

    def __add__(self, other: "HeadSlopes") -> "HeadSlopes":
        if not isinstance(other, HeadSlopes):
            return NotImplemented
        if self.curvature.shape != other.curvature.shape or self.slope.shape != other.slope.shape:
            what = f"slopes {tuple(self.slope.shape)} and {tuple(other.slope.shape)} do not add up"
            raise FedBayesError(f"{what}: give all clients the same fit")
        return HeadSlopes(*(getattr(self, name) + value for name, value in vars(other).items()))

    def terms(self, gram: Tensor) -> list[tuple[Tensor, Tensor]]:
        r"""Return the curvature as Kronecker products :math:`B \otimes A`, pairs (A, B).

        .. math:: \sum_i (\mathrm{diag}(p_i) - p_i p_i^\top) \otimes \tilde\phi_i \tilde\phi_i^\top =
                  \sum_{c<d} (e_c - e_d)(e_c - e_d)^\top \otimes \sum_i p_{ic} p_{id} \tilde\phi_i \tilde\phi_i^\top

        exactly. Without the pairs, the one product of the mean spread and the Gram matrix.
        """
        classes = len(self.slope)
        if not len(self.curvature):
            return [(gram, self.spread / max(1, self.num_examples))]
        eye = torch.eye(classes).to(self.slope)
        c, d = torch.triu_indices(classes, classes, 1)
        differences = eye[c] - eye[d]
        return [(a, torch.outer(each, each)) for a, each in zip(self.curvature, differences)]


def design_of(features: Tensor) -> Tensor:
    """Return features in float64, before a column of ones."""
    check_kind("features", features, Tensor, "give a tensor (examples, features)", error=FedBayesError)
    if features.ndim != 2 or not features.shape[1]:
        raise FedBayesError(f"features {tuple(features.shape)}: give (examples, features), at least one feature")
    return with_bias(features)


SETTLED = 1e-7
"""Nats per example that a step may still gain when the weights have settled."""
SETTLED_PRIOR = 1e-3
"""Relative change of the prior's precision at which it has settled."""
FACTOR = 2.0
"""Largest change of the prior's precision in a step: beyond, the quadratic that chooses it does not hold."""
DAMPED = 0.5
"""Part that the curvature of a variational posterior goes towards the clients' one: the whole would go to and fro."""
SHORTENED = 5
"""Times in a row that a step is shortened."""
MEMORY = 10
"""Steps that L-BFGS remembers."""


@dataclass(frozen=True, eq=False)
class HeadFit:
    """A head after the exchanges so far. See :class:`~lightning_fedbayes.BayesianHead`.

    Attributes:
        sums: of all clients.
        likelihood: of the head.
        weights: mean of the weights, the bias in the last column, shape (outputs, features + 1), float64.
        terms: curvature of the data as Kronecker products, pairs (A, B).
        prior_precision: :math:`s^{-2}`.
        noise: variance σ² of the targets. 1 for a softmax.
        loss: of the pooled data at :attr:`weights` before the last step, in nats. NaN for none.
        exchanges: number of exchanges of slopes so far.
        is_done: True if no exchange is left.
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
    takes_pairs: bool = True
    _last: tuple[Tensor, Tensor, float] | None = None  # weights, slope and loss of the exchange before the step
    _shortened: int = 0
    _memory: tuple[tuple[Tensor, Tensor], ...] = field(default=())

    @cached_property
    def posterior(self) -> KroneckerPosterior:
        r"""Posterior of :meth:`linear`, with means or logits as outputs. For "one_hot" logits :math:`f / \sigma^2`."""
        weights, scale = self.weights, 1 / self.noise if self.likelihood == "one_hot" else 1.0
        terms = [(a, b / scale**2) for a, b in self.terms]
        mean = {"weight": weights[:, :-1] * scale, "bias": weights[:, -1] * scale}
        mean = {name: value.to(torch.get_default_dtype()) for name, value in mean.items()}
        posterior = KroneckerPosterior(mean, {"": terms}, {"": self.prior_precision / scale**2})
        vars(posterior)["systems"] = {"": self._system(terms, self.prior_precision / scale**2)}
        return posterior

    def _system(self, terms: list[tuple[Tensor, Tensor]], prior_precision: float) -> KroneckerSystem:
        """Return the system of these terms. A single Gram matrix is decomposed once."""
        has_gram = len(terms) == 1 and (not self.takes_pairs or self.likelihood != "softmax")
        return KroneckerSystem(terms, prior_precision, self.sums.spectrum if has_gram else None)

    def moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return mean, (batch, outputs), and covariance, (batch, outputs, outputs), of :meth:`linear`.

        .. math:: \bar W \tilde\phi, \qquad (I \otimes \tilde\phi)^\top \Lambda^{-1} (I \otimes \tilde\phi)

        Raise FedBayesError unless ``features``, (batch, features), have the columns of the fit.
        """
        design = design_of(features)
        if design.shape[1] != self.weights.shape[1]:
            raise FedBayesError(f"features {tuple(features.shape)}: the head has {self.weights.shape[1] - 1} features")
        mean = design @ (self.weights * (1 / self.noise if self.likelihood == "one_hot" else 1.0)).T.to(design)
        return mean, self.posterior.systems[""].covariance_of_linear(design)

    def told(self, variational: bool) -> dict[str, Tensor]:
        """Return what clients need for an exchange, by name, if ``variational`` with the posterior's covariance."""
        told = {"weights": self.weights}
        if variational:
            inner, outer = zip(*self.terms)
            told |= {"inner": torch.stack(inner), "outer": torch.stack(outer)}
            told["prior_precision"] = self.weights.new_tensor(self.prior_precision)
        return told

    @classmethod
    def from_told(cls, told: Mapping[str, Tensor], takes_pairs: bool) -> "HeadFit":
        """Return the fit of a softmax, as far as clients know it."""
        weights = told["weights"]
        outputs, columns = weights.shape
        gram, terms, precision = weights.new_zeros(columns, columns), [], 1.0
        if "inner" in told:
            terms, precision = list(zip(told["inner"], told["outer"])), float(told["prior_precision"])
            gram = gram if takes_pairs else told["inner"][0]
        sums = LinearStatistics(gram, weights.new_zeros(columns, outputs), weights.new_zeros(outputs), 0)
        return cls(sums, "softmax", weights, terms, precision, takes_pairs=takes_pairs)

    def linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """Return the head as a layer of ``dtype`` (torch's default) with the posterior's mean."""
        outputs, columns = self.weights.shape
        layer = nn.Linear(columns - 1, outputs, dtype=dtype)
        layer.load_state_dict({name: value.to(layer.weight.dtype) for name, value in self.posterior.mean.items()})
        return layer.requires_grad_(False)


def first_fit(sums: LinearStatistics, likelihood: str, prior_std: float | None, pairs: bool) -> HeadFit:
    """Return the fit of sums: the Gaussian model, with noise above 0, or a softmax's first step, from W = 0."""
    examples, gram = sums.num_examples, sums.gram
    if likelihood == "softmax":
        start = HeadFit(sums, likelihood, torch.zeros_like(sums.moment.T), [], 1.0, takes_pairs=pairs)
        found = HeadSlopes.at_zero(sums, pairs)
        return _stepped(start, found, found.terms(gram), prior_std)
    std, noise = most_evident(gram, sums.moment, sums.square, examples, prior_std)
    if not noise > 0:
        noise = EXACT * float(sums.square.mean()) / examples
        if not noise > 0:
            raise FedBayesError(f"the targets of all {examples} examples are 0: there is nothing to fit")
        std = most_evident(gram, sums.moment, sums.square, examples, prior_std, noise)[0]
    return gaussian_fit(sums, likelihood, float(std) ** -2, noise)


def gaussian_fit(sums: LinearStatistics, likelihood: str, prior_precision: float, noise: float) -> HeadFit:
    """Return the fit of the Gaussian model with this prior and noise."""
    gram, eye = sums.gram, torch.eye(sums.moment.shape[1]).to(sums.gram)
    root = torch.linalg.cholesky(gram / noise + prior_precision * torch.eye(len(gram)).to(gram))
    weights = torch.cholesky_solve(sums.moment / noise, root).T
    return HeadFit(sums, likelihood, weights, [(gram, eye / noise)], prior_precision, noise, is_done=True)


def next_fit(fit: HeadFit, found: HeadSlopes, prior_std: float | None, variational: bool, most: int) -> HeadFit:
    """Return the fit after an exchange: a step, a shorter one if the last went too far, or the end, at the ``most``."""
    fit = replace(fit, exchanges=fit.exchanges + 1)
    if fit._last is not None:
        before, slope, loss = fit._last
        move = fit.weights - before
        if not fit.takes_pairs:
            fit = replace(fit, _memory=(*fit._memory, (move, found.slope - slope))[-MEMORY:])
        length = 1.0
        if fit._shortened < SHORTENED:
            length = _length(fit, found, move, slope, None if variational else loss)
        if length < 1:
            is_done = fit.exchanges >= most
            weights = before if is_done else before + length * move
            return replace(fit, weights=weights, is_done=is_done, _shortened=fit._shortened + 1)
    terms = found.terms(fit.sums.gram)
    if variational:
        terms = [(a + DAMPED * (own - a), b + DAMPED * (spread - b)) for (a, b), (own, spread) in zip(fit.terms, terms)]
    stepped = _stepped(fit, found, terms, prior_std)
    if stepped.is_done or fit.exchanges < most:
        return stepped
    return replace(stepped, weights=fit.weights, is_done=True)  # the step was not tried


def _length(fit: HeadFit, found: HeadSlopes, move: Tensor, before: Tensor, loss: float | None) -> float:
    """Return 1 if the last step ``move`` from slope ``before`` went well, else the part of it to the slope's zero."""
    prior, start = fit.prior_precision, fit.weights - move
    ends = (before, start), (found.slope, fit.weights)
    first, last = (float(((slope + prior * at) * move).sum()) for slope, at in ends)
    rise = (first + last) / 2  # by the trapezoidal rule: losses of a variational posterior belong to two covariances
    if loss is not None:
        sizes = float(fit.weights.square().sum()) - float(start.square().sum())
        rise = float(found.loss) - loss + prior / 2 * sizes
    if rise <= SETTLED * fit.sums.num_examples:
        return 1.0
    return min(0.7, max(0.1, first / (first - last) if last > first else 0.5))


def _stepped(fit: HeadFit, found: HeadSlopes, terms: list[tuple[Tensor, Tensor]], prior_std: float | None) -> HeadFit:
    """Return the fit with this curvature, its most evident prior, and the step that they give."""
    system = fit._system(terms, fit.prior_precision)
    if prior_std is not None:
        precision = float(prior_std) ** -2
    else:
        pull = system.product(fit.weights) - fit.prior_precision * fit.weights - found.slope
        near = None if fit._last is None else fit.prior_precision
        precision = evident_precision(*system.coordinates(pull), near, FACTOR)
    system = system.with_prior(precision)
    slope = found.slope + precision * fit.weights
    step = _two_loops(system, fit._memory, slope, precision)
    gain = float((slope * step).sum()) / 2
    settled = gain < SETTLED * fit.sums.num_examples and abs(math.log(precision / fit.prior_precision)) < SETTLED_PRIOR
    return replace(
        fit,
        weights=(fit.weights - step).contiguous(),
        terms=terms,
        prior_precision=precision,
        loss=float(found.loss),
        is_done=settled and fit.exchanges > 0,
        _last=(fit.weights, found.slope, float(found.loss)),
        _shortened=0,
    )


def _two_loops(
    system: KroneckerSystem, memory: tuple[tuple[Tensor, Tensor], ...], slope: Tensor, precision: float
) -> Tensor:
    """Return L-BFGS's step for a slope, from the system as first guess: Nocedal and Wright 2006, algorithm 7.4."""
    # memory holds moves of the weights and changes of the loss's slope without the prior's part
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


HALVINGS = 30
"""Times that a step is halved before the search ends."""
STEPS = 100
"""Most steps. They are local to the client, and cost no exchange."""

Terms = list[tuple[Tensor, Tensor]]


def mixed_sums(sums: LinearStatistics, own: LinearStatistics, weight: float) -> LinearStatistics:
    """Return the sums over a client's examples, once, and over all others', 1 - ``weight`` times."""
    names = ("gram", "moment", "square")
    parts = {name: (1 - weight) * getattr(sums, name) + weight * getattr(own, name) for name in names}
    return LinearStatistics(**parts, num_examples=round((1 - weight) * sums.num_examples + weight * own.num_examples))


def personal_softmax(
    fit: HeadFit, own: LinearStatistics, slopes_at: Callable[[HeadFit], HeadSlopes], weight: float, variational: bool
) -> HeadFit:
    r"""Return a client's softmax for a weight w, from its ``slopes_at`` a fit (expectations if ``variational``).

    Newton's steps on :math:`L_k(W) + (1 - w) (Q - Q_k)(W) + \tfrac{1}{2 s^2} \|W\|^2`, halved where they overshoot: of
    the others the client knows the quadratic Q of the federation's posterior, without its part :math:`Q_k`. For a
    variational posterior :math:`L_k` is an expectation, and its curvature is damped.
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
