"""Client posteriors in, one at a time; the global posterior out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError, PosteriorError
from lightning_fedbayes.fusion.cohort import Cohort, Fused, Memory
from lightning_fedbayes.fusion.registry import FuseFunction, get_rule, rule_name
from lightning_fedbayes.fusion.rule import FusionRule, Statistics, SumRule
from lightning_fedbayes.fusion.shared import fusing, merging
from lightning_fedbayes.posterior import GaussianPosterior, check_same_structure, zeros_like
from lightning_fedbayes.processes import ALONE, Processes, Talk


class FusionAccumulator:
    """Fuses clients as they arrive: sums for sum-type rules, copies for the others.

    Args:
        rule: the fusion rule.
        previous: the global posterior that the clients started from, for rules that need it.
        processes: of which each adds clients of its own; with others, ``previous`` must be given.

    Raises:
        FusionError: the rule needs a previous posterior and there is none.
    """

    def __init__(
        self, rule: FusionRule, previous: GaussianPosterior | None = None, processes: Processes = ALONE
    ) -> None:
        if rule.needs_previous and previous is None:
            raise FusionError(
                f"{rule_name(rule)} needs the previous global posterior, which the clients started from: "
                "pass previous=..."
            )
        if previous is not None:
            check_finite(previous, *previous.flatten(), "previous posterior")
        self.rule = rule
        self.previous = previous
        self.processes = processes
        self.count = 0
        self._scale = 1.0
        self._like: GaussianPosterior | None = None
        self._statistics: Statistics = {}
        self._posteriors: list[GaussianPosterior] = []
        self._weights: list[float] = []
        self._clients: list[int] = []

    def add(self, posterior: GaussianPosterior, weight: float = 1.0) -> None:
        """Add one client; a client of weight 0 changes nothing.

        Raises:
            FusionError: names or shapes differ from those before, a value is not finite, or the weight is negative
                or not finite. The clients added before are kept as they were.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise FusionError(f"client {self.count}: weight {weight} is not a finite number of at least 0")
        like = self.previous if self.previous is not None else self._like
        if like is not None:
            check_structure(posterior, like, f"client {self.count}")
            posterior = posterior.ordered(like.names)
        mean, variance = posterior.flatten()
        check_finite(posterior, mean, variance, f"client {self.count}")
        self.add_checked(self.count, posterior, mean, variance, weight)

    def add_checked(
        self, client: int, posterior: GaussianPosterior, mean: Tensor, variance: Tensor, weight: float
    ) -> None:
        """As :meth:`add`, for what is known to be right: ``mean`` and ``variance`` are ``posterior.flatten()``.

        Args:
            client: the number by which a rule with a memory knows the client again.
            posterior, mean, variance, weight: what it sends, and what it counts.
        """
        self.count += 1
        if weight == 0 and self.rule.uses_weights:
            return
        if self._like is None:
            if self.processes.count == 1:  # others cannot know it
                self._scale = weight if weight > 0 else 1.0  # relative weights: a single client's is exactly 1
            self._like = GaussianPosterior.point_mass({n: zeros_like(m) for n, m in posterior.mean.items()})
        weight = weight / self._scale
        self._weights.append(weight)
        self._clients.append(client)
        if isinstance(self.rule, SumRule):
            self.rule.update(self._statistics, mean, variance, weight)
        else:
            self._posteriors.append(posterior.clone())

    def compute(self) -> GaussianPosterior:
        """The global posterior of all clients added so far, by a rule that remembers nothing; see :meth:`finishing`."""
        [fused] = self.processes.hold(self.finishing(self.rule.init()))
        return fused.posterior

    def finishing(self, memory: Memory, total: float | None = None) -> Talk[Fused]:
        """The fusion of all clients that all processes have added so far.

        Args:
            memory: what the rule remembers of earlier rounds.
            total: the sum of their weights; None: there are no other processes.

        Raises:
            FusionError: no client with a positive weight was added, or the rule cannot fuse these.
        """
        total = sum(self._weights) if total is None else total
        if not total > 0:
            raise FusionError(
                f"nothing to fuse: {self.count} clients, of which none has a positive weight; "
                "give at least one client and one positive weight"
            )
        like = self._like if self._like is not None else self.previous
        assert like is not None
        if isinstance(self.rule, SumRule):
            statistics = yield from merging(self.rule, self._statistics, like, self.processes)
            return Fused(like.unflatten(*self.rule.compute(statistics, like, self.previous)), memory=memory)
        weights = torch.tensor(self._weights, dtype=torch.float64) / total
        cohort = Cohort(self._posteriors, weights, self.previous, tuple(self._clients))
        return (yield from fusing(self.rule, cohort, like, memory, self.processes))


