"""Fusion rules, which turn client posteriors into one global posterior."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, shown
from lightning_fedbayes.core.exchange import ALONE, Collective, Statistics
from lightning_fedbayes.core.posterior import GaussianPosterior, is_dense, is_zero

RuleState = dict[str, Any]
"""State of a rule between rounds: tensors, numbers, strings, and dicts and lists of them."""
Posteriors = Sequence[GaussianPosterior]
Moments = tuple[Tensor, Tensor]
"""Mean and variance of a posterior, flat float64 vectors of shape (P,)."""


@dataclass(frozen=True)
class Cohort:
    """The clients of a round.

    Args:
        posteriors: one per client, with equal names and shapes and finite values.
        weights: shape (clients,), float64, positive, of sum 1.
        previous: the global posterior that the clients started from, if it is known.
        clients: their numbers, by which a rule with a state recognises them in later rounds.
        collective: if this process holds a shard of the parameters, the processes that hold the others. Complete sums
            over parameters by its ``all_reduce``.
    """

    posteriors: Posteriors
    weights: Tensor
    previous: GaussianPosterior | None
    clients: tuple[int, ...]
    collective: Collective = ALONE


@dataclass(frozen=True)
class Fused:
    """The result of a fusion.

    Args:
        posterior: the global posterior.
        reliability: client → its share of the fusion, at least 0, of sum 1. Empty if the rule infers none.
        excluded: client → why the rule left it out.
        state: the rule's state for the next round.
        figures: diagnostics of the rule, name → value.
    """

    posterior: GaussianPosterior
    reliability: dict[int, float] = field(default_factory=dict)
    excluded: dict[int, str] = field(default_factory=dict)
    state: RuleState = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


class FusionRule(ABC):
    """A rule that sees all client posteriors at once.

    Decorate a subclass with :func:`~lightning_fedbayes.fusion.register_fusion` to give it a name. Subclass
    :class:`SumRule` instead if sums over clients are enough.
    """

    uses_weights: ClassVar[bool] = True
    """True if the clients' weights count. Other rules ignore them."""
    needs_previous: ClassVar[bool] = False
    """True if the rule needs the previous global posterior."""
    by_columns: ClassVar[bool] = False
    """True if the rule may fuse a shard of the parameters: it works parameter by parameter, and completes sums over
    parameters by ``cohort.collective``, as :func:`~lightning_fedbayes.fusion.gram.gram_of` does. Processes that
    share the clients then exchange shards. Otherwise each process receives all clients."""

    resists: ClassVar[bool] = False
    """True if the rule bounds what a minority of clients can do. It then gets updates as they were sent. For other
    rules a :class:`~lightning_fedbayes.Server` bounds the influence of each client."""

    narrows: ClassVar[bool] = False
    """True if K clients that agree give 1/K of their variance: over rounds with ``prior="global"`` it goes to 0."""
    keeps_prior: ClassVar[bool] = True
    """True if the fused posterior contains the clients' prior: over rounds its variance goes to a fixed prior's."""

    @abstractmethod
    def fuse(self, posteriors: Posteriors, weights: Tensor, previous: GaussianPosterior | None) -> GaussianPosterior:
        """Return the global posterior. For the arguments see :class:`Cohort`."""

    def init(self) -> RuleState:
        """Return the state of the rule before the first round."""
        return {}

    def check_state(self, state: Any, parameters: int) -> None:  # noqa: B027
        """Raise FusionError unless ``state``, from a checkpoint, fits this rule and so many ``parameters``."""

    def apply(self, cohort: Cohort, state: RuleState) -> Fused:
        """Fuse a cohort. Override it in a rule that has a state or infers reliabilities.

        ``state`` comes from the rounds before and is not to be changed: the new state is in the result. After a
        checkpoint its tensors are on the posterior's device.
        """
        return Fused(self.fuse(cohort.posteriors, cohort.weights, cohort.previous), state=state)


class CohortRule(FusionRule):
    """A rule that is defined by :meth:`apply`. Its ``fuse`` starts from the initial state and counts clients from 0."""

    @abstractmethod
    def apply(self, cohort: Cohort, state: RuleState) -> Fused:
        """See :meth:`FusionRule.apply`."""

    def fuse(self, posteriors: Posteriors, weights: Tensor, previous: GaussianPosterior | None) -> GaussianPosterior:
        cohort = Cohort(tuple(posteriors), weights, previous, tuple(range(len(posteriors))))
        return self.apply(cohort, self.init()).posterior


class ReliabilityRule(CohortRule):
    """A rule that infers each client's reliability from the updates and needs no weights."""

    uses_weights: ClassVar[bool] = False
    resists: ClassVar[bool] = True


