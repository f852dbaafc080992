"""What a fusion rule is: a small pure object that turns client posteriors into one global posterior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from lightning_fedbayes.fusion.cohort import Cohort, Fused, Memory
from lightning_fedbayes.posterior import GaussianPosterior

Statistics = dict[str, Tensor]
"""Running sums over clients: float64, each a vector of shape (P,) or a scalar."""


class FusionRule(ABC):
    """A rule that sees all client posteriors at once.

    Subclass it (and decorate the class with :func:`~lightning_fedbayes.fusion.register_fusion`) when the rule needs
    the clients side by side; subclass :class:`SumRule` when sums over clients are enough.
    """

    uses_weights: ClassVar[bool] = True
    """Whether the clients' weights enter. A rule without weights ignores those it is given."""
    needs_previous: ClassVar[bool] = False
    """Whether the rule needs the previous global posterior."""
    by_columns: ClassVar[bool] = False
    """Whether the rule may be given some parameters of all clients at a time: what it does is done parameter by
    parameter, but for :func:`~lightning_fedbayes.fusion.gram.gram_of` and sums of its own that go through
    :func:`~lightning_fedbayes.fusion.columns.total`. Processes that share the clients then exchange blocks of
    parameters; otherwise each gets all clients."""

    @abstractmethod
    def fuse(
        self, posteriors: Sequence[GaussianPosterior], weights: Tensor, previous: GaussianPosterior | None
    ) -> GaussianPosterior:
        """The global posterior.

        Args:
            posteriors: one per client, of equal names and shapes, all values finite.
            weights: shape (clients,), float64, positive, of sum 1.
            previous: the global posterior that the clients started from.
        """

    def init(self) -> Memory:
        """What the rule remembers before the first round."""
        return {}

    def apply(self, cohort: Cohort, memory: Memory) -> Fused:
        """Fuse a round's cohort; rules that judge clients or remember rounds say more than :meth:`fuse` does.

        Args:
            cohort: who takes part, and what they send.
            memory: of the rounds before, left as it is; the new one is in the result.
        """
        return Fused(self.fuse(cohort.posteriors, cohort.weights, cohort.previous), memory=memory)


class JudgingRule(FusionRule):
    """A rule that infers from the updates how far each client can be trusted. It needs no weights."""

    uses_weights: ClassVar[bool] = False

    @abstractmethod
    def apply(self, cohort: Cohort, memory: Memory) -> Fused:
        """See :meth:`FusionRule.apply`."""

    def fuse(
        self, posteriors: Sequence[GaussianPosterior], weights: Tensor, previous: GaussianPosterior | None
    ) -> GaussianPosterior:
        """See :meth:`FusionRule.fuse`: one round without a memory."""
        clients = tuple(range(len(posteriors)))
        return self.apply(Cohort(tuple(posteriors), weights, previous, clients), self.init()).posterior


class SumRule(FusionRule):
    """A rule that is a closed form of sums over clients.

    It streams: memory is O(P) whatever the number of clients, partial sums of several processes merge, and the sums
    survive secure aggregation. Formulas work on flat float64 vectors of all P parameters.
    """

    by_columns: ClassVar[bool] = True

    @abstractmethod
    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        """Add one client to ``statistics``, in place (an empty dict at first).

        Args:
            statistics: what :meth:`compute` needs, so far.
            mean, variance: the client's posterior, shape (P,), float64.
            weight: the client's weight ω > 0, not normalised.
        """

    @abstractmethod
    def compute(
        self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of the global posterior, shape (P,) each, from the finished ``statistics``.

        Args:
            statistics: the sums over all clients.
            like: any client's posterior: names and shapes, for messages.
            previous: the global posterior that the clients started from.
        """

    def merge(self, statistics: Statistics, other: Statistics) -> None:
        """Add the sums over other clients to ``statistics``, in place."""
        for key, value in other.items():
            add(statistics, key, value)

    def fuse(
        self, posteriors: Sequence[GaussianPosterior], weights: Tensor, previous: GaussianPosterior | None
    ) -> GaussianPosterior:
        """See :meth:`FusionRule.fuse`."""
        statistics: Statistics = {}
        for posterior, weight in zip(posteriors, weights.tolist(), strict=True):
            self.update(statistics, *posterior.flatten(), weight)
        return posteriors[0].unflatten(*self.compute(statistics, posteriors[0], previous))


def add(statistics: Statistics, key: str, value: Tensor, scale: float = 1.0) -> None:
    """``statistics[key] += scale * value``; a missing key counts as 0."""
    if key in statistics:
        statistics[key].add_(value, alpha=scale)
    else:
        statistics[key] = value * scale


def add_product(statistics: Statistics, key: str, first: Tensor, second: Tensor) -> None:
    """``statistics[key] += first * second``; a missing key counts as 0."""
    if key in statistics:
        statistics[key].addcmul_(first, second)
    else:
        statistics[key] = first * second
