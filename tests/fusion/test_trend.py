"""The estimate of a distance from what an earlier posterior is away, on paths whose end is known."""

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


def divergence(mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor) -> float:
    return float(torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, log_std.exp()), torch.distributions.Normal(other_mean, other_log_std.exp())
    ).mean())


@pytest.mark.parametrize(("rounds", "mark"), [(20, 10), (39, 10), (40, 20), (79, 20), (100, 40), (300, 80), (320, 160)])
def test_the_distance_is_that_from_a_round_in_the_first_half(rounds, mark):
    generator = torch.Generator().manual_seed(0)
    means = 0.1 * torch.randn(rounds, 7, generator=generator, dtype=torch.float64).cumsum(0)
    log_stds = 0.02 * torch.randn(rounds, 7, generator=generator, dtype=torch.float64).cumsum(0)
    wanted = divergence(means[-1], log_stds[-1], means[mark - 1], log_stds[mark - 1])
    assert estimate(log_stds, means) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("rounds", [50, 100, 200])
def test_a_path_that_falls_as_a_power_of_the_round_is_about_as_far_from_its_end(power, rounds):
    """Of the means in units of σ: within a factor of 3 of the true distance, or above it."""
    start = torch.randn(200, generator=torch.Generator().manual_seed(0))
    rest = start * torch.arange(1, rounds + 1)[:, None] ** -power
    true = float(rest[-1].square().mean() / 2)
    assert estimate(torch.zeros_like(rest), rest) > true / 3


def test_a_posterior_that_creeps_has_not_arrived():
    """σ on its way from 0.007 to 0.9, by at most 0.01 a round: half way, the change is small, the distance is not."""
    rounds = 60
    path = (-5 + 0.01 * torch.arange(rounds)[:, None]).expand(rounds, 50)
    assert estimate(path, torch.zeros(rounds, 50)) > 1000 * 0.01**2  # of a round, in nats


def test_noise_around_the_end_is_the_distance():
    generator = torch.Generator().manual_seed(0)
    means = 0.1 * torch.randn(60, 5000, generator=generator)
    found = estimate(torch.zeros_like(means), means)
    assert found == pytest.approx(0.1**2, rel=0.2)  # between two looks: twice the variance, half of it is the KL


def test_nothing_is_said_before_round_twenty_and_two_posteriors_are_kept():
    trail, seen = {}, []
    for number in range(90):
        trail = followed(trail, torch.ones(3), torch.full((3,), 1.0 / (number + 1)))
        seen.append("distance" in trail)
    assert seen == [False] * 19 + [True] * 71
    assert list(trail["marks"]) == [40, 80]
    assert trail["rounds"] == 90
