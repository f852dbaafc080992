"""Sums of squared gradients of single examples, beside a backward pass."""

from __future__ import annotations

import pytest
import torch

from lightning_fedbayes.layers import (
    Conv1dReparameterization,
    Conv2dReparameterization,
    ConvTranspose2dReparameterization,
    LinearReparameterization,
)
from lightning_fedbayes.layers.functional import ESTIMATORS
from lightning_fedbayes.layers.priors import LocalPrior

LAYERS = {
    "linear": (lambda: LinearReparameterization(5, 3), (7, 5)),
    "linear over time": (lambda: LinearReparameterization(5, 3), (7, 4, 5)),
    "one example": (lambda: LinearReparameterization(5, 3), (5,)),
    "no Bayesian bias": (lambda: LinearReparameterization(5, 3, bayesian_bias=False), (7, 5)),
    "grouped": (
        lambda: Conv2dReparameterization(4, 6, 3, stride=2, padding=1, groups=2, padding_mode="circular"),
        (5, 4, 9, 9),
    ),
    "padded": (lambda: Conv1dReparameterization(8, 8, 3, padding="same"), (5, 8, 20)),
    "transposed": (lambda: ConvTranspose2dReparameterization(4, 6, 3, stride=2, groups=2), (5, 4, 6, 6)),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_squares_of_single_examples(make, shape, estimator):
    """The tally has the sum of the squares of the gradients that each example alone gives, under the same noise."""
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape)
    layer.estimator = estimator
    parameters = list(layer.gaussian_parameters())
    for each in parameters:
        zero = torch.zeros_like(each.mean)
        squares = torch.zeros_like(each.mean, requires_grad=True)
        each.replace_prior(LocalPrior(zero, zero, zero, squares=squares))
    slopes = torch.randn_like(layer(x))

    def gradients(which: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(1)
        return list(torch.autograd.grad((layer(x) * which).sum(), [each.mean for each in parameters]))

    count = 1 if len(shape) == 1 else len(x)
    alone = (
        [slopes]
        if count == 1
        else [slopes * (torch.arange(count) == i).view(-1, *[1] * (slopes.dim() - 1)) for i in range(count)]
    )
    wanted = [sum(each.square() for each in column) for column in zip(*map(gradients, alone))]
    torch.manual_seed(1)
    output = layer(x)
    (output * slopes).sum().backward()
    for each, expected in zip(parameters, wanted):
        torch.testing.assert_close(each.prior.squares.grad, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parameters[0].mean.grad, gradients(slopes)[0])
    with torch.no_grad():
        torch.manual_seed(1)
        torch.testing.assert_close(layer(x), output, rtol=0, atol=0)
