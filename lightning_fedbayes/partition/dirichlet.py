"""Clients whose class proportions follow a Dirichlet distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_fedbayes.errors import PartitionError, nearest
from lightning_fedbayes.partition.base import Array, LabelPartition, check_clients, check_enough

MAX_REDRAWS = 1000
MAX_ALPHA = 1e12
"""Beyond this the proportions are equal to double precision, and much beyond it their sum overflows."""


@dataclass(frozen=True)
class DirichletPartition(LabelPartition):
    r"""Label skew of adjustable strength: α → 0 gives clients of one class, α → ∞ clients with equal proportions.

    ``per="label"``: each label y is split over the K clients by proportions
    :math:`(p_{y1}, …, p_{yK}) \sim \mathrm{Dir}(α, …, α)`. Clients differ in classes *and* in size. Every example
    is dealt exactly once. Labels are dealt in ascending order; with ``balance`` a client that already holds N/K
    examples gets no more, and the others' proportions are those of Dir(α) among themselves (which is what
    renormalising gives). The whole is redrawn until every client holds ``min_examples``.

    ``per="client"``: each client k draws its proportions of the C classes,
    :math:`(p_{k1}, …, p_{kC}) \sim \mathrm{Dir}(α C f_1, …, α C f_C)`, where f are the class frequencies of the data
    (Dir(α, …, α) when the classes are equally large). All clients hold N // K examples (up to K − 1 are left out).
    They are dealt without replacement: all clients ask at once for what they still lack, by a multinomial draw
    from their proportions; a class that cannot serve all requests serves a random subset of them and has run out;
    then they ask again with their proportions over the remaining classes. (A client whose classes have all run
    out takes from the rest in proportion to what is left.) So no client comes first, and all together use up the data.

    Use ``"label"`` to compare with BA-BFL and with most of the literature, ``"client"`` when size must not differ.

    Args:
        clients: number of clients K.
        alpha: concentration α > 0. Literature: 0.1 strong, 0.5 usual, 5 mild skew.
        per: ``"label"`` or ``"client"``.
        min_examples: least number of examples of a client under ``per="label"``. None means 10, but no more than
            half an equal share (N // 2K, at least 1), which small data could not satisfy by chance.
        balance: under ``per="label"``, whether a client that holds N/K examples gets no more of later labels.

    Sources: ``"label"``: BA-BFL (2024) §5; ``"client"``: Federated Bayesian deep learning (2024) §3.1.

    >>> import torch
    >>> DirichletPartition(clients=4, alpha=0.5, per="client").split(torch.arange(100) % 5, seed=1).sizes
    (25, 25, 25, 25)
    """

    clients: int
    alpha: float
    per: Literal["label", "client"] = "label"
    min_examples: int | None = None
    balance: bool = True

    def __post_init__(self) -> None:
        check_clients(self.clients)
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise PartitionError(
                f"alpha is {self.alpha}; the concentration of a Dirichlet distribution is above 0 and finite "
                "(for equal proportions use IIDPartition)"
            )
        if self.per not in ("label", "client"):
            raise PartitionError(f"per is '{self.per}'; {nearest(self.per, ['label', 'client'])}")
        if self.min_examples is not None and self.min_examples < 1:
            raise PartitionError(f"min_examples is {self.min_examples}; every client needs at least 1 example")

    def deal_classes(self, labels: Array, generator: np.random.Generator) -> list[Array]:
        """Draw how many examples of each class every client gets, then which."""
        least = self._least(check_enough(self.clients, len(labels)))
        classes, supply = np.unique(labels, return_counts=True)
        if self.per == "label":
            counts = self._counts_per_label(supply, least, generator)
        else:
            counts = deal_by_proportions(
                draw_proportions(self.clients, self.alpha, supply, generator), len(labels) // self.clients,
                supply, generator,
            )
        hands: list[list[Array]] = [[] for _ in range(self.clients)]
        for label, column in zip(classes, counts.T):
            stack = generator.permutation(np.flatnonzero(labels == label))
            for hand, part in zip(hands, np.split(stack[: column.sum()], np.cumsum(column)[:-1])):
                hand.append(part)
        return [np.concatenate(hand) for hand in hands]

    def _least(self, num_examples: int) -> int:
        """The number of examples that every client must get."""
        if self.min_examples is None:
            return min(10, max(1, num_examples // (2 * self.clients)))
        if self.min_examples * self.clients > num_examples:
            raise PartitionError(
                f"min_examples {self.min_examples} × {self.clients} clients is more than the {num_examples} examples; "
                "lower min_examples or clients"
            )
        return self.min_examples

    def _counts_per_label(self, supply: Array, least: int, generator: np.random.Generator) -> Array:
        """Counts of shape (clients, classes) in which every client has at least ``least`` examples."""
        fewest = 0
        for _ in range(MAX_REDRAWS):
            counts = split_labels(self.clients, self.alpha, supply, self.balance, generator)
            if counts.sum(1).min() >= least:
                return counts
            fewest = max(fewest, int(counts.sum(1).min()))
        raise PartitionError(
            f"none of {MAX_REDRAWS} draws of Dirichlet({self.alpha}) gave all {self.clients} clients {least} of the "
            f"{supply.sum()} examples (best: {fewest}); raise alpha, lower min_examples or clients, or use "
            "per='client', which makes all clients equally large"
        )


def split_labels(clients: int, alpha: float, supply: Array, balance: bool, generator: np.random.Generator) -> Array:
    """Split every label over the clients by its own Dirichlet draw (``per="label"``).

    Args:
        clients: number of clients K.
        alpha: concentration.
        supply: number of examples of each class, shape (C,).
        balance: whether a client that holds at least N/K examples gets no more.
        generator: source of the draws.

    Returns: counts of shape (K, C) whose columns sum to ``supply``.
    """
    counts = np.zeros((clients, len(supply)), np.int64)
    for c, available in enumerate(supply):
        open_clients = np.arange(clients)
        if balance:
            open_clients = np.flatnonzero(counts.sum(1) * clients < supply.sum())
        # Rounding favours some positions, so positions are random: all clients fare alike.
        turns = generator.permutation(open_clients)
        proportions = generator.dirichlet(np.full(len(turns), min(alpha, MAX_ALPHA)))
        cuts = np.floor(np.cumsum(proportions)[:-1] * available).astype(np.int64)
        counts[turns, c] = np.diff(cuts, prepend=0, append=available)
    return counts


def draw_proportions(clients: int, alpha: float, supply: Array, generator: np.random.Generator) -> Array:
    """Class proportions of each client, shape (clients, C), rows from Dir(α·C·f) with f = supply / N."""
    concentration = min(alpha, MAX_ALPHA) * len(supply) * supply / supply.sum()
    return generator.dirichlet(concentration, size=clients)


def deal_by_proportions(proportions: Array, size: int, supply: Array, generator: np.random.Generator) -> Array:
    """Give each client ``size`` examples by its class proportions, without replacement (``per="client"``).

    Args:
        proportions: shape (K, C), rows sum to 1.
        size: number of examples of every client; K·size ≤ N.
        supply: number of examples of each class, shape (C,), sum N.
        generator: source of the draws.

    Returns: counts of shape (K, C); rows sum to ``size``, columns are at most ``supply``. Ends after at most C turns,
    because each turn either serves everybody or exhausts a class.
    """
    counts, left = np.zeros(proportions.shape, np.int64), supply.copy()
    while (lacking := size - counts.sum(1)).any():
        chances = np.where(left > 0, proportions, 0.0)
        chances[chances.sum(1) <= 0] = left
        requests = generator.multinomial(lacking, chances / chances.sum(1, keepdims=True))
        for c in np.flatnonzero(requests.sum(0) > left):
            requests[:, c] = generator.multivariate_hypergeometric(requests[:, c], left[c])
        counts += requests
        left = left - requests.sum(0)
    return counts
