"""Every estimator against the distribution that Gaussian weights give to the outputs."""

import bayesian_torch.layers.flipout_layers.conv_flipout as bt_flipout
import torch
from torch.func import functional_call, grad, jacrev, vmap

from lightning_fedbayes import layers

from .helpers import covariance, draws, example, make

DRAWS = 40_000


def randomise_std(layer):
    with torch.no_grad():
        for each in layers.gaussian_parameters(layer).values():
            each.rho.copy_(torch.randn_like(each.rho) - 0.5)


def sampled_weight_covariance(layer, x):
    """Exact covariance of the flat outputs under one weight sample: J diag(σ²) Jᵀ, for the layer is linear in w."""
    means = {each.mean_name: each.mean.detach() for each in layer.gaussian_parameters()}
    with layers.mean_only(layer):
        jacobian = jacrev(lambda means: functional_call(layer, means, (x,)).flatten())(means)
    return sum(
        j.flatten(1).double() @ torch.diag(each.variance.detach().flatten().double()) @ j.flatten(1).double().T
        for j, each in zip(jacobian.values(), layer.gaussian_parameters())
    )


def test_mean_and_full_covariance_match_theory(kind, estimator):
    layer, x = make(kind, estimator), example(kind)
    randomise_std(layer)
    samples = draws(lambda: layer(x), DRAWS)
    with layers.mean_only(layer), torch.no_grad():
        mean = layer(x)
    exact = sampled_weight_covariance(layer, x)
    owner = torch.arange(mean.numel()) // mean[0].numel()
    if estimator == "flipout":  # the positions of one example see one weight, other examples are uncorrelated
        exact = exact * (owner[:, None] == owner)
    elif estimator == "local_reparameterization":
        exact = torch.diag(exact.diagonal())
    estimate, error = covariance(samples)
    assert ((estimate - exact).abs() < error).all()
    spread = exact.diagonal().sqrt().float().reshape(mean.shape)
    assert ((samples.mean(0) - mean).abs() < 5.5 * spread / DRAWS**0.5).all()


def test_pooled_map_has_the_variance_of_a_sampled_kernel_where_bayesian_torch_has_not():
    x = torch.ones(1, 1, 16, 16)
    ours = layers.Conv2dFlipout(1, 1, 3, padding=1, bias=False, posterior_rho_init=0.0)
    theirs = bt_flipout.Conv2dFlipout(1, 1, 3, padding=1, bias=False)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    exact = sampled_weight_covariance(ours, x)
    pooled, pixel = exact.mean(), exact.diagonal().float()
    samples = draws(lambda: ours(x), 4000)
    torch.testing.assert_close(samples.mean((2, 3, 4)).var(), pooled.float(), rtol=0.1, atol=0)
    with torch.no_grad():
        foreign = torch.stack([theirs(x, return_kl=False) for _ in range(1000)])
    torch.testing.assert_close(foreign.var(0).flatten(), pixel, rtol=0.35, atol=0)  # every single pixel looks right
    assert foreign.mean((2, 3, 4)).var() < pooled / 50
    local = draws(lambda: use(ours, "local_reparameterization", x), 1000)
    torch.testing.assert_close(local.mean((2, 3, 4)).var(), exact.trace().float() / 256**2, rtol=0.2, atol=0)


def use(layer, estimator, x):
    layer.estimator = estimator
    return layer(x)


def test_time_steps_of_one_example_share_the_weight_under_flipout():
    layer = layers.LinearFlipout(3, 2, posterior_rho_init=0.0)
    x = torch.randn(4, 1, 3).expand(4, 6, 3)
    y = layer(x)
    torch.testing.assert_close(y, y[:, :1].expand_as(y))
    assert (y[0, 0] - layer(x[:1])[0, 0]).abs().max() > 1e-3


def gradients(layer, x, count):
    """``count`` draws of the gradient of Σ y² / batch with respect to all parameters, flattened."""
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def one(_):
        derivative = grad(lambda p: functional_call(layer, p, (x,)).square().sum() / len(x))(parameters)
        return torch.cat([value.flatten() for value in derivative.values()])

    return vmap(one, randomness="different")(torch.empty(count))


def test_gradient_estimators_agree_in_expectation_with_the_closed_form():
    x = torch.randn(4, 3)
    layer = layers.LinearReparameterization(3, 2, posterior_rho_init=0.0)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def expected(p):  # E Σ y² = Σ (x μ + b)² + x² σ² + σ_b²
        weight_var, bias_var = (torch.nn.functional.softplus(p[f"rho_{n}"]).square() for n in ("weight", "bias"))
        mean = x @ p["mu_weight"].T + p["mu_bias"]
        return (mean.square() + x.square() @ weight_var.T + bias_var).sum() / len(x)

    exact = torch.cat([value.flatten() for value in grad(expected)(parameters).values()])
    for cls in (layers.LinearReparameterization, layers.LinearLocalReparameterization, layers.LinearFlipout):
        other = cls(3, 2)
        other.load_state_dict(layer.state_dict())
        samples = gradients(other, x, 20_000)
        error = samples.std(0) / len(samples) ** 0.5
        assert ((samples.mean(0) - exact).abs() < 5 * error + 1e-6).all(), cls


def test_gradient_variance_falls_with_the_batch_under_flipout_only():
    def ratio(cls):
        variances = [
            gradients(cls(3, 2, posterior_rho_init=0.0), torch.ones(batch, 3), 2000).var(0).mean() for batch in (1, 64)
        ]
        return float(variances[0] / variances[1])

    assert ratio(layers.LinearReparameterization) < 2
    assert ratio(layers.LinearFlipout) > 5  # the magnitude of the shared perturbation remains
    assert ratio(layers.LinearLocalReparameterization) > 30


def test_initial_output_scale_is_that_of_the_deterministic_layer(kind, estimator):
    layer, x = make(kind, estimator), example(kind)
    samples = draws(lambda: layer(x), 500)
    with layers.mean_only(layer), torch.no_grad():
        mean = layer(x)
    ratio = (samples.square().mean() / mean.square().mean()).sqrt()
    assert 0.97 < ratio < 1.06  # σ is a tenth of the standard deviation of the weights
