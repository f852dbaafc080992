r"""Guard of sums over examples, which add up exactly: a client's sums count as they are, or are left out by name.

Sums of features :math:`G = \sum x x^\top`, moments :math:`\sum x y^\top` and squares :math:`\sum y^2` are checked:

* They are of some examples: G is symmetric and positive semidefinite, moments are within its range,
  :math:`m_c^\top G^+ m_c \le \sum y_c^2`, and the constant feature counts the examples of the message. Slopes,
  spread and curvature of a softmax are of some probabilities of these examples.
* The root mean square of features over a client's n examples is within ``max_influence`` times the median client's,
  of targets, whose means may differ, within twice as much. Both are within twice as much of the second largest of
  three to six clients. Few examples scatter, and may be :math:`1 + 2 / \sqrt n` times as large.

With seven clients or more:

* A client has at most ``max_influence`` times as many examples as all others together.
* Where targets are classes: squared errors of a linear fit to all clients, none counted as more than twice the median
  one, are within ``max_influence`` times the median client's, or 2/3 of the error of one guess for all examples.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.messages import EPSILONS, ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.server.guard import DECAY, FEW, FEWEST, RANKED, Guard, Limits, weighted_median

FEATURES, TARGETS, MISFIT, EXAMPLES, NO_CLASSES, FAULT, NOISE, BEFORE = range(8)
"""Kinds of sizes. NOISE: 1 of a client that adds noise to its sums. BEFORE: examples that it has counted as so far."""
REASONS = (
    "its features are larger than max_influence allows beside the other clients'",
    "its targets are larger than max_influence allows beside the other clients'",
    "a fit to all clients explains its classes hardly or not, unlike the others': its labels may be others",
    "it says that it has more than max_influence times as many examples as all others together",
    "its targets are no classes, as the others' are",
    "its sums are of no examples: not as many as it says, not symmetric, not positive, or of too large moments",
)
REMEDY = "Check its data, or give a larger safeguards=fb.Safeguards(max_influence=...), None for no bound"
ROUNDING, SLACK = 1e-9, 1e-4
"""Rounding relative to the sums of all clients, and relative size that an eigenvalue may have below 0."""
RIDGE = 1e-2
"""Ridge of the fit to all clients, relative to the diagonal."""
EXPLAINED, CHANCE = 2 / 3, 0.05
"""Part of the errors by chance that is no reason to leave a client out, and the least error by chance."""
SUMS, SLOPES = ("gram", "moment", "square"), ("loss", "slope", "spread", "curvature", "num_examples")


@dataclass(frozen=True)
class Claim:
    """Sums that a client says are of its examples.

    Args:
        sums: "gram", (columns, columns), "moment", (columns, targets), and "square", (targets,).
        examples, before: their number, and the number that has counted of the client so far.
        ones: the column of ones. None without.
        slopes: of a softmax, by the names of :class:`~lightning_fedbayes.modules.HeadSlopes`. None without.
        noisy: the client says that it adds noise.
        all: the sums of all clients, from which these were computed by subtraction. None if they were not.
    """

    sums: Mapping[str, Tensor]
    examples: int
    ones: int | None = -1
    before: float = 0.0
    slopes: Mapping[str, Tensor] | None = None
    noisy: bool = False
    all: Mapping[str, Tensor] | None = None

    @property
    def is_possible(self) -> bool:
        """True if some examples have these sums."""
        gram, moment, square = (self.sums[name] for name in SUMS)
        count = self.examples if self.ones is None else float(gram[self.ones, self.ones])
        around = torch.zeros_like(gram) if self.all is None else self.all["gram"]
        units = (gram.diagonal().clamp_min(0) + ROUNDING * around.diagonal().abs()).sqrt()
        units = torch.where(units > 0, units, 1.0)
        allowed = square * (1 + SLACK) + (0.0 if self.all is None else ROUNDING**2 * self.all["square"].abs())
        if not abs(count - self.examples) <= SLACK or not _fits(gram, units, moment, allowed):
            return False
        if self.slopes is None:
            return True
        loss, slope, spread, curvature, count = (self.slopes[name].to(gram) for name in SLOPES)
        ones, bound = torch.ones_like(slope[0]), self.examples * (1 + SLACK)
        return (
            abs(float(count) - self.examples) <= SLACK
            and float(loss) >= 0
            and bool((slope.sum(0).abs() <= SLACK * units * max(1, self.examples) ** 0.5).all())
            and _fits(gram, units, slope.T, bound * ones.new_ones(len(slope)))
            and float(spread.trace()) <= bound
            and bool((spread.sum(0).abs() <= SLACK * bound).all())
            and _fits(spread, (spread.diagonal().clamp_min(0) + ROUNDING).sqrt())
            and _fits(curvature, units)
            and _fits(gram / 4 - curvature, units)
        )


def scatter_of(claim: Claim) -> float:
    """Return the factor by which means over a client's examples may be larger."""
    return 1 + 2 / math.sqrt(max(1, claim.examples))


