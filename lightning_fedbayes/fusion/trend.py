r"""Estimate of how far a posterior still is from where its rounds take it, from the trend of its changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

INTERVAL = 10
"""Rounds between two looks at the posterior: the noise of local training averages out between them."""
MOST = 0.95
"""Largest part of a step that the next one can repeat: beyond, no end is in sight, and the estimate is a bound."""


def followed(trail: dict[str, Any], precision: Tensor, mean: Tensor) -> dict[str, Any]:
    r"""Return the trail of a posterior with one more round.

    Every tenth round the posterior is looked at. With the steps :math:`D_1, D_2` of the last two tens of rounds, of
    every mean in posterior standard deviations and every :math:`\sqrt2 \log \sigma`, the part of a step that the next
    one repeats is :math:`q = \langle D_1, D_2 \rangle / \langle D_1, D_1 \rangle`. Steps that go on like that sum up to
    :math:`D_2\, q / (1 - q)`, so the distance, a KL divergence in nats per parameter, is about

    .. math:: \frac{\| D_2 \|^2}{2P} \max\Bigl(1, \frac{q}{1 - q}\Bigr)^2,

    which is that of the last ten rounds where steps have no direction (:math:`q \le \tfrac12`). A posterior that creeps
    in one direction has q near 1: a small change is not a small distance.

    Args:
        trail: as this function returned it; empty before the first round.
        precision, mean: of the posterior now, shape (P,).

    Returns: "rounds", what is needed for the next estimate, and, from round 30 on, "distance".
    """
    rounds = trail.get("rounds", 0) + 1
    trail = {**trail, "rounds": rounds}
    if rounds % INTERVAL:
        return trail
    mean, log_std = mean.float(), precision.log().mul(-0.5).float()
    if "mean" in trail:
        before = trail["mean"].to(mean.device), trail["log_std"].to(mean.device)
        step = torch.cat([(mean - before[0]) * (-log_std).exp(), (log_std - before[1]) * 2**0.5])
        if "step" in trail:
            last = trail["step"].to(step.device)
            repeated = float(torch.dot(last, step) / torch.dot(last, last).clamp_min(1e-30))
            repeated = min(repeated, MOST)
            factor = max(1.0, repeated / (1 - repeated))
            trail["distance"] = float(torch.dot(step, step)) / 2 / max(1, len(mean)) * factor**2
        trail["step"] = step
    return {**trail, "mean": mean, "log_std": log_std}
