"""Layers under copies, files, other precision, vmap, compile, and bayesian-torch's checkpoints."""

import copy
import math
import pickle
from contextlib import nullcontext

import bayesian_torch.layers as bt
import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from lightning_fedbayes import layers
from lightning_fedbayes.core.errors import ConversionError
from lightning_fedbayes.layers import kl
from tests.refusals import refusals

from .helpers import KINDS, assert_stacked_as_alone, draws, example, make


def test_mean_only_equals_the_deterministic_layer_exactly(kind, estimator):
    layer, x = make(kind, estimator), example(kind)
    positional, keywords, _ = KINDS[kind]
    deterministic = getattr(nn, kind)(*positional, **keywords)
    with torch.no_grad():
        for each, p in zip(layer.gaussian_parameters(), deterministic.parameters()):
            p.copy_(each.mean)
    with layers.mean_only(layer):
        assert torch.equal(layer(x), deterministic(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bayesian_bias", [True, False])
def test_bias_variants(kind, estimator, bias, bayesian_bias):
    layer = make(kind, estimator, bias=bias, bayesian_bias=bayesian_bias)
    names = [name for name, _ in layer.named_parameters()]
    assert ("mu_bias" in names) == ("rho_bias" in names) == (bias and bayesian_bias)
    assert ("bias" in names) == (bias and not bayesian_bias)
    layer(example(kind)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_equal_and_independent(kind, estimator, clone):
    layer = make(kind, estimator, prior=layers.NormalPrior(0.1, 0.3))
    twin, x = clone(layer), example(kind)
    torch.manual_seed(1)
    y = layer(x)
    torch.manual_seed(1)
    assert torch.equal(y, twin(x))
    torch.testing.assert_close(layer.kl_loss(), twin.kl_loss())
    assert not {id(p) for p in layer.parameters()} & {id(p) for p in twin.parameters()}


def test_bfloat16_autocast(kind, estimator):
    layer, x = make(kind, estimator), example(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        kl = layer.kl_loss()
    assert y.dtype == torch.bfloat16
    assert kl.dtype == torch.float32
    (y.float().sum() + kl).backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_half_precision_autocast_keeps_small_variances():
    layer = layers.LinearReparameterization(4, 3, bias=False, posterior_rho_init=math.log(math.expm1(1e-5)))
    x = torch.ones(2, 4)
    with torch.no_grad(), layers.mean_only(layer):
        layer.mu_weight.zero_()
    layer.estimator = "local_reparameterization"
    with torch.autocast("cpu", dtype=torch.float16):
        spread = draws(lambda: layer(x).float(), 2000).std()
    torch.testing.assert_close(spread, torch.tensor(2e-5), rtol=0.05, atol=0)


def test_stacked_clients_have_independent_noise_and_their_own_parameters(kind, estimator):
    template = make(kind, estimator, posterior_rho_init=0.0)
    clients = [copy.deepcopy(template) for _ in range(3)]
    with torch.no_grad():
        for p in clients[2].parameters():
            p.add_(2.0)
    assert_stacked_as_alone(template, clients, example(kind))


def test_a_layer_shows_its_prior_and_of_a_long_one_the_kind():
    assert "prior=NormalPrior(mean=0.0, std=1.0)" in repr(layers.LinearFlipout(2, 2))
    many = layers.NormalPrior(torch.zeros(9, 9), torch.ones(9, 9))
    assert repr(layers.LinearFlipout(9, 9, prior=many)).endswith("prior=NormalPrior)")


class Objective(nn.Module):
    """Squared output plus KL of a network, with or without its noise."""

    def __init__(self, network, noise):
        super().__init__()
        self.network, self.noise = network, noise

    def forward(self, x):
        with nullcontext() if self.noise else layers.mean_only(self.network):
            return self.network(x).square().mean() + layers.kl_divergence(self.network)


@pytest.mark.parametrize("small", [0, 2**14])
def test_gradients_of_stacked_clients_are_those_of_each_alone(estimator, small, monkeypatch):
    """The backward pass outside ``vmap``, as an engine takes it."""
    monkeypatch.setattr(kl, "SMALL", small)
    network = nn.Sequential(make("Linear", estimator), nn.ReLU(), layers.LinearFlipout(2, 1))
    clients = [Objective(copy.deepcopy(network), noise=False) for _ in range(3)]
    with torch.no_grad():
        for k, client in enumerate(clients):
            for p in client.parameters():
                p.mul_(1 + k)
    stack = {name: value.detach().requires_grad_() for name, value in stack_module_state(clients)[0].items()}
    x = torch.randn(3, 4, 3)
    vmap(lambda p, x: functional_call(clients[0], p, (x,)))(stack, x).sum().backward()
    for k, client in enumerate(clients):
        client(x[k]).backward()
        for name, p in client.named_parameters():
            torch.testing.assert_close(stack[name].grad[k], p.grad)
    noisy = Objective(network, noise=True)
    vmap(lambda p, x: functional_call(noisy, p, (x,)), randomness="different")(stack, x).sum().backward()
    assert all(value.grad.isfinite().all() for value in stack.values())


@pytest.mark.slow
@pytest.mark.parametrize("small", [0, 2**14])
def test_a_training_step_compiles_to_one_graph(estimator, small, monkeypatch):
    monkeypatch.setattr(kl, "SMALL", small)
    torch._dynamo.reset()
    objective, x = Objective(make("Linear", estimator), noise=False), example("Linear")
    compiled = torch.compile(objective, backend="aot_eager", fullgraph=True)
    compiled(x).backward()
    found = [p.grad for p in objective.parameters()]
    objective.zero_grad()
    objective(x).backward()
    for gradient, p in zip(found, objective.parameters()):
        torch.testing.assert_close(gradient, p.grad)


test_contradictory_or_improper_priors_are_refused = refusals(
    ConversionError,
    ({"prior_variance": 1.0, "prior_std": 1.0}, "not both"),
    ({"prior": layers.NormalPrior(), "prior_std": 1.0}, "prior= is a whole prior"),
    ({"prior": layers.NormalPrior(), "prior_mean": 1.0}, "prior= is a whole prior"),
    ({"prior_variance": 0.0}, "prior_variance=0.0"),
    ({"prior_std": -1.0}, "prior_std=-1.0"),
    ({"prior_std": math.inf}, "prior_std=inf"),
    call=lambda arguments: layers.LinearReparameterization(2, 2, **arguments),
)


BT = {
    "Linear": ((3, 2), {}, (4, 3)),
    "Conv1d": ((2, 4, 3), {"padding": 1}, (4, 2, 5)),
    "Conv2d": ((2, 4, 3), {"stride": 2}, (4, 2, 6, 6)),
    "ConvTranspose1d": ((2, 2, 3), {"stride": 2}, (4, 2, 3)),
    "ConvTranspose2d": ((2, 2, 3), {"stride": 2, "padding": 1}, (4, 2, 3, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("bt_kind", sorted(BT))
@pytest.mark.parametrize("suffix", ["Reparameterization", "Flipout"])
@pytest.mark.parametrize("bias", [True, False])
def test_bayesian_torch_checkpoint_loads_strictly_with_its_mean_and_variance(bt_kind, suffix, bias):
    positional, keywords, shape = BT[bt_kind]
    theirs = getattr(bt, bt_kind + suffix)(*positional, **keywords, posterior_rho_init=0.0, bias=bias)
    ours = getattr(layers, bt_kind + suffix)(*positional, **keywords, bias=bias)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(shape)
    with layers.mean_only(ours), layers.mean_only(theirs):
        torch.testing.assert_close(ours(x), theirs(x, return_kl=False))
    with torch.no_grad():
        variance = torch.stack([theirs(x, return_kl=False) for _ in range(1000)]).var(0)
    torch.testing.assert_close(draws(lambda: ours(x), 20_000).var(0), variance, rtol=0.25, atol=0)
