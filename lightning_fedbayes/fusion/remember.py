"""Distances between clients that stand for all rounds, though each has missed some."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedbayes.fusion.cohort import Memory
from lightning_fedbayes.fusion.distances import centred_products, consensus
from lightning_fedbayes.fusion.gram import squared_distances


def remember(memory: Memory, clients: tuple[int, ...], now: Tensor, discount: float) -> tuple[Tensor, Memory]:
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
    gram = centred_products(now, point)  # of the clients and the origin
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
        average = positive_semidefinite(average)
    remembered = {"clients": list(place), "products": products, "counts": counts, "along": along, "signal": signal,
                  "rounds": rounds}
    return squared_distances(average), remembered


def positive_semidefinite(products: Tensor) -> Tensor:
    """A Gram matrix close to ``products``, of the same diagonal, whose entries are averages over different rounds.

    Those need not be products of any points: their correlations may have negative eigenvalues, which are set to 0.
    """
    lengths = products.diagonal().clamp_min(0).sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 0.0)
    values, vectors = torch.linalg.eigh(products * scale[:, None] * scale)
    gram = (vectors * values.clamp_min(0)) @ vectors.T
    again = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).rsqrt() * lengths
    return gram * again[:, None] * again