def fuse(
    rule: str | FusionRule | FuseFunction,
    posteriors: Iterable[GaussianPosterior],
    weights: Sequence[float] | Tensor | None = None,
    previous: GaussianPosterior | None = None,
) -> GaussianPosterior:
    """Fuse client posteriors into one global posterior.

    Args:
        rule: a registered name or alias (see :func:`available_fusions`), or a rule object.
        posteriors: the clients. An iterator is consumed one by one: sum-type rules never hold more than one client.
        weights: one per client, none negative, not all 0; they are normalised. None gives every client the same.
            Rules that take no weights (conflation, dwc, gaussian_fit) ignore them.
        previous: the global posterior that the clients started from; ``dwc`` needs it.

    Raises:
        FusionError: unknown rule; no client; names or shapes that differ; values that are not finite; weights of
            the wrong number, negative or all 0; a fusion that is not defined (see the rule).

    >>> import torch
    >>> a = GaussianPosterior({"w": torch.tensor([0.0])}, {"w": torch.tensor([1.0])})
    >>> b = GaussianPosterior({"w": torch.tensor([2.0])}, {"w": torch.tensor([0.25])})
    >>> q = fuse("reverse_kl_barycenter", [a, b])
    >>> q.mean["w"], q.variance["w"]
    (tensor([1.6000]), tensor([0.4000]))
    """
    resolved = get_rule(rule)
    accumulator = FusionAccumulator(resolved, previous)
    values = None if weights is None else _weight_values(weights)
    for k, posterior in enumerate(posteriors):
        if values is not None and k >= len(values):
            raise FusionError(f"{len(values)} weights for more than {len(values)} posteriors; give one per client")
        accumulator.add(posterior, 1.0 if values is None else values[k])
    if values is not None and accumulator.count != len(values):
        raise FusionError(f"{len(values)} weights for {accumulator.count} posteriors; give one per client")
    return accumulator.compute()


def _weight_values(weights: Sequence[float] | Tensor) -> list[float]:
    """Client weights as floats, checked."""
    values = torch.as_tensor(weights, dtype=torch.float64).reshape(-1).tolist()
    wrong = [value for value in values if not (math.isfinite(value) and value >= 0)]
    if wrong:
        raise FusionError(f"weights must be finite and at least 0, got {wrong[0]} among {values}")
    if values and sum(values) == 0:
        raise FusionError(f"weights sum to 0: {values}; at least one client needs a positive weight")
    largest = max(values, default=1.0)
    return [value / largest for value in values]


def check_structure(posterior: GaussianPosterior, like: GaussianPosterior, who: str) -> None:
    """Raise FusionError unless ``posterior`` has the names and shapes of ``like``."""
    try:
        check_same_structure(like.mean, posterior.mean, "the global model", who)
    except PosteriorError as error:
        raise FusionError(str(error)) from None


def check_finite(posterior: GaussianPosterior, mean: Tensor, variance: Tensor, who: str) -> None:
    """Raise FusionError if a mean or variance of ``posterior`` (flat: ``mean``, ``variance``) is not finite."""
    # a sum is finite only if its terms are (float64 does not overflow here): one pass and no temporary
    total = mean.sum() if posterior.is_point_mass else mean.sum() + variance.sum()
    if math.isfinite(total):
        return
    for kind, values in (("mean", posterior.mean), ("variance", posterior.variance)):
        for name, value in values.items():
            wrong = int((~torch.isfinite(value)).sum())
            if wrong:
                raise FusionError(f"{who}: {kind} of '{name}' is not finite at {wrong} of {value.numel()} entries")
