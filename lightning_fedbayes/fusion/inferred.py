"""Rules that infer each client's noise from the updates of all rounds, and their state."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError, check_number
from lightning_fedbayes.fusion.distances import centred_products, consensus, near_clients
from lightning_fedbayes.fusion.gram import combine, combine_variances, fused_by_shares, gram_of, squared_distances
from lightning_fedbayes.fusion.rule import Cohort, Fused, ReliabilityRule, RuleState

NEGLIGIBLE = 0.01
"""Part of an equal share below which a client is reported as left out."""
ALIKE = 1e-4
"""Part of an update's squared length below which the squared distance to another makes the two count as one."""


class InferredRule(ReliabilityRule):
    r"""A rule under the model :math:`x_{ij} \sim N(y_i, \cdot)`: updates are noisy observations of one ground truth.

    An update is the difference of a client's mean to the previous global mean (to 0 if that is not known). Such a rule
    needs only the squared distances between clients and to the origin. Its state holds averages of the clients'
    products around each round's consensus, per pair, so clients may miss rounds.

    Clients that send nearly the same update count as one, and share its reliability, if the previous global posterior
    is known: else those who agree on what to send would look the most reliable. The variance of a probabilistic
    parameter is the clients' median, weighted by the inferred shares.

    Args:
        memory: discount of earlier rounds per round, from 0 (each round is scored alone) to 1 (all rounds count the
            same, as in [Untrusted] Algorithm 1). A value below 1 is for clients that change.

    Raises:
        FusionError: ``memory`` is not in [0, 1].
    """

    by_columns: ClassVar[bool] = True

    def __init__(self, memory: float = 1.0) -> None:
        check_number("memory", memory, "[0, 1]", error=FusionError, why="it is the discount of earlier rounds")
        self.memory = float(memory)

    @abstractmethod
    def infer(self, distances: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Infer the coefficients of the ground truth, and the clients' reliabilities.

        Args:
            distances: shape (K + 1, K + 1), float64: mean squared differences per parameter between the K clients
                and the origin, which comes last.
            size: number of parameters P.

        Returns: coefficients of the updates, shape (K,), and reliabilities, shape (K,), none negative, of sum 1.
        """

    def apply(self, cohort: Cohort, state: RuleState) -> Fused:
        """See :meth:`FusionRule.apply`."""
        gram = gram_of(cohort)
        now = squared_distances(gram.products) / max(gram.size, 1)
        near = near_clients(now)
        points = torch.cat([near, torch.ones(1, dtype=torch.bool)])
        clients = tuple(client for client, kept in zip(cohort.clients, near.tolist(), strict=True) if kept)
        distances, new_state = average_rounds(state, clients, now[points][:, points], self.memory)
        coefficients, shares = torch.zeros(2, len(near), dtype=torch.float64)
        coefficients[near], shares[near] = self._infer(distances, gram.size, cohort.previous is not None)
        reasons = {
            position: f"its inferred share of {share:.2g} is less than a hundredth of an equal one"
            for position, share in enumerate(shares.tolist())
            if share < NEGLIGIBLE / len(shares)
        }
        mean = combine(cohort.posteriors, coefficients, cohort.previous)
        variance = combine_variances(cohort.posteriors, shares)
        return fused_by_shares(cohort, mean, variance, shares, reasons, new_state)

    def _infer(self, distances: Tensor, size: int, known: bool) -> tuple[Tensor, Tensor]:
        """As :meth:`infer`; equal shares for identical clients, and the consensus where the result is not finite.

        Nearly equal updates count as one if the origin is ``known``.
        """
        count = len(distances) - 1
        if count == 1 or not bool(distances[:-1, :-1].any()):
            equal = torch.full((count,), 1 / count, dtype=torch.float64)
            return equal, equal
        groups = alike(distances) if known else torch.eye(count, dtype=torch.bool)
        first = groups.float().argmax(0).unique()  # one of each group, in their order
        places = torch.cat([first, torch.tensor([count])])
        among = distances[places][:, places]
        inferred = self.infer(among, size)
        if not all(bool(torch.isfinite(each).all()) for each in inferred):
            inferred = (consensus(among),) * 2
        members = groups[first].to(torch.float64)
        spread = members / members.sum(1, keepdim=True)
        return inferred[0] @ spread, inferred[1] @ spread


def alike(distances: Tensor) -> Tensor:
    """Return which clients send nearly the same update, shape (K, K), bool: each row a group, or part of none.

    A client belongs to the group of the first client that lies within :data:`ALIKE` of the squared length of the
    shorter of their updates.

    Args:
        distances: squared distances of the K clients and, last, the origin, shape (K + 1, K + 1).

    >>> alike(torch.tensor([[0.0, 9.0, 8.0, 5.0], [9.0, 0.0, 0.0, 4.0], [8.0, 0.0, 0.0, 4.0], [5.0, 4.0, 4.0, 0.0]]))
    tensor([[ True, False, False],
            [False,  True,  True],
            [False, False, False]])
    """
    lengths, count = distances[:-1, -1], len(distances) - 1
    near = distances[:-1, :-1] <= ALIKE * torch.minimum(lengths[:, None], lengths)
    groups, left = torch.zeros(count, count, dtype=torch.bool), torch.ones(count, dtype=torch.bool)
    for client in range(count):
        if left[client]:
            groups[client] = near[client] & left
            left &= ~groups[client]
    return groups


def average_rounds(state: RuleState, clients: tuple[int, ...], now: Tensor, memory: float) -> tuple[Tensor, RuleState]:
    r"""Return squared distances between clients, and to the origin, averaged over the rounds so far.

    With :math:`\hat y_i` the geometric median of round i and :math:`\delta_{ij} = x_{ij} - \hat y_i`, the products
    :math:`\delta_{ij} \cdot \delta_{ik}` are averaged per pair over the rounds that both have taken part in, as in
    [Untrusted] Remark 1, :math:`\delta_{ij} \cdot \hat y_i` per client and :math:`\|\hat y_i\|^2` over all rounds.
    Since each round has a consensus of its own, an outlier in one round does not affect clients that missed it.

    Args:
        state: {"clients", "products", "counts", "along", "signal", "rounds"} of earlier rounds, or empty.
        clients: numbers of this round's clients.
        now: this round's squared distances between them and the origin, which comes last, shape (K + 1, K + 1).
        memory: weight of the earlier rounds relative to this one.

    Returns: the distances, shape (K + 1, K + 1), and the new state.
    """
    if memory == 0:
        return now, {}
    shares = consensus(now)
    point = torch.cat([shares, shares.new_zeros(1)])
    gram = centred_products(now, point)  # of the clients and the origin
    known = list(state.get("clients", []))
    place = {client: i for i, client in enumerate(known)}
    for client in clients:
        place.setdefault(client, len(place))
    products, counts = torch.zeros(2, len(place), len(place), dtype=torch.float64)
    along = torch.zeros(len(place), dtype=torch.float64)
    signal, rounds = memory * state.get("signal", 0.0), memory * state.get("rounds", 0.0)
    if known:
        old = slice(0, len(known))
        products[old, old], counts[old, old] = memory * state["products"], memory * state["counts"]
        along[old] = memory * state["along"]
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
        average = positive_semidefinite(average)
    updated = {"clients": list(place), "products": products, "counts": counts, "along": along}
    return squared_distances(average), {**updated, "signal": signal, "rounds": rounds}


def positive_semidefinite(products: Tensor) -> Tensor:
    """Return a Gram matrix close to ``products`` with the same diagonal.

    The entries of ``products`` are averages over different rounds, so they need not be the products of any points:
    negative eigenvalues of their correlations are set to 0.
    """
    lengths = products.diagonal().clamp_min(0).sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 0.0)
    values, vectors = torch.linalg.eigh(products * scale[:, None] * scale)
    gram = (vectors * values.clamp_min(0)) @ vectors.T
    again = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).rsqrt() * lengths
    return gram * again[:, None] * again
