r"""Guard of sums over examples, which add up exactly: a client's sums count as they are, or are left out by name.

Sums of features :math:`G = \sum x x^\top`, moments :math:`M = \sum x y^\top` and squares :math:`\sum y^2` are checked:

* They are of some examples: G is symmetric and positive semidefinite, moments are within its range,
  :math:`M_c^\top G^+ M_c \le \sum y_c^2`, and the constant feature counts the examples of the message. Slopes,
  spread and curvature of a softmax are of some probabilities of these examples.
* Where most clients' targets are classes, :math:`\sum_c M_c = G 1` and :math:`\sum y_c^2 = M_{1c}`, all are.
* The root mean square of features over a client's n examples is within ``max_influence`` times the median client's,
  of targets, whose means may differ, within twice as much. Both are within twice as much of the second largest of
  three to six clients. Few examples scatter, and may be :math:`1 + 2 / \sqrt n` times as large.

Numbers of examples are believed, and so are data.
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

FEATURES, TARGETS, FAULT, NO_CLASSES, NOISE = range(5)
"""Kinds of sizes. NOISE: 1 of a client that adds noise to its sums."""
REASONS = (
    "its features are larger than max_influence allows beside the other clients'",
    "its targets are larger than max_influence allows beside the other clients'",
    "its sums are of no examples: not as many as it says, not symmetric, not positive, or of too large moments",
    "its targets are no classes, as the others' are",
)
REMEDY = "Check its data, or give a larger safeguards=fb.Safeguards(max_influence=...), None for no bound"
ROUNDING, SLACK = 1e-9, 1e-4
"""Rounding relative to the sums of all clients, and relative size that an eigenvalue may have below 0."""
SUMS, SLOPES = ("gram", "moment", "square"), ("loss", "slope", "spread", "curvature", "num_examples")


@dataclass(frozen=True)
class Claim:
    """Sums that a client says are of its examples.

    Args:
        sums: "gram", (columns, columns), "moment", (columns, targets), and "square", (targets,).
        examples: their number.
        ones: the column of ones. None without.
        slopes: of a softmax, by the names of :class:`~lightning_fedbayes.modules.HeadSlopes`. None without.
        noisy: the client says that it adds noise.
        all: the sums of all clients, from which these were computed by subtraction. None if they were not.
    """

    sums: Mapping[str, Tensor]
    examples: int
    ones: int | None = -1
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
        if not abs(count - self.examples) <= SLACK or not fits(gram, units, moment, allowed):
            return False
        if self.slopes is None:
            return True
        loss, slope, spread, curvature, count = (self.slopes[name].to(gram) for name in SLOPES)
        ones, bound = torch.ones_like(slope[0]), self.examples * (1 + SLACK)
        return (
            abs(float(count) - self.examples) <= SLACK
            and float(loss) >= 0
            and bool((slope.sum(0).abs() <= SLACK * units * max(1, self.examples) ** 0.5).all())
            and fits(gram, units, slope.T, bound * ones.new_ones(len(slope)))
            and float(spread.trace()) <= bound
            and bool((spread.sum(0).abs() <= SLACK * bound).all())
            and fits(spread, (spread.diagonal().clamp_min(0) + ROUNDING).sqrt())
            and fits(curvature, units)
            and fits(gram / 4 - curvature, units)
        )

    @property
    def sizes(self) -> list[float]:
        """Its sizes, by their kinds."""
        gram, moment, square = (self.sums[name] for name in SUMS)
        examples = max(1, self.examples)
        scatter = examples**0.5 * (1 + 2 / math.sqrt(examples))
        lengths = [max(0.0, float(each)) ** 0.5 / scatter for each in (gram.trace(), square.sum())]
        ones = -1 if self.ones is None else self.ones
        units = (gram.diagonal().clamp_min(0) * examples).sqrt() + 1
        apart = [abs(float(square.sum()) - self.examples) / examples]
        apart += [float(((moment.sum(1) - gram[:, ones]).abs() / units).max())]
        apart += [float((square - moment[ones]).abs().max()) / examples]
        return [*lengths, float(not self.is_possible), max(apart), float(self.noisy)]


def fits(gram: Tensor, units: Tensor, moment: Tensor | None = None, square: Tensor | None = None) -> bool:
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
    """Measures clients' sums, and leaves out those that stand out. Sizes have the shape (clients, 5, 1).

    ``counted_of`` returns the sums that have counted of a client so far. ``keeps``: the server has to keep them.
    Parameters that are not a head's sums have no bound.
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
    ) -> None:
        super().__init__(GaussianPosterior.point_mass(posterior.mean), (), max_influence, memory, is_alone, part)
        self._counted_of, self._keeps = counted_of, keeps
        self._has_head = all(f"sums.{name}" in posterior.mean for name in SUMS)

    def sizes_of(self, updates: Sequence[ClientUpdate], *, by_pieces: bool = False) -> Tensor:
        claims = [self._claim(update) for update in updates]
        rows = [claim.sizes if self._has_head else [0.0] * (NOISE + 1) for claim in claims]
        return torch.tensor(rows, dtype=torch.float64).nan_to_num_(nan=math.inf)[:, :, None]

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
        return Claim(
            {name: found[f"sums.{name}"] for name in SUMS},
            update.num_examples,
            slopes=slopes if any(bool(each.any()) for each in slopes.values()) else None,
            noisy=any(name in update.metrics for name in EPSILONS),
            all={name: self.previous.mean[f"sums.{name}"] for name in SUMS},
        )

    def limits(self, sizes: Tensor, weights: Sequence[float], clients: Sequence[int] = ()) -> Limits:
        """See :meth:`Guard.limits`. Where most clients add noise to their sums there are none."""
        rows = sizes[:, :, 0]
        usual, bound = weighted_median(rows, weights), self.max_influence
        limits = torch.full_like(usual, math.inf)
        if not float(usual[NOISE]):
            limits[FAULT] = 0.0
            lengths = usual[: self.num_lengths] * torch.tensor([1.0, FEW])
            if len(rows) < FEWEST:
                second = rows[:, : self.num_lengths].sort(0).values[-2] if len(rows) >= RANKED else 0 * lengths
                lengths = FEW * torch.maximum(second, self.memory.get("sizes", second))
            elif usual[NO_CLASSES] <= SLACK:
                limits[NO_CLASSES] = SLACK
            if not self.is_alone:
                limits[: self.num_lengths] = torch.where(lengths > 0, bound * lengths, math.inf)
        return Limits(limits[:, None], sum(weights) / len(weights))

    def remember(self, sizes: Tensor, limits: Tensor, clients: Sequence[int]) -> None:
        lengths = sizes[:, : self.num_lengths, 0].sort(0).values
        usual = lengths[-2] if len(lengths) >= RANKED else lengths[-1]
        self.memory["sizes"] = torch.maximum(usual, DECAY**self.part * self.memory.get("sizes", usual))

    def why(self, limits: Tensor, sizes: Tensor) -> str:
        """Return why a client of these sizes is left out."""
        beyond = (sizes > limits)[:, 0]
        return f"{REASONS[FAULT if beyond[FAULT] else int(beyond.int().argmax())]}. {REMEDY}"

    def left_out(self, claims: Mapping[int, Claim]) -> dict[int, str]:
        """Return client → why its sums do not count, without rounds."""
        sizes = torch.tensor([each.sizes for each in claims.values()], dtype=torch.float64).nan_to_num_(nan=math.inf)
        limits = self.limits(sizes[:, :, None], [1.0] * len(claims)).sizes
        rows = zip(claims, sizes[:, :, None], strict=True)
        return {client: f"client {client}: {self.why(limits, row)}" for client, row in rows if (row > limits).any()}
