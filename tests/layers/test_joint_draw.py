"""Joint draws against the formulas, differentiated by autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from lightning_fedbayes.layers.functional import gaussian_kl_sum, softplus_std
from lightning_fedbayes.layers.joint_draw import JointDraw

SHAPES = [(3, 4, 2), (3, 5), (3,), (3, 1, 1, 2)]
PRIORS = [None, (0.0, 1.0), (0.3, 0.7), (0.0, 2.0), (-1.0, 1.0)]


@pytest.fixture
def parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in 2 * SHAPES]


def joint(prior, parameters):
    torch.manual_seed(0)
    return JointDraw.apply(prior, *parameters)


def by_hand(prior, parameters):
    """The same draws and divergences out of torch's own operations."""
    torch.manual_seed(0)
    count = len(parameters) // 2
    mean, rho = (torch.cat([p.flatten(1) if p.dim() > 1 else p[:, None] for p in half], 1)
                 for half in (parameters[:count], parameters[count:]))
    std = softplus_std(rho)
    drawn = mean + std * torch.randn_like(mean)
    sizes = [p[0].numel() for p in parameters[:count]]
    draws = [part.reshape(p.shape) for part, p in zip(drawn.split(sizes, 1), parameters)]
    kl = [] if prior is None else [torch.stack([gaussian_kl_sum(m, s, *prior) for m, s in zip(mean, std)])]
    return *draws, mean, rho, std, *kl


def weighted(outputs, *, only=None):
    """A sum in which every entry counts differently."""
    chosen = [outputs[i] for i in only] if only is not None else outputs
    return sum((out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum() for out in chosen)


@pytest.mark.parametrize("prior", PRIORS)
def test_outputs_and_gradients(prior, parameters):
    found, expected = joint(prior, parameters), by_hand(prior, parameters)
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)
    gradients = torch.autograd.grad(weighted(found), parameters)
    for one, other in zip(gradients, torch.autograd.grad(weighted(expected), parameters)):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("prior", PRIORS)
def test_second_derivatives(prior, parameters):
    assert gradcheck(lambda *p: joint(prior, p), parameters)
    assert gradgradcheck(lambda *p: joint(prior, p), parameters)


@pytest.mark.parametrize("prior", PRIORS[:2])
@pytest.mark.parametrize("only", [[0], [1, 3], [0, 2, 3]])
def test_what_is_not_used_gets_no_gradient(prior, only, parameters):
    gradients = torch.autograd.grad(weighted(joint(prior, parameters), only=only), parameters, allow_unused=True)
    expected = torch.autograd.grad(weighted(by_hand(prior, parameters), only=only), parameters)
    for place, (one, other) in enumerate(zip(gradients, expected)):
        if place % len(SHAPES) in only:
            torch.testing.assert_close(one, other)
        else:
            assert one is None


def test_the_divergence_alone_and_with_some_draws(parameters):
    """With a prior, every parameter has a gradient."""
    for only in ([-1], [-1, 1], [-1, 0, 4, 5, 6]):
        gradients = torch.autograd.grad(weighted(joint((0.3, 0.7), parameters), only=only), parameters)
        expected = torch.autograd.grad(weighted(by_hand((0.3, 0.7), parameters), only=only), parameters)
        for one, other in zip(gradients, expected):
            torch.testing.assert_close(one, other)


def test_moments():
    count, mean, rho = 4000, torch.tensor([0.5, -2.0]), torch.tensor([-1.0, 1.0])
    torch.manual_seed(0)
    means, rhos = [mean.expand(count, 2)] * 2, [rho.expand(count, 2)] * 2
    first, second = JointDraw.apply(None, *means, *rhos)[:2]
    for draws in (first, second):
        torch.testing.assert_close(draws.mean(0), mean, atol=4 * float(softplus_std(rho).max()) / count**0.5, rtol=0)
        torch.testing.assert_close(draws.std(0), softplus_std(rho), rtol=4 / (2 * count) ** 0.5, atol=0)
    assert torch.corrcoef(torch.cat([first, second], 1).T).fill_diagonal_(0).abs().max() < 0.08
