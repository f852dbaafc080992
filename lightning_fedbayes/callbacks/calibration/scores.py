"""Scores of conformal prediction, and their histograms: what a client sends in place of its data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_choice, check_kind, check_number, shown
from lightning_fedbayes.core.posterior import check_tensor
from lightning_fedbayes.core.seeding import private_uniform
from lightning_fedbayes.metrics.functional.utilities import check_numbers, check_vectors
from lightning_fedbayes.metrics.likelihoods import Categorical

ClassKind = Literal["lac", "aps"]
Kind = Literal["lac", "aps", "interval"]
Grid = Literal["unit", "half_line"]
GRIDS: dict[str, Grid] = {"lac": "unit", "aps": "unit", "interval": "half_line"}
"""Kind of scores → grid of their sketch."""
BINS = 1024
"""Cells of a sketch."""
MOST_BINS = 2**24
"""Largest number of cells."""
MOST_SCORES = 2**53
"""Largest number of scores of a sketch: up to there float64 tells whole numbers apart."""
ROUNDING = 1e-12
"""Of a level times a number of examples: 0.9 · 10 must be 9, not more."""
TOLERANCE = 1e-2
"""Distance of a sum of probabilities from 1, as of half floats."""
CHANCE = 2.0
"""Standard deviations of the median client's sampling noise that are added to the median size."""


def class_scores(probs: Tensor, targets: Tensor, kind: ClassKind = "lac") -> Tensor:
    r"""Return the conformal score of each example's class: large where the prediction does not fit.

    .. math::
        s_{\mathrm{LAC}}(x, y) = 1 - p_y, \qquad
        s_{\mathrm{APS}}(x, y) = \sum_{c\,:\,p_c \ge p_y} p_c

    When to use it: "lac" gives the smallest sets on average. "aps" gives larger sets to harder examples, so that these
    are covered, too: sets hold at least one class, and confident networks get large ones. Of equal probabilities the
    earlier class counts as the larger one.

    Args:
        probs: mean predictive, shape (batch, classes).
        targets: class of each example, integers, shape (batch,).
        kind: "lac" or "aps".

    Returns: scores in [0, 1], shape (batch,), float64.
    Raises FedBayesError: no probabilities, targets that are not their classes, or another kind.
    Source: Sadinle, Lei and Wasserman (2019), LAC; Romano, Sesia and Candès (2020), APS.

    >>> class_scores(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([1]))
    tensor([0.7500], dtype=torch.float64)
    >>> class_scores(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([1]), "aps")
    tensor([0.7500], dtype=torch.float64)
    """
    scores = all_class_scores(probs, kind)
    check_targets(targets, probs)
    return scores.gather(1, targets.to(scores.device, torch.int64).unsqueeze(1)).squeeze(1)


def check_targets(targets: Any, probs: Tensor) -> None:
    """Raise FedBayesError unless ``targets`` hold one of the classes of ``probs``, (batch, classes), per example."""
    check_tensor("targets", targets, error=FedBayesError)
    why = "targets are no classes" if targets.dtype == torch.bool else Categorical().unfit(probs, targets)
    if why:
        found = f"targets are of shape {tuple(targets.shape)} and {targets.dtype}, probs of {tuple(probs.shape)}"
        raise FedBayesError(f"{found}: {why}; give one integer for each example, from 0 to {probs.shape[1] - 1}")


def all_class_scores(probs: Tensor, kind: ClassKind = "lac") -> Tensor:
    """Return the score that each class would have if it were the true one, shape (batch, classes), float64.

    For the arguments and errors see :func:`class_scores`.
    """
    check_choice("kind", kind, ("lac", "aps"), error=FedBayesError)
    check_numbers(probs=probs)
    if probs.ndim != 2 or probs.shape[1] < 2 or not probs.is_floating_point():
        found = f"probs are of shape {tuple(probs.shape)} and {probs.dtype}"
        raise FedBayesError(f"{found}; give the mean predictive, (batch, classes): average draws by probs.mean(0)")
    probs = probs.detach().double()
    if not bool(((probs >= 0).all(1) & ((probs.sum(1) - 1).abs() <= TOLERANCE)).all()):
        raise FedBayesError("probs are no probabilities: each row is at least 0 and sums to 1; give logits.softmax(-1)")
    if kind == "lac":
        return (1 - probs).clamp(0, 1)
    ordered, order = probs.sort(stable=True, dim=1, descending=True)
    return torch.empty_like(ordered).scatter_(1, order, ordered.cumsum(1)).clamp(0, 1)