def _fits(gram: Tensor, units: Tensor, moment: Tensor | None = None, square: Tensor | None = None) -> bool:
    """Return True if ``gram``, one or many, has no negative eigenvalue, and moments are possible with the squares."""
    scaled = gram / units / units[:, None]
    if not bool(((scaled - scaled.mT).abs() <= SLACK).all()):
        return False
    root, failed = torch.linalg.cholesky_ex(scaled + SLACK * torch.eye(len(units)).to(scaled))
    if bool(failed.any()):
        return False
    if moment is None or square is None:
        return True
    half = torch.linalg.solve_triangular(root, moment / units[:, None], upper=False)
    return bool((half.square().sum(0) <= square).all())


class SumsGuard(Guard):
    """Measures clients' sums, and leaves out those that stand out. Sizes have the shape (clients, 8, 1).

    ``counted_of`` returns the sums that have counted of a client so far. ``keeps``: the server has to keep them.
    ``is_new``: none have. Parameters that are not a head's sums have no bound.
    """

    num_lengths: ClassVar[int] = 2
    leaves_out: ClassVar[bool] = True

    def __init__(
        self,
        posterior: GaussianPosterior,
        max_influence: float,
        counted_of: Callable[[int], Mapping[str, Tensor]] = lambda client: {},
        keeps: bool = False,
        memory: Mapping[str, Tensor] = MappingProxyType({}),
        is_alone: bool = False,
        part: float = 1.0,
        is_new: bool = True,
    ) -> None:
        super().__init__(GaussianPosterior.point_mass(posterior.mean), (), max_influence, memory, is_alone, part)
        self._counted_of, self._keeps = counted_of, keeps
        self._has_head = all(f"sums.{name}" in posterior.mean for name in SUMS)
        self._total = 0.0 if is_new or not self._has_head else float(posterior.mean["sums.gram"][-1, -1])
        self._measured: list[Tensor] = []
        self._gram, self._moment, self._fitted = torch.zeros(()), torch.zeros(()), 0

    def sizes_of(self, updates: Sequence[ClientUpdate], *, by_pieces: bool = False) -> Tensor:
        """See :meth:`Guard.sizes_of`."""
        claims = [self._claim(update) for update in updates]
        return self.measured(claims) if self._has_head else torch.zeros(len(claims), BEFORE + 1, 1).double()

    def absurd(self, updates: Sequence[ClientUpdate], sizes: Tensor) -> Tensor:
        """See :meth:`Guard.absurd`: what is too much is known with the limits."""
        return torch.zeros(len(updates), dtype=torch.bool)

    def _claim(self, update: ClientUpdate) -> Claim:
        """Return all sums of a client, of which it has sent the change. Note them if the server has to keep them."""
        before, found = self._counted_of(update.client), dict[str, Tensor]()
        for name, value in update.posterior.mean.items():
            found[name] = (value - self.previous.mean[name]).detach()
            if name in before:
                found[name] = found[name] + before[name].to(value)
        if self._keeps:
            self.counted[update.client] = {name: value for name, value in found.items() if name.startswith("sums.")}
        if not self._has_head:
            return Claim({}, update.num_examples)
        slopes = {name: found.get(f"slopes.{name}", torch.zeros(())) for name in SLOPES}
        counted = float(before["sums.gram"][-1, -1]) if "sums.gram" in before else 0.0
        return Claim(
            {name: found[f"sums.{name}"] for name in SUMS},
            update.num_examples,
            before=counted,
            slopes=slopes if any(bool(each.any()) for each in slopes.values()) else None,
            noisy=any(name in update.metrics for name in EPSILONS),
            all={name: self.previous.mean[f"sums.{name}"] for name in SUMS},
        )

    def measured(self, claims: Sequence[Claim]) -> Tensor:
        """Return the sizes of clients' sums. Those that seem right become part of the fit that explains others."""
        rows = torch.zeros(len(claims), BEFORE + 1, dtype=torch.float64)
        for row, claim in zip(rows, claims, strict=True):
            examples, scatter = max(1, claim.examples), scatter_of(claim)
            square = float(claim.sums["square"].sum())
            row[FEATURES] = max(0.0, float(claim.sums["gram"].trace()) / examples) ** 0.5 / scatter
            row[TARGETS] = max(0.0, square / examples) ** 0.5 / scatter
            row[EXAMPLES], row[BEFORE], row[NOISE] = claim.examples, claim.before, float(claim.noisy)
            row[NO_CLASSES] = abs(square - claim.examples)
            row[FAULT] = float(not claim.is_possible)
        self._measured.append(rows)
        known = torch.cat(self._measured)
        good = (rows <= self._limits(known, [1.0] * len(known))).all(1).tolist()
        places = [place for place, is_good in enumerate(good) if is_good]
        cap = FEW * float(known[:, EXAMPLES].median())
        parts = {place: min(1.0, cap / max(1, claims[place].examples)) for place in places}
        for place, part in parts.items():
            self._add(claims[place], part)
        while self._fitted >= FEWEST:
            rows[:, MISFIT] = self._misfits(claims)
            limit = self._limits(torch.cat(self._measured), [1.0] * len(known))[MISFIT]
            suspects = [place for place in parts if rows[place, MISFIT] > limit]
            if not suspects:
                break
            worst = min(suspects, key=lambda place: self._errors_without(place, claims, parts[place]))
            self._add(claims[worst], -parts.pop(worst))  # others may seem wrong because of it
        return rows.nan_to_num(nan=math.inf)[:, :, None].cpu()

    def _add(self, claim: Claim, part: float) -> None:
        """Add a part of a client's sums to the fit."""
        self._gram = self._gram + part * claim.sums["gram"]
        self._moment = self._moment + part * claim.sums["moment"]
        self._fitted += 1 if part > 0 else -1

    def _errors_without(self, place: int, claims: Sequence[Claim], part: float) -> float:
        """Return the sum of the other clients' errors by a fit without the client at a place."""
        self._add(claims[place], -part)
        errors = self._misfits(claims)
        self._add(claims[place], part)
        return float(errors.sum() - errors[place])

    def _misfits(self, claims: Sequence[Claim]) -> Tensor:
        """Return each client's mean squared error by the fit, relative to the error by chance."""
        size, shares = self._gram.diagonal(), self._moment[-1] / self._gram[-1, -1]
        ridge = torch.where(size > 0, RIDGE * size, 1.0).diag()
        weights = torch.linalg.solve(self._gram + ridge, self._moment)
        chance, errors = float((1 - shares.square().sum()).clamp_min(CHANCE)), []
        for claim in claims:
            gram, moment, square = (claim.sums[name] for name in SUMS)
            error = square.sum() - 2 * (weights * moment).sum() + (weights * (gram @ weights)).sum()
            errors.append(float(error) / (chance * max(1, claim.examples) * scatter_of(claim)))
        return torch.tensor(errors, dtype=torch.float64)

    def limits(self, sizes: Tensor, weights: Sequence[float], clients: Sequence[int] = ()) -> Limits:
        """See :meth:`Guard.limits`. Where most clients add noise to their sums there are none."""
        return Limits(self._limits(sizes[:, :, 0], weights)[:, None], sum(weights) / len(weights))

    def _limits(self, rows: Tensor, weights: Sequence[float]) -> Tensor:
        usual, bound = weighted_median(rows, weights), self.max_influence
        limits = torch.full_like(usual, math.inf)
        if float(usual[NOISE]):
            return limits
        limits[FAULT] = 0.0
        if self.is_alone:
            return limits
        lengths = usual[: self.num_lengths] * torch.tensor([1.0, FEW])
        if len(rows) < FEWEST:
            second = rows[:, : self.num_lengths].sort(0).values[-2] if len(rows) >= RANKED else 0 * lengths
            lengths = FEW * torch.maximum(second, self.memory.get("sizes", second))
        else:
            examples = rows[:, EXAMPLES].sum()
            everyone = torch.maximum(examples, examples + self._total - rows[:, BEFORE].sum())
            limits[EXAMPLES] = everyone * bound / (1 + bound)
            if usual[NO_CLASSES] <= SLACK:
                limits[NO_CLASSES] = SLACK
                limits[MISFIT] = max(EXPLAINED, bound * float(usual[MISFIT]))
        limits[: self.num_lengths] = torch.where(lengths > 0, bound * lengths, math.inf)
        return limits

    def remember(self, sizes: Tensor, weights: Sequence[float], clients: Sequence[int]) -> None:
        """See :meth:`Guard.remember`."""
        lengths = sizes[:, : self.num_lengths, 0].sort(0).values
        usual = lengths[-2] if len(lengths) >= RANKED else lengths[-1]
        self.memory["sizes"] = torch.maximum(usual, DECAY**self.part * self.memory.get("sizes", usual))

    def why(self, limits: Tensor, sizes: Tensor) -> str:
        """Return why a client of these sizes is left out."""
        beyond = (sizes > limits)[:, 0]
        return f"{REASONS[FAULT if beyond[FAULT] else int(beyond.int().argmax())]}. {REMEDY}"

    def left_out(self, claims: Mapping[int, Claim]) -> dict[int, str]:
        """Return client → why its sums do not count, without rounds."""
        sizes, equal = self.measured([*claims.values()]), [1.0] * len(claims)
        limits = self.limits(sizes, equal).sizes
        return {c: f"client {c}: {self.why(limits, each)}" for c, each in zip(claims, sizes) if (each > limits).any()}
