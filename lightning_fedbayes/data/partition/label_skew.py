"""Partitions with label skew: few classes per client, or class proportions from a Dirichlet distribution."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from lightning_fedbayes.core.errors import PartitionError, check_at_least, check_choice, check_flag, check_number, shown
from lightning_fedbayes.data.partition.base import Array, LabelPartition, LabelSource, check_enough

Per = Literal["label", "client"]
MAX_REDRAWS = 1000
MAX_ALPHA = 1e12
"""Above this the proportions are equal in double precision, and far above it their sum overflows."""


@dataclass(frozen=True)
class ClassPartition(LabelPartition):
    """Give each client exactly m classes (quantity-based label imbalance).

    The data are cut into K·m shards of one class each, and each client gets m random ones of different classes. Larger
    classes are cut into more, so that the largest shard is as small as possible. It deals every example exactly once.

    Use it for the hardest label skew. K·m must be at least the number of classes.

    Args:
        clients: number of clients K.
        classes_per_client: m, from 1 to the number of classes.
        labels: where the classes are found. See :class:`~lightning_fedbayes.data.partition.base.LabelPartition`.

    Source: [FBDL] §3.1, after Li et al. (2022).

    >>> import torch
    >>> print(ClassPartition(clients=3, classes_per_client=2).split(torch.tensor([0, 1, 2] * 4), seed=0))
    client      0      1      2  total
         0      0      2      2      4
         1      2      0      2      4
         2      2      2      0      4
     total      4      4      4     12
    """

    clients: int
    classes_per_client: int = 2
    labels: LabelSource = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("clients", self.clients, 1, error=PartitionError)
        check_at_least("classes_per_client", self.classes_per_client, 1, error=PartitionError)

    def deal_classes(self, labels: Array, generator: np.random.Generator) -> list[Array]:
        classes, sizes = np.unique(labels, return_counts=True)
        shards = self._shards_of_classes(sizes, generator)
        stacks = [
            np.array_split(generator.permutation(np.flatnonzero(labels == label)), number)
            for label, number in zip(classes, shards)
        ]
        hands: list[Array] = [np.empty(0, np.int64)] * self.clients
        for client, held in deal_distinct(shards, self.clients, self.classes_per_client, generator).items():
            hands[client] = np.concatenate([stacks[c].pop() for c in held])
        return hands

    def _shards_of_classes(self, sizes: Array, generator: np.random.Generator) -> Array:
        """Return the number of shards of each class: K·m in all, from 1 to K per class, none empty."""
        wanted, most = self.clients * self.classes_per_client, np.minimum(sizes, self.clients)
        if self.classes_per_client > len(sizes):
            have = f"but the data have {len(sizes)} classes; lower it"
            raise PartitionError(f"classes_per_client is {self.classes_per_client}, {have}")
        product, remedy = f"{self.clients} clients × {self.classes_per_client} classes", "clients or classes_per_client"
        if wanted < len(sizes):
            raise PartitionError(f"{product} cover only {wanted} of the {len(sizes)} classes; raise {remedy}")
        if wanted > most.sum():
            have = f"classes of {shown(sizes.tolist())} examples give only {most.sum()}"
            raise PartitionError(f"{product} need {wanted} shards, but {have}; lower {remedy}")
        shards, tie = np.ones_like(sizes), generator.permutation(len(sizes))
        for _ in range(wanted - len(sizes)):
            largest = np.where(shards < most, sizes / shards, -1.0)
            shards[max(range(len(sizes)), key=lambda c: (largest[c], tie[c]))] += 1
        return shards


def deal_distinct(shards: Array, clients: int, per_client: int, generator: np.random.Generator) -> dict[int, Array]:
    """Return client → ``per_client`` different classes, where class c is dealt ``shards[c]`` times.

    Clients are served in random order. Each takes every class that has as many shards left as clients are left, and
    draws the others in proportion to their shards. This always succeeds.
    """
    left, held = shards.copy(), {}
    for served, client in enumerate(generator.permutation(clients)):
        forced = np.flatnonzero(left == clients - served)
        chance = np.where(left < clients - served, left, 0).astype(float)
        free = per_client - len(forced)
        drawn = generator.choice(len(left), free, replace=False, p=chance / chance.sum()) if free else []
        held[int(client)] = np.concatenate([forced, drawn]).astype(np.int64)
        left[held[int(client)]] -= 1
    return held


@dataclass(frozen=True)
class DirichletPartition(LabelPartition):
    r"""Label skew of adjustable strength: one class per client for α → 0, equal proportions for α → ∞.

    ``per="label"``: each label y is split over the K clients by proportions
    :math:`(p_{y1}, …, p_{yK}) \sim \mathrm{Dir}(α, …, α)`. Clients differ in classes *and* in size, and every example
    is dealt exactly once. Labels are dealt in ascending order. With ``balance`` a client with N/K examples gets no
    more, and the proportions are Dir(α) over the other clients. The partition is redrawn until every client holds
    ``min_examples``.

    ``per="client"``: each client k draws its proportions of the C classes,
    :math:`(p_{k1}, …, p_{kC}) \sim \mathrm{Dir}(α C f_1, …, α C f_C)`, where f are the class frequencies of the data
    (Dir(α, …, α) for equally large classes). Every client holds N // K examples (up to K − 1 are left out), dealt
    without replacement in turns: every client draws what it lacks by its proportions over the classes that are left.
    Classes that run out soften the skew: of ten classes at α = 0.5 the mean :math:`\sum_y p_{ky}^2` is 0.22, not 0.25.

    Use ``"label"`` to compare with [BA-BFL] and most of the literature, ``"client"`` if sizes must not differ.

    Args:
        clients: number of clients K.
        alpha: concentration α > 0. Literature: 0.1 strong, 0.5 usual, 5 mild skew.
        per: ``"label"`` or ``"client"``.
        min_examples: least number of examples of a client with ``per="label"``. None: 10, but at most N // 2K.
        balance: with ``per="label"``, do not give examples of later labels to a client that holds N/K.
        labels: where the classes are found. See :class:`~lightning_fedbayes.data.partition.base.LabelPartition`.

    Sources: ``"label"``: [BA-BFL] §4. ``"client"``: [FBDL] §3.1.

    >>> import torch
    >>> DirichletPartition(clients=4, alpha=0.5, per="client").split(torch.arange(100) % 5, seed=1).sizes
    (25, 25, 25, 25)
    """

    clients: int
    alpha: float
    per: Per = "label"
    min_examples: int | None = None
    balance: bool = True
    labels: LabelSource = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("clients", self.clients, 1, error=PartitionError)
        why = "it is the concentration of a Dirichlet distribution (for equal proportions use IIDPartition)"
        check_number("alpha", self.alpha, "(0, inf)", error=PartitionError, why=why)
        check_choice("per", self.per, get_args(Per), error=PartitionError)
        if self.min_examples is not None:
            check_at_least("min_examples", self.min_examples, 1, error=PartitionError)
        check_flag("balance", self.balance, error=PartitionError)

    def deal_classes(self, labels: Array, generator: np.random.Generator) -> list[Array]:
        total = check_enough(self.clients, len(labels))
        least = self.min_examples or min(10, max(1, total // (2 * self.clients)))
        if least * self.clients > total:
            what = f"min_examples {least} × {self.clients} clients is more than the {total} examples"
            raise PartitionError(f"{what}; lower min_examples or clients")
        classes, supply = np.unique(labels, return_counts=True)
        if self.per == "label":
            counts = self._counts_per_label(supply, least, generator)
        else:
            proportions = draw_proportions(self.clients, self.alpha, supply, generator)
            counts = deal_by_proportions(proportions, len(labels) // self.clients, supply, generator)
        hands: list[list[Array]] = [[] for _ in range(self.clients)]
        for label, column in zip(classes, counts.T):
            stack = generator.permutation(np.flatnonzero(labels == label))
            for hand, part in zip(hands, np.split(stack[: column.sum()], np.cumsum(column)[:-1])):
                hand.append(part)
        return [np.concatenate(hand) for hand in hands]

    def _counts_per_label(self, supply: Array, least: int, generator: np.random.Generator) -> Array:
        """Draw counts of shape (clients, classes) until every client has at least ``least`` examples."""
        fewest = 0
        for _ in range(MAX_REDRAWS):
            counts = split_labels(self.clients, self.alpha, supply, self.balance, generator)
            if counts.sum(1).min() >= least:
                return counts
            fewest = max(fewest, int(counts.sum(1).min()))
        gave = f"gave all {self.clients} clients {least} of the {supply.sum()} examples (best: {fewest})"
        remedy = "raise alpha, lower min_examples or clients, or use per='client'"
        raise PartitionError(f"none of {MAX_REDRAWS} draws of Dirichlet({self.alpha}) {gave}; {remedy}")


def split_labels(clients: int, alpha: float, supply: Array, balance: bool, generator: np.random.Generator) -> Array:
    """Split every label over the clients by its own Dirichlet draw (``per="label"``). See :class:`DirichletPartition`.

    Returns: counts of shape (K, C). Columns sum to ``supply``, shape (C,).
    """
    counts = np.zeros((clients, len(supply)), np.int64)
    for c, available in enumerate(supply):
        open_clients = np.arange(clients)
        if balance:
            open_clients = np.flatnonzero(counts.sum(1) * clients < supply.sum())
        # Rounding favours some positions; random positions treat all clients alike.
        turns = generator.permutation(open_clients)
        proportions = generator.dirichlet(np.full(len(turns), min(alpha, MAX_ALPHA)))
        cuts = np.floor(np.cumsum(proportions)[:-1] * available).astype(np.int64)
        counts[turns, c] = np.diff(cuts, prepend=0, append=available)
    return counts


def draw_proportions(clients: int, alpha: float, supply: Array, generator: np.random.Generator) -> Array:
    """Draw class proportions of each client, shape (clients, C), rows from Dir(α·C·f) with f = supply / N."""
    concentration = min(alpha, MAX_ALPHA) * len(supply) * supply / supply.sum()
    return generator.dirichlet(concentration, size=clients)


def deal_by_proportions(proportions: Array, size: int, supply: Array, generator: np.random.Generator) -> Array:
    """Give each client ``size`` examples by its class proportions, without replacement (``per="client"``).

    Proportions have shape (K, C). ``supply``, (C,), is the number of examples of each class, at least K·size in all.

    Returns: counts of shape (K, C). Rows sum to ``size``, columns to at most ``supply``.
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
