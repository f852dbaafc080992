"""Standard deviations behind ρ, output moments, and Flipout's convolution with a kernel per example."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call, grad, vmap

from lightning_fedbayes import layers
from lightning_fedbayes.layers import functional
from lightning_fedbayes.layers.kl import gaussian_kl_sum
from lightning_fedbayes.layers.priors import LocalPrior


@settings(deadline=None)
@given(st.floats(-1e4, 1e4), st.sampled_from([torch.float32, torch.float64]))
def test_std_and_its_gradient_are_finite_and_its_square_is_positive(rho, dtype):
    rho = torch.tensor(rho, dtype=dtype, requires_grad=True)
    std = functional.softplus_std(rho)
    assert std.isfinite()
    assert std.square() > 0
    (gradient,) = torch.autograd.grad(std, rho)
    assert 0 <= gradient <= 1
    divergence = gaussian_kl_sum(torch.zeros(1, dtype=dtype), functional.softplus_std(rho), 0.0, 1.0)
    (gradient,) = torch.autograd.grad(divergence, rho)
    assert gradient.isfinite()


@settings(deadline=None)
@given(st.floats(-18, 4), st.sampled_from([torch.float32, torch.float64]))
def test_inverse_returns_the_standard_deviation_to_rounding(log10, dtype):
    std = torch.tensor(10.0**log10, dtype=dtype)
    rho = functional.inverse_softplus_std(std)
    # rho carries |rho| eps of absolute rounding, which is a relative error of the standard deviation
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(functional.softplus_std(rho), std, rtol=float(3 * (1 + rho.abs()) * eps), atol=0.0)


def test_gradient_of_the_std_is_the_sigmoid_and_differentiable_again():
    rho = torch.linspace(-30, 50, 81, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(functional.softplus_std(rho).sum(), rho, create_graph=True)
    torch.testing.assert_close(gradient, rho.sigmoid())
    (second,) = torch.autograd.grad(gradient.sum(), rho)
    torch.testing.assert_close(second, rho.sigmoid() * (1 - rho.sigmoid()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_zero_becomes_the_smallest_std(dtype):
    std = functional.softplus_std(functional.inverse_softplus_std(torch.zeros(1, dtype=dtype)))
    assert std >= functional.smallest_std(dtype)
    assert std < 1.01 * functional.smallest_std(dtype)
    least = functional.softplus_std(torch.full((1,), -1e4, dtype=dtype))
    assert float(least) == pytest.approx(functional.smallest_std(dtype), rel=1e-2, abs=0)


def test_gradient_is_finite_where_the_output_variance_is_zero():
    std = torch.full((2, 3), 0.1, requires_grad=True)
    x = torch.zeros(4, 3, requires_grad=True)
    _, spread = functional.output_moments(torch.nn.functional.linear, x, functional.Normal(torch.ones(2, 3), std), None)
    spread.sum().backward()
    assert std.grad is not None
    assert x.grad is not None
    assert std.grad.isfinite().all()
    assert x.grad.isfinite().all()
    assert spread.max() < 1e-15


# (layer, constructor arguments, input of three examples)
GEOMETRIES = {
    "1d": ("Conv1d", (8, 5, 3), {}, (3, 8, 40)),
    "2d": ("Conv2d", (8, 6, (3, 2)), {"stride": 2, "padding": (2, 1), "dilation": (1, 2)}, (3, 8, 20, 20)),
    "3d": ("Conv3d", (8, 4, (3, 1, 3)), {"padding": "same"}, (3, 8, 4, 5, 6)),
    "groups": ("Conv2d", (16, 6, 3), {"groups": 2, "padding": 1}, (3, 16, 10, 11)),
    "circular": ("Conv2d", (8, 3, 3), {"padding": "same", "padding_mode": "circular"}, (3, 8, 10, 10)),
    "no bias": ("Conv2d", (8, 3, 3), {"bias": False}, (3, 8, 10, 10)),
    "deterministic bias": ("Conv2d", (8, 3, 3), {"bayesian_bias": False}, (3, 8, 10, 10)),
}


def make(geometry):
    kind, positional, keywords, shape = GEOMETRIES[geometry]
    torch.manual_seed(0)
    layer = getattr(layers, f"{kind}Flipout")(*positional, **keywords, posterior_rho_init=0.0)
    return layer, torch.randn(shape)


def gradients(layer, x, forward):
    """Output, and the gradients of a curved function of it."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = forward(x)
    return y, torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()])


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_output_and_gradients_are_those_of_two_convolutions(geometry, monkeypatch):
    layer, x = make(geometry)
    assert functional.one_convolution_is_cheaper(x, layer.mu_kernel, layer.stride)
    one = gradients(layer, x, layer)
    monkeypatch.setattr(layers.functional, "one_convolution_is_cheaper", lambda *_: False)
    torch.testing.assert_close(one, gradients(layer, x, layer), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("geometry", ["1d", "2d", "groups"])
def test_stacked_clients_see_kernels_of_their_own(geometry, monkeypatch):
    layer, x = make(geometry)
    stack = {name: torch.randn(4, *p.shape) for name, p in layer.named_parameters()}
    inputs = torch.randn(4, *x.shape)

    def gradient(values, x):
        return grad(lambda values: functional_call(layer, values, (x,)).sin().sum())(values)

    def all_at_once():
        torch.manual_seed(1)
        return vmap(gradient, randomness="different")(stack, inputs)

    one = all_at_once()
    monkeypatch.setattr(layers.functional, "one_convolution_is_cheaper", lambda *_: False)
    torch.testing.assert_close(one, all_at_once(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("x", "kernel", "stride", "cheaper"),
    [
        ((32, 16, 16, 16), (32, 16, 3, 3), (1, 1), True),
        ((32, 16, 12, 8), (32, 16, 3, 3), (1, 1), True),  # 144 weights an output channel, 96 positions
        ((32, 16, 19, 5), (32, 16, 3, 3), (1, 1), False),
        ((32, 16, 16, 16), (32, 16, 3, 3), (2, 2), False),
        ((32, 7, 16, 16), (32, 7, 3, 3), (1, 1), False),  # part of a block of channels
        ((16, 16, 16), (32, 16, 3, 3), (1, 1), False),  # one example without a batch dimension
    ],
)
def test_the_rule_compares_kernels_with_maps(x, kernel, stride, cheaper):
    assert functional.one_convolution_is_cheaper(torch.zeros(x), torch.zeros(kernel), stride) is cheaper


LAYERS = {
    "linear": (lambda: layers.LinearReparameterization(5, 3), (7, 5)),
    "linear over time": (lambda: layers.LinearReparameterization(5, 3), (7, 4, 5)),
    "one example": (lambda: layers.LinearReparameterization(5, 3), (5,)),
    "no Bayesian bias": (lambda: layers.LinearReparameterization(5, 3, bayesian_bias=False), (7, 5)),
    "grouped": (
        lambda: layers.Conv2dReparameterization(4, 6, 3, stride=2, padding=1, groups=2, padding_mode="circular"),
        (5, 4, 9, 9),
    ),
    "padded": (lambda: layers.Conv1dReparameterization(8, 8, 3, padding="same"), (5, 8, 20)),
    "transposed": (lambda: layers.ConvTranspose2dReparameterization(4, 6, 3, stride=2, groups=2), (5, 4, 6, 6)),
}


@pytest.mark.parametrize("estimator", functional.ESTIMATORS)
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_squares_of_single_examples(make, shape, estimator):
    """The tally has the sum of the squares of the gradients that each example alone gives, under the same noise."""
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
