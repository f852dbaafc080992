r"""Answers of clients to changes of the model, by which one is found that sends the opposite of its result.

A client's move d from a model :math:`\theta` is its answer to it. Gradients of convex losses are monotone: if the model
changes by h, an honest client's move changes against it, :math:`(d' - d)^\top h \le 0`, whatever its data are, and that
of a client that sends the opposite changes with it. An honest move also changes as the others' do, which see a like
curvature. So let :math:`\rho_k`, over a client's messages, be the correlation of its moves with the models, and that
with the sums of the others' moves, all entries together, from sums that fade by :data:`DECAY`; and m and s median and
spread of :math:`\rho` over the clients, where m has the sign that it must have. Of :math:`N(m, s^2)`, an honest client,
and :math:`N(-m, s^2)`, one that sends the opposite, the second is more likely by :math:`\exp(-2 \rho_k m / s^2)`.

A client is left out when both correlations together say so by the factor :math:`K^{b^2}`, of K clients and b =
``max_influence``: :math:`\rho_k` is then at least b times as far from m as the furthest of K normal numbers, :math:`s
\sqrt{2 \log K}`. None of the two has more weight than that. It counts again when both have an honest client's sign.

Moves that are longer than the median client's last one count by their logarithm, and by no more in sums of others. Of a
large network :data:`MOST_ENTRIES` entries are compared. Fewer than :data:`FEWEST` clients are not.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

KINDS = "moves", "sent"
"""Of the posterior, and of what a method sends with it under names of parameters."""
DECAY = 0.9
"""Factor by which what is known of earlier rounds fades in every round, and of earlier messages with each message."""
FEWEST = 7
"""Least number of clients for a median: three bad ones are a minority among them, and fewer honest clients, of few
batches each, may differ by more than ``max_influence``. So many wait for one another before any is added to sums. Of
small networks twice as many wait, or ``MOST_MEASURED`` entries of them, and are measured together."""
MOST_ENTRIES = 2**12
"""Entries of a network that are compared, drawn once for all. The correlation of n of them scatters by 1 / √n."""
MOST_KNOWN = 2**10
"""Clients that are known at once: those that were heard last."""
ROUNDING = 1e-6
"""Part of its size by which a move of float32 differs for no reason."""
WEIGHT, TO_MODEL, TO_OTHERS, OF_MOVES, OF_MODEL, OF_OTHERS, LENGTH, OUT = range(8)
"""Columns of what is known of a client: sum of weights, of products, of squares; last length, 1 if out."""


def remembered(kind: str, memory: Mapping[str, Tensor], heard: Mapping[int, Tensor], bound: float) -> dict[str, Tensor]:
    """Return what is known after a round of the answers of a ``kind``, by names as in ``memory``.

    ``heard``: client → its move and the model that it started from, (2, entries). ``bound``: ``max_influence``.
    """
    finite = {client: pair for client, pair in sorted(heard.items()) if math.isfinite(float(pair.square().sum()))}
    clients = memory.get(f"{kind} clients", torch.empty(0, dtype=torch.int64))
    known = memory.get(f"{kind} known", torch.empty(0, OUT + 1, dtype=torch.float64))
    means = memory.get(f"{kind} means", torch.empty(0, 3, 0))
    if finite:
        moves, models = torch.stack(tuple(finite.values())).unbind(1)
        same = means.shape[2] == moves.shape[1]  # else the network has gained parameters
        rows = {client: row for row, client in enumerate(clients.tolist() if same else ())}
        others = [row for client, row in rows.items() if client not in finite]

        lengths = moves.norm(dim=1).double()
        usual = torch.cat([lengths, known[others, LENGTH]]).median().clamp_min(1e-300)
        beyond = (lengths / usual).clamp_min(1.0).to(moves.dtype)[:, None]
        within = moves / beyond
        moves = within * (1 + beyond.log())
        now = torch.stack([moves, models, within.sum(0) - within], 1)
        old, before = now.clone(), known.new_zeros(len(now), OUT + 1)
        for place, client in enumerate(finite):
            if client in rows:
                old[place], before[place] = means[rows[client]], known[rows[client]]
        if len(now) < FEWEST:
            now[:, 2] = old[:, 2]  # too few others
        before[:, :LENGTH] *= DECAY
        before[:, WEIGHT] += 1
        steps = now - old
        move, model, rest = steps.unbind(1)
        pairs = (move, model), (move, rest), (move, move), (model, model), (rest, rest)
        products = torch.stack([(left * right).sum(1) for left, right in pairs], 1)
        before[:, TO_MODEL:LENGTH] += (1 - 1 / before[:, WEIGHT])[:, None] * products
        before[:, LENGTH] = lengths
        old += steps / before[:, WEIGHT, None, None].to(steps.dtype)

        clients = torch.cat([clients[others], torch.tensor(list(finite))])[-MOST_KNOWN:]
        known = torch.cat([known[others], before])[-MOST_KNOWN:]
        means = torch.cat([means[others], old])[-MOST_KNOWN:] if others else old[-MOST_KNOWN:]
        if len(known) >= FEWEST:
            known[-len(now) :, OUT] = _judged(known, means, bound)[-len(now) :]
    return {f"{kind} clients": clients, f"{kind} known": known, f"{kind} means": means}


def opposed_of(memory: Mapping[str, Tensor]) -> set[int]:
    """Return the clients that are to be left out by what is known."""
    found = set[int]()
    for kind in KINDS:
        known = memory.get(f"{kind} known", torch.empty(0, OUT + 1))
        found.update(memory.get(f"{kind} clients", known[:, 0])[known[:, OUT] > 0].tolist())
    return found


def _judged(known: Tensor, means: Tensor, bound: float) -> Tensor:
    """Return 1 for each client that is to be left out by what is ``known``, else 0, shape (clients,)."""
    floor = (ROUNDING * means).square().sum((1, 2)) * known[:, WEIGHT]
    is_known = (known[:, WEIGHT] > 1) & (known[:, OF_MOVES] > floor)  # from the second message on
    num = int(is_known.sum())
    if num < FEWEST:
        return known[:, OUT]
    evidence, bar, answers_well = known.new_zeros(len(known)), bound**2 * math.log(num), is_known
    for covariance, variance, sign in ((TO_MODEL, OF_MODEL, -1), (TO_OTHERS, OF_OTHERS, 1)):
        correlations = (known[:, covariance] / (known[:, OF_MOVES] * known[:, variance]).sqrt()).nan_to_num(0.0)
        median = sign * (sign * correlations[is_known]).quantile(0.5).clamp_min(0.0)
        spread = (1.4826 * (correlations[is_known] - median).abs().quantile(0.5)).square()
        pairs = known[:, WEIGHT] * means.shape[2]  # correlations of so many scatter by 1 / root
        answers_well = answers_well & (sign * correlations >= 0)
        evidence += (-2 * correlations * median / spread.maximum(1 / pairs)).clamp(-bar, bar)
    return torch.where(is_known & (evidence >= bar), 1.0, torch.where(answers_well, 0.0, known[:, OUT]))


def entries_of(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return entries of the tensors with these ``names``, as one vector of float64 on the CPU: all, or some of many."""
    parts = [tensors[name].detach().reshape(-1) for name in names]
    if sum(len(part) for part in parts) > MOST_ENTRIES:
        chosen = positions(tuple(len(part) for part in parts))
        parts = [part[where.to(part.device)] for part, where in zip(parts, chosen) if len(where)]
    return torch.cat([part.to("cpu", torch.float64) for part in parts]) if parts else torch.empty(0).double()


@lru_cache(maxsize=8)
def positions(numels: tuple[int, ...]) -> list[Tensor]:
    """Return which entries of tensors of these sizes are compared.

    >>> [len(each) for each in positions((10**6, 10**6))]
    [2054, 2039]
    """
    drawn = torch.randint(sum(numels), (MOST_ENTRIES,), generator=torch.Generator().manual_seed(0)).unique()
    ends = torch.tensor([0, *numels]).cumsum(0)
    return [drawn[(drawn >= start) & (drawn < end)] - start for start, end in pairwise(ends)]