class SumRule(FusionRule):
    """A rule that is a closed form of sums over clients.

    It streams: memory is O(P) for any number of clients, and partial sums of several processes merge. Formulas work on
    flat float64 vectors of all P parameters. With ``by_columns = True`` they work on pieces of them, which is faster.
    """

    @abstractmethod
    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        """Add a client of weight ω > 0, not normalised, to ``statistics``, the sums for :meth:`compute`, in place.

        Its posterior, shape (P,), float64, is with ``by_columns`` valid until the call ends.
        """

    @abstractmethod
    def compute(self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None) -> Moments:
        """Return mean and variance of the global posterior from the sums over all clients.

        Args:
            statistics, previous: the sums, and the global posterior that the clients started from.
            like: any client's posterior, for names and shapes in messages.
        """

    def advance(
        self,
        statistics: Statistics,
        like: GaussianPosterior,
        previous: GaussianPosterior | None,
        state: RuleState,
        weights: Mapping[int, float],
    ) -> Fused:
        """Return the result of a round. Override it in a rule with a ``state``, which is not to be changed.

        Args:
            statistics, like, previous, state: see :meth:`compute` and :meth:`FusionRule.apply`.
            weights: client → its weight ω, not normalised, in all processes. Empty outside a federation.
        """
        return Fused(like.unflatten(*self.compute(statistics, like, previous)), state=state)

    def average(self, statistics: Statistics) -> tuple[Tensor, Tensor] | None:
        """Return the weighted mean of the means as (numerator, denominator), or None if it is not in ``statistics``."""
        return None

    def merge(self, statistics: Statistics, other: Statistics) -> None:
        """Add the sums over other clients to ``statistics``, in place."""
        for key, value in other.items():
            add(statistics, key, value)

    def fuse(self, posteriors: Posteriors, weights: Tensor, previous: GaussianPosterior | None) -> GaussianPosterior:
        statistics: Statistics = {}
        for posterior, weight in zip(posteriors, weights.tolist(), strict=True):
            self.update(statistics, *posterior.flatten(), weight)
        return posteriors[0].unflatten(*self.compute(statistics, posteriors[0], previous))


def add(statistics: Statistics, key: str, value: Tensor, scale: float = 1.0) -> None:
    """Compute ``statistics[key] += scale * value``. A missing key counts as 0."""
    if key not in statistics:
        statistics[key] = value * scale
    elif statistics[key].numel() < value.numel():  # one number for all parameters so far, see of_zeros
        statistics[key] = statistics[key] + value * scale
    else:
        statistics[key].add_(value, alpha=scale)


def of_zeros(variance: Tensor) -> Tensor:
    """Return a variance known to be 0 everywhere as one number, shape (1,), which broadcasts. Others unchanged."""
    return variance[:1] if is_zero(variance) else variance


def add_precisions(statistics: Statistics, mean: Tensor, variance: Tensor, weight: float, atom_weight: float) -> None:
    r"""Add a client's weighted precision :math:`\omega/\sigma^2` and :math:`\omega\mu/\sigma^2` to ``statistics``.

    Means of point masses, of infinite precision, are summed separately ("atom_mean", "atom_weight") by
    ``atom_weight``. "precision" and "precision_mean" are missing until a client has a variance.
    """
    if is_zero(variance):
        add(statistics, "atom_weight", of_zeros(variance) + 1, atom_weight)
        add(statistics, "atom_mean", mean, atom_weight)
        return
    precision = torch.reciprocal(variance).mul_(weight)
    if variance.numel() and variance.min() == 0:
        atom = variance == 0
        precision.masked_fill_(atom, 0)
        add(statistics, "atom_weight", atom.to(mean.dtype), atom_weight)
        add(statistics, "atom_mean", mean * atom, atom_weight)
    if "precision_mean" in statistics:
        statistics["precision_mean"].addcmul_(precision, mean)
    else:
        statistics["precision_mean"] = precision * mean
    add(statistics, "precision", precision)


def check_part(rule: FusionRule, state: Any, name: str, shape: tuple[int, ...] | None = None) -> Any:
    """Return ``state[name]``. Raise FusionError unless it is a finite tensor of ``shape``, or with None a mapping."""
    value: Any = state.get(name) if isinstance(state, Mapping) else None
    if shape is None and isinstance(value, Mapping):
        return value
    if shape is None or not is_dense(value) or value.shape != shape or not bool(value.isfinite().all()):
        wanted = "a dict" if shape is None else f"a finite tensor of shape {shape}"
        remedy = "the checkpoint is damaged, or of another network; use another one, or start again"
        raise FusionError(f"{type(rule).__name__}: '{name}' of its state is {shown(value)}, and not {wanted}: {remedy}")
    return value
