"""Rules that infer each client's noise from the updates of all rounds."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion.cohort import Cohort, Fused, Memory
from lightning_fedbayes.fusion.gram import combine, gram_of
from lightning_fedbayes.fusion.gram_rule import judged
from lightning_fedbayes.fusion.rule import JudgingRule

NEGLIGIBLE = 0.01
"""Part of an equal share below which a client is reported as left out."""


class InferredRule(JudgingRule):
    r"""A rule under the model :math:`x_{ij} \sim N(y_i, \cdot)`: updates are noisy observations of one ground truth.

    An update is the difference of a client's mean to the previous global mean (to 0 if that is not known). All that
    such a rule needs of it are squared distances between clients, and to the origin. Their averages over rounds are
    what it remembers, per pair of clients, so clients may miss rounds.

    Variances of probabilistic parameters are averaged with the inferred shares.

    Args:
        memory: how much a round counts in the next, from 0 (every round is judged alone) to 1 (all rounds count the
            same, as in [Untrusted] Algorithm 1). Less than 1 forgets, where clients change.

    Raises:
        FusionError: ``memory`` is not in [0, 1].
    """

    def __init__(self, memory: float = 1.0) -> None:
        if not 0 <= memory <= 1:
            raise FusionError(f"memory={memory}: how much a round counts in the next lies in [0, 1]")
        self.memory = memory

    @abstractmethod
    def infer(self, distances: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The coefficients of the ground truth, and what each client counts.

        Args:
            distances: shape (K + 1, K + 1), float64: mean squared differences per parameter between the K clients
                and the origin, which comes last.
            size: number of parameters P.

        Returns: coefficients of the updates, shape (K,), and shares, shape (K,), none negative, of sum 1.
        """

    def apply(self, cohort: Cohort, memory: Memory) -> Fused:
        """See :meth:`FusionRule.apply`."""
        gram = gram_of(cohort.posteriors, cohort.previous)
        squares = gram.products.diagonal()
        now = (squares[:, None] + squares - 2 * gram.products).clamp_min(0).fill_diagonal_(0) / max(gram.size, 1)
        distances, remembered = remember(memory, (*cohort.clients, ORIGIN), now, self.memory)
        count = len(cohort.clients)
        if count == 1 or not bool(now[:-1, :-1].any()):
            coefficients = shares = torch.full((count,), 1 / count, dtype=torch.float64)
        else:
            coefficients, shares = self.infer(distances, gram.size)
        reasons = {
            position: f"its inferred share of {share:.2g} is less than a hundredth of an equal one"
            for position, share in enumerate(shares.tolist())
            if share < NEGLIGIBLE / count
        }
        mean = combine(cohort.posteriors, coefficients, cohort.previous)
        return judged(cohort, mean, shares, reasons, remembered)


ORIGIN = -1
"""The number under which the origin is remembered among the clients."""


def remember(
    memory: Memory, points: tuple[int, ...], now: Tensor, discount: float
) -> tuple[Tensor, Memory]:
    """Average squared distances over rounds, per pair of points.

    Args:
        memory: {"points", "sums", "counts"} of earlier rounds, or empty.
        points: numbers of this round's points.
        now: this round's squared distances between them, shape (n, n).
        discount: how much the rounds before count against this one.

    Returns: the averages for ``points``, shape (n, n), made such that they belong to points of a Euclidean space; and
        the new memory.
    """
    if discount == 0:
        return now, {}
    known = list(memory.get("points", []))
    place = {point: i for i, point in enumerate(known)}
    for point in points:
        place.setdefault(point, len(place))
    sums, counts = torch.zeros(2, len(place), len(place), dtype=torch.float64)
    if known:
        sums[: len(known), : len(known)] = discount * memory["sums"]
        counts[: len(known), : len(known)] = discount * memory["counts"]
    rows = torch.tensor([place[point] for point in points])
    here = rows[:, None], rows[None, :]
    sums[here] += now
    counts[here] += 1
    average = sums[here] / counts[here]
    if bool((counts[here] != counts[here][0, 0]).any()):
        average = euclidean(average)
    return average, {"points": list(place), "sums": sums, "counts": counts}


def euclidean(distances: Tensor) -> Tensor:
    """The squared distances of the points whose Gram matrix is nearest to the one that ``distances`` imply.

    Averages over different rounds need not be squared distances of any points: a Gram matrix made of them may have
    negative eigenvalues, which are set to 0 here.
    """
    gram = gram_about_last(distances)
    values, vectors = torch.linalg.eigh(gram)
    gram = torch.zeros_like(distances)
    gram[:-1, :-1] = (vectors * values.clamp_min(0)) @ vectors.T
    squares = gram.diagonal()
    return (squares[:, None] + squares - 2 * gram).clamp_min(0).fill_diagonal_(0)


def gram_about_last(distances: Tensor) -> Tensor:
    """Inner products of the first n − 1 points as seen from the last, shape (n − 1, n − 1)."""
    towards = distances[:-1, -1]
    return (towards[:, None] + towards - distances[:-1, :-1]) / 2


def squared_lengths(distances: Tensor, directions: Tensor) -> Tensor:
    """‖Σ_i b_i p_i‖² for columns b of ``directions``, shape (n, m), each of sum 0, from squared distances of n points.

    Only differences of points enter, so nothing cancels however far all of them are from the origin.
    """
    return (-(directions * (distances @ directions)).sum(0) / 2).clamp_min(0)
