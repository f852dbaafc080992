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

from lightning_fedbayes.core.errors import ConversionError
from lightning_fedbayes.layers import (
    Conv2dFlipout,
    Conv2dLocalReparameterization,
    ConvTranspose2dReparameterization,
    LinearFlipout,
    LinearReparameterization,
    NormalPrior,
    TiedMeanPrior,
    kl,
    kl_divergence,
    mean_only,
    use_estimator,
)

from .helpers import KINDS, draws, example, make


def test_mean_only_equals_the_deterministic_layer_exactly(kind, estimator):
    layer, x = make(kind, estimator), example(kind)
    positional, keywords, _ = KINDS[kind]
    deterministic = getattr(nn, kind)(*positional, **keywords)
    with torch.no_grad():
        for each, p in zip(layer.gaussian_parameters(), deterministic.parameters()):
            p.copy_(each.mean)
    with mean_only(layer):
        assert torch.equal(layer(x), deterministic(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bayesian_bias", [True, False])
def test_bias_variants(kind, estimator, bias, bayesian_bias):
    layer = make(kind, estimator, bias=bias, bayesian_bias=bayesian_bias)
    names = [name for name, _ in layer.named_parameters()]
    assert ("mu_bias" in names, "rho_bias" in names, "bias" in names) == (
        bias and bayesian_bias,
        bias and bayesian_bias,
        bias and not bayesian_bias,
    )
    layer(example(kind)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_return_kl_gives_the_layers_kl(kind):
    layer = make(kind)
    output, kl = layer(example(kind), return_kl=True)
    assert output.shape == layer(example(kind)).shape
    torch.testing.assert_close(kl, kl_divergence(layer))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_equal_and_independent(kind, estimator, clone):
    layer = make(kind, estimator, prior=TiedMeanPrior(0.3))
    twin, x = clone(layer), example(kind)
    torch.manual_seed(1)
    y = layer(x)
    torch.manual_seed(1)
    assert torch.equal(y, twin(x))
    torch.testing.assert_close(layer.kl_loss(), twin.kl_loss())
    assert not {id(p) for p in layer.parameters()} & {id(p) for p in twin.parameters()}


def test_state_dict_round_trip_is_strict_between_estimators(kind, estimator):
    source, target = make(kind), make(kind, estimator)
    target.load_state_dict(source.state_dict(), strict=True)
    for a, b in zip(source.gaussian_parameters(), target.gaussian_parameters()):
        assert torch.equal(a.mean, b.mean)
        assert torch.equal(a.std, b.std)


def test_frozen_layer_still_samples(kind, estimator):
    layer, x = make(kind, estimator).requires_grad_(False), example(kind)
    assert not layer(x).requires_grad
    assert not torch.equal(layer(x), layer(x))


def test_bfloat16_autocast(kind, estimator):
    layer, x = make(kind, estimator), example(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        kl = layer.kl_loss()
    assert y.dtype == torch.bfloat16
    assert kl.dtype == torch.float32
    (y.float().sum() + kl).backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_is_a_factory_argument_and_can_be_changed(estimator, dtype):
    for layer in (make("Conv2d", estimator, dtype=dtype), make("Conv2d", estimator).to(dtype)):
        assert {p.dtype for p in layer.parameters()} == {dtype}
        assert layer(example("Conv2d").to(dtype)).dtype == dtype


def test_half_precision_autocast_keeps_small_variances():
    layer = LinearReparameterization(4, 3, bias=False, posterior_rho_init=math.log(math.expm1(1e-5)))
    x = torch.ones(2, 4)
    with torch.no_grad(), mean_only(layer):
        layer.mu_weight.zero_()
    layer.estimator = "local_reparameterization"
    with torch.autocast("cpu", dtype=torch.float16):
        spread = draws(lambda: layer(x).float(), 2000).std()
    torch.testing.assert_close(spread, torch.tensor(2e-5), rtol=0.05, atol=0)


def test_vmapped_samples_differ_where_only_the_noise_is_batched(kind, estimator):
    layer, x = make(kind, estimator), example(kind)
    samples = draws(lambda: layer(x), 3)
    assert not torch.allclose(samples[0], samples[1])
    assert not torch.allclose(samples[1], samples[2])


def test_stacked_clients_have_independent_noise_and_their_own_parameters(kind, estimator):
    template = make(kind, estimator, posterior_rho_init=0.0)
    clients = [copy.deepcopy(template) for _ in range(3)]
    x = example(kind)
    parameters, _ = stack_module_state(clients)  # equal ones, so outputs differ by their noise alone
    outputs = vmap(lambda p: functional_call(template, p, (x,)), randomness="different")(parameters)
    assert not torch.allclose(outputs[0], outputs[1])
    with torch.no_grad():
        for k, client in enumerate(clients):
            for p in client.parameters():
                p.add_(k)
    parameters, _ = stack_module_state(clients)
    with mean_only(template):
        outputs = vmap(lambda p: functional_call(template, p, (x,)))(parameters)
    for client, output in zip(clients, outputs):
        with mean_only(client):
            torch.testing.assert_close(output, client(x), rtol=1e-4, atol=1e-4)


def test_kl_under_vmap_is_every_clients_own():
    template = nn.Sequential(LinearReparameterization(3, 2), nn.ReLU(), LinearFlipout(2, 1))
    clients = [copy.deepcopy(template) for _ in range(3)]
    with torch.no_grad():
        clients[1][0].mu_weight.add_(1.0)
    parameters, _ = stack_module_state(clients)

    class KL(nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self):
            return kl_divergence(self.network)

    together = vmap(lambda p: functional_call(KL(template), {f"network.{k}": v for k, v in p.items()}, ()))(parameters)
    torch.testing.assert_close(together, torch.stack([kl_divergence(client) for client in clients]))


class Objective(nn.Module):
    """Squared output plus KL of a network, with or without its noise."""

    def __init__(self, network, noise):
        super().__init__()
        self.network, self.noise = network, noise

    def forward(self, x):
        with nullcontext() if self.noise else mean_only(self.network):
            return self.network(x).square().mean() + kl_divergence(self.network)


@pytest.mark.parametrize("small", [0, 2**14])
def test_gradients_of_stacked_clients_are_those_of_each_alone(estimator, small, monkeypatch):
    """The backward pass outside ``vmap``, as an engine takes it."""
    monkeypatch.setattr(kl, "SMALL", small)
    network = nn.Sequential(make("Linear", estimator), nn.ReLU(), LinearFlipout(2, 1))
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


@pytest.mark.parametrize("kind", ["Linear", "Conv2d"])
def test_compiles_to_one_graph(kind, estimator):
    torch._dynamo.reset()
    layer, x = make(kind, estimator), example(kind)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    y.sum().backward()
    assert not torch.equal(y, compiled(x))
    with mean_only(layer):
        torch.testing.assert_close(compiled(x), layer(x))


def test_prior_arguments_mean_what_they_say():
    for arguments, std in (({}, 1.0), ({"prior_variance": 100.0}, 10.0), ({"prior_std": 0.3}, 0.3)):
        assert LinearReparameterization(2, 2, **arguments).priors["weight"].std == pytest.approx(std)
    assert LinearReparameterization(2, 2, 0.5, 4.0).priors["bias"].mean == 0.5


@pytest.mark.parametrize(
    "arguments",
    [
        {"prior_variance": 1.0, "prior_std": 1.0},
        {"prior": NormalPrior(), "prior_std": 1.0},
        {"prior": NormalPrior(), "prior_mean": 1.0},
        {"prior_variance": 0.0},
        {"prior_std": -1.0},
        {"prior_std": math.inf},
    ],
)
def test_contradictory_or_improper_priors_are_refused(arguments):
    with pytest.raises(ConversionError, match="prior"):
        LinearReparameterization(2, 2, **arguments)


def test_unknown_estimator_is_refused_by_assignment():
    layer = LinearReparameterization(2, 2)
    with pytest.raises(ConversionError, match="did you mean 'flipout'"):
        layer.estimator = "flip_out"


def test_tensor_priors_follow_the_layer():
    layer = LinearReparameterization(2, 3, prior=TiedMeanPrior(1.0))
    layer.priors["weight"] = NormalPrior(torch.zeros(3, 2), torch.ones(3, 2))
    layer.double()
    assert layer.priors["weight"].mean.dtype == layer.priors["weight"].std.dtype == torch.float64
    assert copy.deepcopy(layer).priors["weight"].mean is not layer.priors["weight"].mean


def test_scalar_priors_take_no_buffers(kind, estimator):
    assert not list(make(kind, estimator).buffers())


def test_transposed_convolution_takes_an_output_size():
    deterministic = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)
    layer = ConvTranspose2dReparameterization(2, 3, 3, stride=2, padding=1)
    with torch.no_grad():
        layer.mu_kernel.copy_(deterministic.weight)
        layer.mu_bias.copy_(deterministic.bias)
    x = torch.randn(1, 2, 5, 5)
    with mean_only(layer):
        for size in (9, 10):
            assert torch.equal(layer(x, [size, size]), deterministic(x, [size, size]))
    for name in ("local_reparameterization", "flipout"):
        with use_estimator(layer, name):
            assert layer(x, output_size=(10, 9)).shape == (1, 3, 10, 9)


def test_repr_names_geometry_estimator_and_prior():
    text = repr(Conv2dLocalReparameterization(1, 2, 3, padding_mode="reflect", padding=1, groups=1, bias=False))
    assert "kernel_size=(3, 3)" in text
    assert "padding_mode=reflect" in text
    assert "NormalPrior(mean=0.0, std=1.0)" in text
    assert "bias=False" in text


BT = {
    "Linear": ((3, 2), {}, (4, 3)),
    "Conv1d": ((2, 4, 3), {"padding": 1}, (4, 2, 5)),
    "Conv2d": ((2, 4, 3), {"stride": 2}, (4, 2, 6, 6)),
    "ConvTranspose1d": ((2, 2, 3), {"stride": 2}, (4, 2, 3)),
    "ConvTranspose2d": ((2, 2, 3), {"stride": 2, "padding": 1}, (4, 2, 3, 3)),
}


@pytest.mark.parametrize("bt_kind", sorted(BT))
@pytest.mark.parametrize("suffix", ["Reparameterization", "Flipout"])
@pytest.mark.parametrize("bias", [True, False])
def test_bayesian_torch_checkpoint_loads_strictly_with_its_mean_and_variance(bt_kind, suffix, bias):
    from lightning_fedbayes import layers

    positional, keywords, shape = BT[bt_kind]
    theirs = getattr(bt, bt_kind + suffix)(*positional, **keywords, posterior_rho_init=0.0, bias=bias)
    ours = getattr(layers, bt_kind + suffix)(*positional, **keywords, bias=bias)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(shape)
    with mean_only(ours), mean_only(theirs):
        torch.testing.assert_close(ours(x), theirs(x, return_kl=False))
    with torch.no_grad():
        variance = torch.stack([theirs(x, return_kl=False) for _ in range(1000)]).var(0)
    torch.testing.assert_close(draws(lambda: ours(x), 20_000).var(0), variance, rtol=0.25, atol=0)


def test_flipout_signs_are_never_zero_and_balanced():
    from lightning_fedbayes.layers.base import random_signs

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        signs = random_signs((100_000,), torch.zeros((), dtype=dtype))
        assert signs.dtype == dtype
        assert set(signs.unique().tolist()) == {-1.0, 1.0}
        assert abs(float(signs.double().mean())) < 0.02
    shapes = Conv2dFlipout(2, 5, 3).sign_shapes(torch.zeros(7, 2, 8, 8))
    assert shapes == ((7, 2, 1, 1), (7, 5, 1, 1))