def interval_scores(mean: Tensor, std: Tensor, targets: Tensor) -> Tensor:
    r"""Return the conformal score of each prediction, :math:`|y - \hat y| / \hat\sigma`.

    When to use it: for regressors. Intervals are then as wide as the predicted standard deviation says, up to a factor.

    Args:
        mean: predictive means, shape (batch,).
        std: predictive standard deviations, above 0, shape (batch,).
        targets: in the units of ``mean``, shape (batch,).

    Returns: scores of at least 0, shape (batch,), float64.
    Raises FedBayesError: other shapes, values that are not finite, or a standard deviation that is not above 0.
    Source: Lei et al. (2018), §5.2.

    >>> interval_scores(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([2.0]))
    tensor([2.], dtype=torch.float64)
    """
    check_vectors(mean=mean, std=std, targets=targets)
    check_moments(mean, std)
    if not bool(targets.isfinite().all()):
        raise FedBayesError("targets are not all finite: leave those examples out")
    return (targets.detach().double() - mean.detach().double()).abs() / std.detach().double()


def check_moments(mean: Tensor, std: Tensor) -> None:
    """Raise FedBayesError unless vectors of means and standard deviations are finite, and the latter above 0."""
    check_vectors(mean=mean, std=std)
    if not bool(mean.isfinite().all()) or not bool((std.isfinite() & (std > 0)).all()):
        raise FedBayesError("mean or std are not all finite, or a std is not above 0: give a regressor with noise")


@dataclass(frozen=True, eq=False)
class ScoreSketch:
    r"""Histogram of a client's scores, its message: ``bins`` whole numbers. Sketches of several clients add up.

    Cells are the same for all clients: equal parts of [0, 1] for scores of classes, grid "unit". For scores of
    intervals, grid "half_line", equal parts of [0, 1] for :math:`s / (1 + s)`. 1,024 cells of 8 bytes are 8 KiB.

    Args:
        counts: number of scores in each cell, int64, shape (bins,), at most 2⁵³ in all.
        grid: "unit" or "half_line".

    Raises FedBayesError: an argument is out of range or of another type.

    >>> a, b = ScoreSketch.of(torch.tensor([0.1, 0.9]), bins=4), ScoreSketch.of(torch.tensor([0.3]), bins=4)
    >>> (a + b).counts
    tensor([1, 1, 0, 1])
    """

    counts: Tensor
    grid: Grid = "unit"

    def __post_init__(self) -> None:
        check_choice("grid", self.grid, ("unit", "half_line"), error=FedBayesError)
        check_tensor("counts", self.counts, error=FedBayesError)
        if self.counts.dtype != torch.int64 or self.counts.ndim != 1 or not 1 <= len(self.counts) <= MOST_BINS:
            found = f"counts are of shape {tuple(self.counts.shape)} and {self.counts.dtype}"
            raise FedBayesError(f"{found}; give a vector of int64")
        if bool((self.counts < 0).any()):
            raise FedBayesError(f"counts hold {int(self.counts.min())}; give numbers of scores, at least 0")
        if (total := float(self.counts.sum(dtype=torch.float64))) > MOST_SCORES:
            raise FedBayesError(f"counts hold {total:.3g} scores, which cannot be told apart; give at most 2^53")

    @classmethod
    def of(cls, scores: Tensor, bins: int = BINS, grid: Grid = "unit") -> "ScoreSketch":
        """Count the scores in each cell.

        Args:
            scores: shape (examples,). In [0, 1] for "unit", at least 0 for "half_line".
            bins, grid: of the sketch.

        Raises FedBayesError: scores outside the grid or not finite, or an argument out of range.
        """
        check_choice("grid", grid, ("unit", "half_line"), error=FedBayesError)
        check_at_least("bins", bins, 1, MOST_BINS, error=FedBayesError)
        check_numbers(scores=scores)
        if scores.ndim != 1 or scores.dtype == torch.bool:
            found = f"scores are of shape {tuple(scores.shape)} and {scores.dtype}"
            raise FedBayesError(f"{found}; give a vector of numbers, or flatten it")
        scores = scores.detach().double().cpu()
        top = 1.0 if grid == "unit" else math.inf
        if not bool((scores.isfinite() & (scores >= 0) & (scores <= top)).all()):
            remedy = "give those of class_scores (grid 'unit') or interval_scores (grid 'half_line')"
            raise FedBayesError(f"scores are not all finite and in [0, {top:g}]: {remedy}")
        mapped = scores if grid == "unit" else scores / (1 + scores)
        cells = (mapped * bins).long().clamp(0, bins - 1)
        return cls(torch.bincount(cells, minlength=bins), grid)

    @property
    def num_examples(self) -> int:
        """Number of scores."""
        return int(self.counts.sum())

    def distribution(self) -> Tensor:
        """Return the share of scores up to each upper edge, with one more score at infinity, float64, shape (bins,)."""
        return self.counts.cpu().cumsum(0).double() / (self.num_examples + 1)

    def __add__(self, other: "ScoreSketch") -> "ScoreSketch":
        check_same_grid(self, other)
        return ScoreSketch(self.counts + other.counts.to(self.counts.device), self.grid)

    def threshold(self, level: float) -> float:
        r"""Return an upper bound of the :math:`\lceil (n + 1) \cdot \mathrm{level} \rceil`-th smallest of n scores.

        It is the upper edge of that score's cell. If that rank exceeds n it is infinite, as is the edge of the last
        cell of a "half_line". Raises FedBayesError for a ``level``, the coverage, outside (0, 1).

        >>> ScoreSketch.of(torch.arange(9) / 9, bins=9).threshold(0.5)  # the fifth of nine, 4/9
        0.5556
        """
        check_number("level", level, "(0, 1)", error=FedBayesError)
        return edge_at(level, self.distribution(), self.grid)

    def noisy(self, epsilon: float, key: int | str) -> "ScoreSketch":
        r"""Return a sketch that is ε-differentially private for the presence of one example.

        Adds independent discrete Laplace noise to every count. One example changes one cell by 1. Clips at 0:

        .. math:: \tilde c_b = \max(0,\ c_b + G - G'), \qquad P(G = k) = (1 - e^{-\varepsilon}) e^{-\varepsilon k}

        Where an example may be *replaced* by another, ε is twice as large. Each noisy sketch of the same examples
        costs its ε again. When to use it: before a client sends its sketch, with few cells (32 to 128) and many
        examples: the noise has a standard deviation of about √2/ε per cell. Coverage is then only approximate.

        Args:
            epsilon: ε > 0.
            key: of the noise: a secret text, or the seed of a simulation. Whoever knows it can subtract the noise.

        Raises FedBayesError: ε is not above 0, or the key neither a text nor a whole number.
        Source: geometric mechanism, Ghosh, Roughgarden and Sundararajan (2012).

        >>> ScoreSketch.of(torch.full((1000,), 0.3), bins=4).noisy(epsilon=1.0, key=7).num_examples > 900
        True
        """
        check_epsilon(epsilon)
        if not isinstance(key, str):
            check_at_least("key", key, -(2**62), error=FedBayesError)
        counts = self.counts.cpu()
        uniform = private_uniform(key, 2 * len(counts), "counts", counts.tolist()).view(2, -1)
        above, below = (uniform.log() / -epsilon).floor().long()
        return ScoreSketch((self.counts.cpu() + above - below).clamp_min(0), self.grid)


