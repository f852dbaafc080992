import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal as TorchNormal
from torch.distributions import kl_divergence as torch_kl

from lightning_fedbayes.layers.functional import (
    Normal,
    gaussian_kl_sum,
    inverse_softplus_std,
    output_moments,
    smallest_std,
    softplus_std,
)


@settings(deadline=None)
@given(st.floats(-1e4, 1e4), st.sampled_from([torch.float32, torch.float64]))
def test_std_and_its_gradient_are_finite_and_its_square_is_positive(rho, dtype):
    rho = torch.tensor(rho, dtype=dtype, requires_grad=True)
    std = softplus_std(rho)
    assert std.isfinite()
    assert std.square() > 0
    (gradient,) = torch.autograd.grad(std, rho)
    assert 0 <= gradient <= 1
    (gradient,) = torch.autograd.grad(gaussian_kl_sum(torch.zeros(1, dtype=dtype), softplus_std(rho), 0.0, 1.0), rho)
    assert gradient.isfinite()


@settings(deadline=None)
@given(st.floats(-18, 4), st.sampled_from([torch.float32, torch.float64]))
def test_inverse_returns_the_standard_deviation_to_rounding(log10, dtype):
    std = torch.tensor(10.0**log10, dtype=dtype)
    rho = inverse_softplus_std(std)
    # rho carries |rho| eps of absolute rounding, which is a relative error of the standard deviation
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(softplus_std(rho), std, rtol=float(3 * (1 + rho.abs()) * eps), atol=0.0)


def test_std_is_softplus_in_double_precision():
    rho = torch.linspace(-30, 60, 1001, dtype=torch.float64)
    torch.testing.assert_close(softplus_std(rho), torch.logaddexp(rho, torch.zeros_like(rho)), rtol=1e-15, atol=0)


def test_gradient_of_the_std_is_the_sigmoid_and_differentiable_again():
    rho = torch.linspace(-30, 50, 81, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(softplus_std(rho).sum(), rho, create_graph=True)
    torch.testing.assert_close(gradient, rho.sigmoid())
    (second,) = torch.autograd.grad(gradient.sum(), rho)
    torch.testing.assert_close(second, rho.sigmoid() * (1 - rho.sigmoid()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_zero_becomes_the_smallest_std(dtype):
    std = softplus_std(inverse_softplus_std(torch.zeros(1, dtype=dtype)))
    assert std >= smallest_std(dtype)
    assert std < 1.01 * smallest_std(dtype)
    torch.testing.assert_close(softplus_std(torch.full((1,), -1e4, dtype=dtype)).double(),
                               torch.tensor([smallest_std(dtype)], dtype=torch.float64), rtol=1e-2, atol=0)


@settings(deadline=None)
@given(st.floats(-3, 3), st.floats(-4, 1), st.floats(-3, 3), st.floats(-2, 2))
def test_kl_is_the_sum_of_torchs(mean, log_std, prior_mean, log_prior_std):
    means = torch.tensor([mean, mean + 1, -mean], dtype=torch.float64)
    stds = torch.exp(torch.tensor([log_std, log_std - 1, 0.0], dtype=torch.float64))
    prior_std = torch.tensor(log_prior_std, dtype=torch.float64).exp()
    expected = torch_kl(TorchNormal(means, stds), TorchNormal(prior_mean, prior_std)).sum()
    torch.testing.assert_close(gaussian_kl_sum(means, stds, prior_mean, prior_std), expected)
    torch.testing.assert_close(
        gaussian_kl_sum(means.float(), stds.float(), prior_mean, float(prior_std)), expected.float(),
        rtol=1e-5, atol=1e-5)


def test_kl_of_half_precision_is_computed_in_float32():
    mean, std = torch.full((100_000,), 0.01), torch.full((100_000,), 0.5)
    exact = gaussian_kl_sum(mean.bfloat16().float(), std, 0.0, 1.0)
    torch.testing.assert_close(gaussian_kl_sum(mean.bfloat16(), std.bfloat16(), 0.0, 1.0), exact)


def test_gradient_is_finite_where_the_output_variance_is_zero():
    std = torch.full((2, 3), 0.1, requires_grad=True)
    x = torch.zeros(4, 3, requires_grad=True)
    _, spread = output_moments(torch.nn.functional.linear, x, Normal(torch.ones(2, 3), std), None)
    spread.sum().backward()
    assert std.grad is not None
    assert x.grad is not None
    assert std.grad.isfinite().all()
    assert x.grad.isfinite().all()
    assert spread.max() < 1e-15
