"""Gradients of single examples in Bayesian layers, against autograd's of one example after the other."""

import pytest
import torch

from lightning_fedbayes import layers
from lightning_fedbayes.clients.privacy.example_gradients import GradSamples
from lightning_fedbayes.layers import ESTIMATORS, mean_only

pytest.importorskip("opacus")

CASES = {
    "linear": (lambda **o: layers.LinearReparameterization(4, 3, **o), (5, 4)),
    "linear in time": (lambda **o: layers.LinearReparameterization(4, 3, **o), (5, 2, 4)),
    "conv1d": (
        lambda **o: layers.Conv1dReparameterization(2, 3, 3, padding=1, padding_mode="circular", **o),
        (4, 2, 6),
    ),
    "conv2d": (lambda **o: layers.Conv2dReparameterization(2, 4, 3, stride=2, groups=2, **o), (4, 2, 5, 5)),
    "conv3d": (lambda **o: layers.Conv3dReparameterization(1, 2, 2, **o), (3, 1, 3, 3, 3)),
    "transposed": (lambda **o: layers.ConvTranspose2dReparameterization(2, 3, 2, stride=2, **o), (3, 2, 3, 3)),
}


def one_by_one(layer, x, backprops, seed):
    """∂/∂θ of ⟨b_i, y_i⟩ for every i, with the noise of the whole batch's forward pass."""
    gradients = []
    for i in range(len(x)):
        torch.manual_seed(seed)
        loss = (layer(x)[i] * backprops[i]).sum()
        gradients.append(torch.autograd.grad(loss, list(layer.parameters()), materialize_grads=True))
    return [torch.stack(each) for each in zip(*gradients)]


@pytest.mark.parametrize(("case", "bias"), list(zip(CASES, ["bayesian", "deterministic", "none"] * 2)))
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_example_has_the_gradient_that_it_has_alone(case, estimator, bias):
    make, shape = CASES[case]
    layer = make(bias=bias != "none", bayesian_bias=bias == "bayesian", posterior_rho_init=-0.5).double()
    layer.estimator = estimator
    x = torch.randn(shape, dtype=torch.float64)
    backprops = torch.randn_like(layer(x))
    expected = one_by_one(layer, x, backprops, seed=3)
    samples = GradSamples(layer)
    torch.manual_seed(3)
    output = layer(x)
    after = torch.get_rng_state()
    (output * backprops).sum().div(len(x)).backward()
    assert torch.equal(after, torch.get_rng_state()), "nothing more is drawn from the generator"
    for (name, parameter), gradient in zip(layer.named_parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad_sample, gradient, msg=name)
    samples.remove()


def test_two_passes_through_a_layer_add_up():
    """As for Monte Carlo samples in the loss: each pass has noise of its own."""
    layer = layers.LinearFlipout(4, 3).double()
    x, other = torch.randn(2, 5, 4, dtype=torch.float64)

    def forward():
        torch.manual_seed(1)
        return layer(x) + layer(other) * 2

    backprops = torch.randn_like(forward())
    expected = []
    for i in range(5):
        gradient = torch.autograd.grad((forward()[i] * backprops[i]).sum(), list(layer.parameters()))
        expected.append(gradient)
    samples = GradSamples(layer)
    (forward() * backprops).sum().div(5).backward()
    for parameter, gradient in zip(layer.parameters(), zip(*expected)):
        torch.testing.assert_close(parameter.grad_sample, torch.stack(gradient))
    samples.remove()


def test_at_the_posterior_mean_the_spread_has_no_gradient():
    layer = layers.LinearFlipout(4, 3)
    samples = GradSamples(layer)
    with mean_only(layer):
        layer(torch.ones(2, 4)).mean().backward()
    assert not layer.rho_weight.grad_sample.any()
    assert layer.mu_weight.grad_sample.any()
    samples.remove()