def check_epsilon(epsilon: float) -> None:
    """Raise FedBayesError unless ε of a sketch's noise is a number above 0."""
    check_number("epsilon", epsilon, "[1e-6, inf)", error=FedBayesError, why="the smaller, the more private")


def check_same_grid(first: ScoreSketch, other: ScoreSketch) -> None:
    """Raise FedBayesError unless two sketches have the same cells."""
    check_kind("sketch", other, ScoreSketch, "give a ScoreSketch", error=FedBayesError)
    if len(first.counts) != len(other.counts) or first.grid != other.grid:
        cells = [f"{len(each.counts)} cells of '{each.grid}'" for each in (first, other)]
        raise FedBayesError(f"sketches differ: {' and '.join(cells)}; all clients count with the same bins and grid")


def edge_at(level: float, covered: Tensor, grid: Grid) -> float:
    """Return the upper edge of the first cell where ``covered``, (bins,), reaches ``level``. Infinity if none does."""
    enough = (covered >= level - ROUNDING).nonzero()
    if len(enough) == 0:
        return math.inf
    edge = (int(enough[0]) + 1) / len(covered)
    if grid == "unit":
        return edge
    return edge / (1 - edge) if edge < 1 else math.inf


def bounded_distribution(
    sketches: Sequence[ScoreSketch], level: float, max_influence: float | None
) -> tuple[Tensor, Tensor]:
    r"""Return the distribution of all clients' scores, (bins,), and which client exceeds its bound in which cell.

    With :math:`n_k` examples, :math:`e_k(t) = \#\{s \in k : s \le t\} - \mathrm{level} \cdot n_k` at the upper edge t
    of a cell is clipped at :math:`\pm B(t)`. Beyond it :math:`n_k` counts as at most c times the median, F is clamped.

    .. math::
        B(t) = c \left(\operatorname{median}_k |e_k(t)|
            + 2 \sqrt{\mathrm{level} (1 - \mathrm{level}) \operatorname{median}_k n_k}\right), \qquad
        F(t) = \mathrm{level} + \frac{\sum_k e_k(t) - \mathrm{level}}{1 + \sum_k n_k}

    Sketches are on one grid. ``max_influence`` is c. None: the pooled distribution, with one more score at infinity.
    """
    below = torch.stack([each.counts.cpu() for each in sketches]).double().cumsum(1)
    sizes = below[:, -1:]
    pooled = below.sum(0) / (sizes.sum() + 1)
    excess = below - level * sizes
    if max_influence is None:
        return pooled, torch.zeros_like(excess, dtype=torch.bool)
    bound = largest_sums(excess, level * (1 - level) * sizes, max_influence)
    exceeds = excess.abs() > bound
    total = excess.clamp(-bound, bound).sum(0)
    counted = sizes.clamp_max(max_influence * middle(sizes)).sum()
    bounded = (level + (total - level) / (counted + 1)).clamp(0, 1)
    return torch.where(exceeds.any(0), bounded, pooled), exceeds


