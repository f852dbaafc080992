"""Parts of the experiments with untrusted parties: fixed features of images, and stochastic gradients."""

import math

import pytest
import torch
from torch import nn

from benchmarks.untrusted.attacks import RULES, attacks_of, run
from benchmarks.untrusted.federation import Task, accuracy, cross_entropy, federate
from benchmarks.untrusted.images import derivatives, oriented_gradients


@pytest.mark.parametrize("slope", [(1.0, 0.0), (0.0, -2.0), (0.5, 0.3)])
def test_derivatives_of_a_slope_are_its_projections(slope):
    down, across = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
    found = derivatives((slope[0] * across + slope[1] * down)[None, None])
    angles = torch.arange(8) * math.pi / 4
    expected = (slope[0] * angles.cos() + slope[1] * angles.sin()).relu()
    inside = found[0, :, 1:-1, 1:-1]
    torch.testing.assert_close(inside, expected[:, None, None].expand_as(inside), atol=1e-5, rtol=0)


def test_oriented_gradients_do_not_depend_on_the_other_images():
    images = torch.rand(3, 784, generator=torch.Generator().manual_seed(0))
    features = oriented_gradients(images)
    assert features.shape == (3, 3920)
    torch.testing.assert_close(features[1:2], oriented_gradients(images[1:2]))


def test_every_round_draws_anew_and_a_run_repeats():
    def drawn_values() -> list[float]:
        seen: list[float] = []

        class Watched(nn.Linear):
            def forward(self, input):
                if torch.is_grad_enabled():
                    seen.extend(input.detach().flatten().tolist())
                return super().forward(input)

        examples = torch.arange(1000.0)[:, None] / 1000, torch.zeros(1000, dtype=torch.long)
        task = Task(Watched(1, 2), cross_entropy, accuracy, lambda each: torch.optim.SGD(each, lr=0.0))
        federate(task, [examples] * 2, examples, "krum", None, rounds=4, batch_size=1, seed=0, drawn=1)
        return seen

    torch.manual_seed(0)
    first = drawn_values()
    torch.manual_seed(0)
    assert drawn_values() == first
    assert len(set(first)) >= 8  # two parties, four rounds


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rule", "adversaries"), [("reverse-KL barycenter", 1), ("geometric median", 3)])
def test_bad_clients_cost_at_most_three_hundredths(rule, adversaries):
    """Digits, ten clients. Unguarded, the first rule had 0.1 under the first attack, the second under the last."""
    honest, _ = run(RULES[rule], [], seed=0)
    assert honest > 0.93
    attacks = attacks_of(list(range(adversaries)))
    for title in ("flipped × 10, σ² × 1e-10", "update × 1e6", "honest, σ² × 1e10"):
        assert run(RULES[rule], attacks[title], seed=0)[0] >= honest - 0.03, title
