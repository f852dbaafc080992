"""Server optimizers: beside the recursions of their source, over rounds, on top of other rules."""

import pytest
import torch

from lightning_fedbayes import GaussianPosterior, fuse
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.fusion import FedAdagrad, FedAdam, FedAvgM, FedYogi, FusionAccumulator
from tests.refusals import refusals

CHANGES = torch.tensor([[1.0, -0.5, 1e-5], [0.5, 0.25, 0.0], [-1.0, 0.25, 1e-5]], dtype=torch.float64)
SECOND = {
    FedAdagrad: lambda v, d: v + d**2,
    FedAdam: lambda v, d: 0.9 * v + 0.1 * d**2,
    FedYogi: lambda v, d: v - 0.1 * d**2 * (v - d**2).sign(),
}


def posterior(mean, variance=0.3):
    return GaussianPosterior({"w": mean}, {"w": torch.full_like(mean, variance)})


def walked(rule, start):
    """The means of three rounds in which two clients' average lies the changes away from the global mean."""
    state, previous, means = rule.init(), posterior(start), []
    for change in CHANGES:
        sums = FusionAccumulator(rule, previous)
        for sign in (1, -1):
            sums.add(posterior(previous.mean["w"] + change + sign), 0.5)
        fused = sums.result(state, {})
        state, previous = fused.state, fused.posterior
        means.append(previous.mean["w"])
    return torch.stack(means)


@pytest.mark.parametrize("kind", SECOND)
def test_an_adaptive_step_is_that_of_algorithm_2(kind):
    start = torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64)
    rule = kind(lr=0.2, beta1=0.7, epsilon=0.01, **({} if kind is FedAdagrad else {"beta2": 0.9}))
    x, m, v, wanted = start, torch.zeros(3), torch.full((3,), 1e-4), []
    for change in CHANGES:
        m, v = 0.7 * m + 0.3 * change, SECOND[kind](v, change)
        x = x + 0.2 * m / (v.sqrt() + 0.01)
        wanted.append(x)
    assert torch.allclose(walked(rule, start), torch.stack(wanted), atol=1e-7)


def test_momentum_adds_up_the_changes_of_all_rounds():
    start = torch.zeros(3, dtype=torch.float64)
    first = CHANGES[0]
    second = CHANGES[1] + 0.9 * first
    wanted = torch.stack([first, second, CHANGES[2] + 0.9 * second]).cumsum(0) * 0.5
    assert torch.allclose(walked(FedAvgM(lr=0.5), start), wanted)


@pytest.mark.parametrize("then", ["weighted_average", "conflation", "linear_pool"])
def test_a_whole_step_without_momentum_is_the_rule_that_fuses(then):
    clients = [posterior(torch.tensor([1.0, 2.0]), 0.2), posterior(torch.tensor([0.0, 5.0]), 0.7)]
    previous = posterior(torch.tensor([3.0, 3.0]))
    found = fuse(FedAvgM(lr=1.0, momentum=0.0, then=then), clients, [1.0, 3.0], previous)
    wanted = fuse(then, clients, [1.0, 3.0], previous)
    assert torch.allclose(found.mean["w"], wanted.mean["w"])
    assert torch.equal(found.variance["w"], wanted.variance["w"])


test_what_cannot_step_is_refused = refusals(
    FusionError,
    (lambda: FedAdam(lr=0.0), "lr=0.0"),
    (lambda: FedAvgM(momentum=1.0), "momentum=1.0"),
    (lambda: FedYogi(epsilon=0.0), "epsilon=0.0"),
    (lambda: FedAdam(then="coordinate_median"), "no plain sum over clients"),
    (lambda: FedAdam(then=FedAvgM()), "no plain sum over clients"),
    (lambda: FedAdam(then="sites"), "it is a method of the federation"),
    (lambda: fuse("fedadam", [posterior(torch.zeros(2))]), "previous"),
)