def check_influence(max_influence: float | None) -> None:
    """Raise FedBayesError unless ``max_influence`` is a multiple of at least 1, or None."""
    if max_influence is not None:
        why = "a client may count as this multiple of the median client; None turns the bound off"
        check_number("max_influence", max_influence, "[1, inf)", error=FedBayesError, why=why)


def middle(values: Tensor) -> Tensor:
    """Return the upper median over the first dimension, the larger of two: two clients are never bounded."""
    return values.sort(0).values[len(values) // 2]


def largest_sums(sums: Tensor, variances: Tensor, max_influence: float) -> Tensor:
    r"""Return the largest size of a client's sum that is believed, shape (\*), with c = ``max_influence``.

    .. math:: B = c \left(\operatorname{median}_k |s_k| + 2 \sqrt{\operatorname{median}_k v_k}\right)

    Sums s, (clients, \*), are 0 in the mean at the solution if clients are alike, with variances v, perhaps of one
    client. A clipped client moves the solution no further than :math:`B` divided by the slope of the others' sum.
    """
    return max_influence * (middle(sums.abs()) + CHANCE * middle(variances).clamp_min(0).sqrt())


def check_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits as float64 (samples, batch, classes), targets as int64. Raise FedBayesError if they do not fit."""
    check_tensor("logits", logits, error=FedBayesError)
    check_tensor("targets", targets, error=FedBayesError)
    draws, why = logits.unsqueeze(0) if logits.ndim == 2 else logits, "logits are (batch, classes), or draws of them"
    if draws.ndim == 3 and len(draws) and draws.is_floating_point() and targets.dtype != torch.bool:
        why = Categorical().unfit(draws[0], targets)
    if why:
        both = f"targets are of {targets.dtype} and shape {tuple(targets.shape)}, logits of {logits.dtype} and"
        regressor = "A regressor has none: calibrate it by FederatedConformal(kind='interval')"
        raise FedBayesError(f"{both} {tuple(logits.shape)}: {why}. {regressor}")
    if len(targets) == 0:
        raise FedBayesError("there is no held-out example: leave the client out, or hold some of its data out")
    finite = logits.isfinite()
    if not bool(finite.all()):
        wrong = f"{int((~finite).sum())} of {logits.numel()} entries are not finite"
        raise FedBayesError(f"logits: {wrong}; leave those examples or classes out, or mend the network")
    return draws.detach().double(), targets.to(logits.device, torch.int64)


def checked_pair(name: str, pair: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a client's predictions and targets. An error names the client, if it has a ``name``."""
    who = f"client {name}: " if name else ""
    if not isinstance(pair, tuple | list) or len(pair) not in (2, 3):
        raise FedBayesError(f"{who}{shown(pair)} is no pair (logits, targets); give one")
    try:
        if len(pair) == 2:
            return check_logits(*pair)
        if not len(interval_scores(*pair)):
            raise FedBayesError("there is no held-out example: leave the client out, or hold some of its data out")
        return tuple(each.detach().double() for each in pair)
    except FedBayesError as error:
        raise FedBayesError(f"{who}{error}") from None


def by_example(values: Tensor, counts: Tensor, how: str) -> Tensor:
    """Return the largest ("amax") or smallest ("amin") of the ``values``, (N,), of each example that has some."""
    index = torch.arange(len(counts)).repeat_interleave(counts).to(values.device)
    found = values.new_zeros(len(counts)).scatter_reduce(0, index, values, how, include_self=False)
    return found[counts.to(values.device) > 0]
