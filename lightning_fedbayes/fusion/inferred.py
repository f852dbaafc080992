"""Rules that infer each client's noise from the updates of all rounds."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion.cohort import Cohort, Fused, Memory
from lightning_fedbayes.fusion.geometric_median import GeometricMedian
from lightning_fedbayes.fusion.gram import Gram, combine, gram_of
from lightning_fedbayes.fusion.gram_rule import judged
from lightning_fedbayes.fusion.rule import JudgingRule

NEGLIGIBLE = 0.01
"""Part of an equal share below which a client is reported as left out."""


class InferredRule(JudgingRule):
    r"""A rule under the model :math:`x_{ij} \sim N(y_i, \cdot)`: updates are noisy observations of one ground truth.

    An update is the difference of a client's mean to the previous global mean (to 0 if that is not known). All that
    such a rule needs of it are squared distances between clients, and to the origin. What it remembers are averages
    of the clients' products around each round's consensus, per pair, so clients may miss rounds.

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
        near = near_clients(now)
        points = torch.cat([near, torch.ones(1, dtype=torch.bool)])
        clients = tuple(client for client, kept in zip(cohort.clients, near.tolist(), strict=True) if kept)
        distances, remembered = remember(memory, clients, now[points][:, points], self.memory)
        coefficients, shares = torch.zeros(2, len(near), dtype=torch.float64)
        coefficients[near], shares[near] = self._infer(distances, gram.size)
        reasons = {
            position: f"its inferred share of {share:.2g} is less than a hundredth of an equal one"
            for position, share in enumerate(shares.tolist())
            if share < NEGLIGIBLE / len(shares)
        }
        mean = combine(cohort.posteriors, coefficients, cohort.previous)
        return judged(cohort, mean, shares, reasons, remembered)

    def _infer(self, distances: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """As :meth:`infer`; equal shares where all are one, and the consensus where the rule finds no answer."""
        count = len(distances) - 1
        if count == 1 or not bool(distances[:-1, :-1].any()):
            equal = torch.full((count,), 1 / count, dtype=torch.float64)
            return equal, equal
        inferred = self.infer(distances, size)
        if all(bool(torch.isfinite(each).all()) for each in inferred):
            return inferred
        start = consensus(distances)
        return start, start


def near_clients(distances: Tensor) -> Tensor:
    """Which clients are not so far off that in double precision they would drown the others, shape (K,), bool.

    A client that is counts as absent in that round.

    Args:
        distances: see :meth:`InferredRule.infer`.
    """
    count = len(distances) - 1
    nearest = distances[:-1, :-1].sort(1).values[:, min(count - 1, max(1, count // 4))]
    return nearest <= FAR * least_noise(nearest, 1.0)


FAR = 1e8
"""Squared distance to its nearest clients, in units of the others', from which a client is left out."""
NOTHING = 1e-9
"""Ratio of noise variances below which one is 0 but for rounding."""

def remember(
    memory: Memory, clients: tuple[int, ...], now: Tensor, discount: float
) -> tuple[Tensor, Memory]:
    r"""Squared distances between clients, and to the origin, that stand for all rounds.

    With :math:`\hat y_i` the geometric median of round i and :math:`\delta_{ij} = x_{ij} - \hat y_i`, the products
    :math:`\delta_{ij} \cdot \delta_{ik}` are averaged per pair over the rounds that both have taken part in, as in
    [Untrusted] Remark 1, :math:`\delta_{ij} \cdot \hat y_i` per client and :math:`\|\hat y_i\|^2` over all rounds.
    Around the consensus of its own round, another client's bad round says nothing of a client that missed it.

    Args:
        memory: {"clients", "products", "counts", "along", "signal", "rounds"} of earlier rounds, or empty.
        clients: numbers of this round's clients.
        now: this round's squared distances between them and the origin, which comes last, shape (K + 1, K + 1).
        discount: how much the rounds before count against this one.

    Returns: the distances, shape (K + 1, K + 1), and the new memory.
    """
    if discount == 0:
        return now, {}
    shares = consensus(now)
    point = torch.cat([shares, shares.new_zeros(1)])
    around = torch.eye(len(now), dtype=now.dtype) - point[:, None]
    gram = -(around.T @ now @ around) / 2  # of the clients and the origin, as seen from the consensus
    known = list(memory.get("clients", []))
    place = {client: i for i, client in enumerate(known)}
    for client in clients:
        place.setdefault(client, len(place))
    products, counts = torch.zeros(2, len(place), len(place), dtype=torch.float64)
    along = torch.zeros(len(place), dtype=torch.float64)
    signal, rounds = discount * memory.get("signal", 0.0), discount * memory.get("rounds", 0.0)
    if known:
        old = slice(0, len(known))
        products[old, old], counts[old, old] = discount * memory["products"], discount * memory["counts"]
        along[old] = discount * memory["along"]
    rows = torch.tensor([place[client] for client in clients])
    here = rows[:, None], rows[None, :]
    products[here] += gram[:-1, :-1]
    counts[here] += 1
    along[rows] += gram[:-1, -1]
    signal, rounds = signal + float(gram[-1, -1]), rounds + 1
    average = torch.zeros_like(now)
    average[:-1, :-1] = products[here] / counts[here]
    average[:-1, -1] = average[-1, :-1] = along[rows] / counts[here].diagonal()
    average[-1, -1] = signal / rounds
    if bool((counts[here] != rounds).any()):
        average = nearest_gram(average)
    squares = average.diagonal()
    distances = (squares[:, None] + squares - 2 * average).clamp_min(0).fill_diagonal_(0)
    remembered = {"clients": list(place), "products": products, "counts": counts, "along": along, "signal": signal,
                  "rounds": rounds}
    return distances, remembered


def nearest_gram(products: Tensor) -> Tensor:
    """The Gram matrix of the same diagonal nearest to ``products``, whose entries are averages over different rounds.

    Those need not be products of any points: their correlations may have negative eigenvalues, which are set to 0.
    """
    lengths = products.diagonal().clamp_min(0).sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 0.0)
    values, vectors = torch.linalg.eigh(products * scale[:, None] * scale)
    gram = (vectors * values.clamp_min(0)) @ vectors.T
    again = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).rsqrt() * lengths
    return gram * again[:, None] * again


def consensus(distances: Tensor) -> Tensor:
    """Shares of the clients in their geometric median, shape (K,); see :meth:`InferredRule.infer`."""
    clients = distances[:-1, :-1]
    weights = torch.full((len(clients),), 1 / len(clients), dtype=torch.float64)
    centre = int(clients.sort(1).values[:, len(clients) // 2].argmin())
    towards = distances[:, centre]
    return GeometricMedian().judge(Gram((towards[:, None] + towards - distances) / 2, 1), weights)[0]


def residuals(distances: Tensor, shares: Tensor) -> Tensor:
    """Mean squared distances of all points to their combination with ``shares``, which sum to 1, shape (K,)."""
    return squared_lengths(distances, torch.eye(len(shares), dtype=torch.float64) - shares[:, None])


def signal_of(distances: Tensor, shares: Tensor) -> Tensor:
    """Mean square of the update that the clients' ``shares`` make, a scalar."""
    return squared_lengths(distances, torch.cat([shares, -shares.sum(0, keepdim=True)])[:, None])[0]


def least_noise(noise: Tensor, floor: float) -> float:
    """``floor`` in units of the lower quartile of ``noise``, so that a majority that sends noise does not raise it.

    Of the median where the quartile is 0 beside it, or of the largest: some clients then are the consensus.
    """
    ordered = noise.sort().values
    quartile, median, largest = (float(ordered[place]) for place in (len(noise) // 4, len(noise) // 2, -1))
    scale = quartile if quartile > NOTHING * median else median if median > NOTHING * largest else largest
    return floor * (scale or 1.0)


def gram_about_last(distances: Tensor) -> Tensor:
    """Inner products of the first n − 1 points as seen from the last, shape (n − 1, n − 1)."""
    towards = distances[:-1, -1]
    return (towards[:, None] + towards - distances[:-1, :-1]) / 2


def squared_lengths(distances: Tensor, directions: Tensor) -> Tensor:
    """‖Σ_i b_i p_i‖² for columns b of ``directions``, shape (n, m), each of sum 0, from squared distances of n points.

    Only differences of points enter, so nothing cancels however far all of them are from the origin.
    """
    return (-(directions * (distances @ directions)).sum(0) / 2).clamp_min(0)
