import copy

import pytest
import torch
from torch import nn

from lightning_fedbayes import layers
from lightning_fedbayes.core.errors import ConversionError
from tests.refusals import refusals

from .helpers import assert_stacked_as_alone, covariance, draws

MODULES = {
    "lstm": (lambda: nn.LSTM(3, 4, batch_first=True), lambda: (torch.randn(2, 5, 3),)),
    "embedding": (lambda: nn.Embedding(7, 3), lambda: (torch.tensor([[1, 2], [2, 6]]),)),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), lambda: (torch.randn(2, 3, 4),) * 3),
    "norm": (lambda: nn.LayerNorm(4), lambda: (torch.randn(2, 4),)),
    "batch norm": (lambda: nn.BatchNorm1d(4), lambda: (torch.randn(8, 4),)),
    "block": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), lambda: (torch.randn(2, 4),)),
}


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.fixture(params=sorted(MODULES))
def case(request):
    build, inputs = MODULES[request.param]
    return build(), inputs()


def test_samples_differ_the_mean_is_the_module_itself_and_names_are_its_paths(case):
    module, inputs = case
    layer = layers.Reparameterized(module, posterior_std=0.1)
    assert not torch.equal(first(layer(*inputs)), first(layer(*inputs)))
    layer.eval()
    with layers.mean_only(layer):
        assert torch.equal(first(layer(*inputs)), first(module(*inputs)))
    first(layer(*inputs)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), layer.module.parameters()))
    network = nn.ModuleDict({"part": layer})
    posterior = layers.read_posterior(network)
    assert set(posterior.names) == {f"part.module.{name}" for name, _ in module.named_parameters()}
    before = {name: value.clone() for name, value in network.state_dict().items()}
    layers.load_posterior(network, posterior)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_covariance_is_that_of_sampled_weights():
    block = nn.Linear(3, 2)
    layer, x = layers.Reparameterized(block, posterior_std=0.3), torch.randn(2, 3)
    estimate, error = covariance(draws(lambda: layer(x), 40_000))
    shared = 0.09 * (x @ x.T + 1).double()
    exact = torch.kron(shared, torch.eye(2, dtype=torch.float64))
    assert ((estimate - exact).abs() < error).all()


def test_buffers_stay_and_frozen_parameters_are_deterministic():
    norm = nn.BatchNorm1d(4)
    norm.bias.requires_grad_(False)
    layer = layers.Reparameterized(norm)
    assert [each.path for each in layer.gaussian_parameters()] == ["module.weight"]
    layer(torch.randn(8, 4))
    assert norm.num_batches_tracked == 1
    assert norm.running_mean.abs().sum() > 0
    posterior = layers.read_posterior(layer)
    assert not posterior.variance["module.bias"].any()
    assert posterior.variance["module.weight"].all()


test_nothing_to_sample_is_refused = refusals(
    ConversionError,
    (lambda: layers.Reparameterized(nn.ReLU()), "no trainable"),
    (lambda: layers.Reparameterized(nn.LazyLinear(3)), "lazy"),
    (lambda: layers.Reparameterized(nn.Linear(1, 1), posterior_std=-1.0), "posterior_std"),
    (lambda: layers.Reparameterized(nn.Sequential(layers.LinearReparameterization(1, 1))), "Bayesian layer"),
)


def test_stacked_clients_have_their_own_parameters_and_noise():
    template = nn.Sequential(layers.Reparameterized(nn.LayerNorm(3), posterior_std=0.1), nn.Linear(3, 2))
    clients = [copy.deepcopy(template) for _ in range(3)]
    with torch.no_grad():
        clients[2][0].module.bias.add_(5.0)
    assert_stacked_as_alone(template, clients, torch.randn(4, 3))
