r"""Estimate of how far a posterior still is from where its rounds take it, by how far it has come lately."""

from __future__ import annotations

from typing import Any

from torch import Tensor

FIRST = 10
"""First round that the posterior is compared with; the others are 20, 40, 80 and so on."""


def divergence(precision: Tensor, mean: Tensor, old_precision: Tensor, old_mean: Tensor) -> Tensor:
    """Return KL(new‖old) of each entry, in nats; all tensors of shape (P,)."""
    ratio = old_precision / precision
    return (ratio - 1 - ratio.log() + old_precision * (mean - old_mean).square()) / 2


def followed(trail: dict[str, Any], precision: Tensor, mean: Tensor) -> dict[str, Any]:
    r"""Return the trail of a posterior with one more round.

    .. math:: \text{distance} = \frac1P KL(q_r \| q_s), \qquad s = 10 \cdot 2^j \le r / 2

    with the largest such s, in nats per parameter. Rounds whose noise has to average out approach their end as a power
    of their number, so what is left is of the size of what the last half or more of them have changed. What a single
    round changes says nothing of that, because steps fall. Noise around the end counts.

    Args:
        trail: as this function returned it; empty before the first round.
        precision, mean: of the posterior now, shape (P,).

    Returns: "rounds", "marks" (the last two posteriors that it is or will be compared with, by round), and, from round
    20 on, "distance".
    """
    rounds = trail.get("rounds", 0) + 1
    marks: dict[int, dict[str, Tensor]] = dict(trail.get("marks", {}))
    trail = {**trail, "rounds": rounds, "marks": marks}
    behind = [each for each in marks if each <= rounds / 2]
    if behind:
        mark = {name: value.to(mean.device, mean.dtype) for name, value in marks[max(behind)].items()}
        moved = divergence(precision, mean, mark["precision"], mark["mean"])
        trail["distance"] = float(moved.mean()) if len(mean) else 0.0
    tens = rounds // FIRST
    if rounds % FIRST == 0 and tens & (tens - 1) == 0:  # a power of two
        last = {each: marks[each] for each in sorted(marks)[-1:]}
        trail["marks"] = {**last, rounds: {"precision": precision.float(), "mean": mean.float()}}
    return trail
