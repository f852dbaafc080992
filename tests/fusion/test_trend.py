"""The estimate of a distance from the trend of changes, on paths whose end is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_fedbayes.fusion.trend import followed


def estimate(log_stds: Tensor, means: Tensor) -> float:
    """After all rounds of a path, shape (rounds, P)."""
    trail = {}
    for log_std, mean in zip(log_stds, means, strict=True):
        trail = followed(trail, (-2 * log_std).exp(), mean)
    return trail["distance"]


@pytest.mark.parametrize("rate", [0.9, 0.95, 0.98])
def test_a_geometric_path_has_the_distance_to_its_end(rate):
    """With the rate r per round the rest after n rounds is rⁿ times the start."""
    rounds, generator = 40, torch.Generator().manual_seed(0)
    start = torch.randn(200, generator=generator)
    rest = start * rate ** torch.arange(1, rounds + 1)[:, None]
    for log_std, mean in ((0.1 * rest, torch.zeros_like(rest)), (torch.zeros_like(rest), rest)):
        found = estimate(log_std, mean)
        true = float((2 * log_std[-1] ** 2 + mean[-1] ** 2).mean() / 2)
        factor = max(1.0, rate**10 / (1 - rate**10)) ** 2  # below, it is the size of the last ten rounds
        step = float((2 * (log_std[-1] - log_std[-11]) ** 2 + (mean[-1] - mean[-11]) ** 2).mean() / 2)
        assert found == pytest.approx(factor * step, rel=0.05)
        assert found >= 0.9 * true


def test_a_posterior_that_creeps_has_not_arrived():
    """σ on its way from 0.007 to 0.9, by at most 0.01 a round: half way, the change is small, the distance is not."""
    rounds = 60
    path = (-5 + 0.01 * torch.arange(rounds)[:, None]).expand(rounds, 50)
    assert estimate(path, torch.zeros(rounds, 50)) > 1.0
    change = 0.01**2  # of a round, in nats
    assert estimate(path, torch.zeros(rounds, 50)) > 1e4 * change


def test_noise_around_the_end_is_the_distance():
    generator = torch.Generator().manual_seed(0)
    means = 0.1 * torch.randn(60, 5000, generator=generator)
    found = estimate(torch.zeros_like(means), means)
    assert found == pytest.approx(0.1**2, rel=0.2)  # between two looks: twice the variance, half of it is the KL


def test_nothing_is_said_before_round_thirty_and_between_looks_the_estimate_stays():
    trail, seen = {}, []
    for number in range(45):
        trail = followed(trail, torch.ones(3), torch.full((3,), 1.0 / (number + 1)))
        seen.append(trail.get("distance"))
    assert seen[:29] == [None] * 29
    assert len(set(seen[29:39])) == 1
    assert trail["rounds"] == 45
