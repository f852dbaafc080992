import copy

import pytest
import torch
from torch import nn

from benchmarks.networks import lenet, resnet20
from lightning_fedbayes import layers as bayes
from lightning_fedbayes import with_mc_dropout
from lightning_fedbayes.core.errors import ConversionError
from lightning_fedbayes.modules import is_stochastic, sample_outputs
from tests.refusals import refusals

from .helpers import KINDS, example


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect")
        self.head = nn.Sequential(nn.Linear(32, 5), nn.ReLU(), nn.Linear(5, 3, bias=False))

    def forward(self, x):
        return self.head(self.conv(x).flatten(1))


def test_pretrained_keeps_the_function_at_the_mean(kind, estimator):
    positional, keywords, _ = KINDS[kind]
    network = nn.Sequential(getattr(nn, kind)(*positional, **keywords)).double().eval()
    bayesian = bayes.bayesianize(network, last=1, init="pretrained", estimator=estimator)
    x = example(kind).double()
    with bayes.mean_only(bayesian):
        assert torch.equal(bayesian(x), network(x))
    assert bayesian[0].estimator == estimator
    assert not bayesian[0].training
    assert {p.dtype for p in bayesian.parameters()} == {torch.float64}
    assert not torch.equal(bayesian(x), bayesian(x))


def test_moped_is_delta_times_the_weight_around_a_centred_prior():
    network = LeNet()
    with torch.no_grad():
        network.head[0].weight[0, 0] = 0.0
    bayesian = bayes.bayesianize(network, last=3, init="pretrained", delta=0.2, prior_std=0.5)
    for name, each in bayes.gaussian_parameters(bayesian).items():
        w = network.get_parameter(name.replace("kernel", "weight"))
        assert torch.equal(each.mean, w)
        typical = w.abs() > 0.02 * w.std()
        torch.testing.assert_close(each.std[typical], 0.2 * w.abs()[typical], rtol=1e-4, atol=0)
        assert torch.equal(each.prior.mean, w)
        assert each.prior.std == 0.5
    assert bayes.gaussian_parameters(bayesian)["head.0.weight"].std[0, 0] > 1e-5
    prior = bayes.NormalPrior(0.0, 0.1)
    own = bayes.bayesianize(network, last=1, init="pretrained", prior=prior)
    assert own.head[2].priors["weight"] is prior


def test_fresh_keeps_nothing_and_takes_the_std():
    network = LeNet()
    with torch.no_grad():
        for p in network.parameters():
            p.fill_(100.0)
    bayesian = bayes.bayesianize(network, last=2, posterior_std=0.02, prior_std=3.0)
    assert torch.equal(bayesian.conv.weight, network.conv.weight)
    for each in bayes.gaussian_parameters(bayesian).values():
        assert each.mean.abs().max() < 1
        torch.testing.assert_close(each.std, torch.full_like(each.std, 0.02))
        assert (each.prior.mean, each.prior.std) == (0.0, 3.0)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (0, ["Conv2d", "Linear", "Linear"]),
        (1, ["Conv2d", "Linear", "LinearLocalReparameterization"]),
        (3, ["Conv2dLocalReparameterization", "LinearLocalReparameterization", "LinearLocalReparameterization"]),
    ],
)
def test_last_counts_from_the_end_and_leaves_the_network_alone(last, expected):
    network = LeNet()
    state = copy.deepcopy(network.state_dict())
    bayesian = bayes.bayesianize(network, last=last)
    assert [type(m).__name__ for m in (bayesian.conv, bayesian.head[0], bayesian.head[2])] == expected
    assert type(network.head[2]) is nn.Linear
    assert all(torch.equal(state[name], value) for name, value in network.state_dict().items())
    bayesian(torch.randn(2, 1, 4, 4))
    if last == 0:
        assert bayes.kl_divergence(bayesian) == 0
        assert all(torch.equal(state[name], value) for name, value in bayesian.state_dict().items())


class Wrapped(nn.Module):
    """A trainable copy of a layer beside its frozen original, which nobody calls, as peft keeps a classifier."""

    def __init__(self, layer):
        super().__init__()
        self.original = layer.requires_grad_(False)
        self.copies = nn.ModuleDict({"default": copy.deepcopy(layer).requires_grad_(True)})

    def forward(self, x):
        return self.copies["default"](x)


@pytest.mark.parametrize("original_last", [False, True])
def test_last_does_not_count_a_frozen_original_beside_its_active_copy(original_last):
    head = Wrapped(nn.Linear(6, 3))
    if original_last:
        head.original = head._modules.pop("original")  # now behind the copy
    bayesian = bayes.bayesianize(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), head), last=2)
    assert {name: type(each) for name, each in bayesian.named_modules() if isinstance(each, bayes.BayesianLayer)} == {
        "0": bayes.LinearLocalReparameterization,
        "2.copies.default": bayes.LinearLocalReparameterization,
    }
    assert type(bayesian[2].original) is nn.Linear
    assert all(p.requires_grad for name, p in bayesian.named_parameters() if "rho" in name)
    with pytest.raises(ConversionError, match=r"last=3, but only 2 .* 0, 2\.copies\.default; frozen.*: 2\.original"):
        bayes.bayesianize(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), head), last=3)


def test_names_and_types():
    bayesian = bayes.bayesianize(LeNet(), names=["conv"], estimator="local_reparameterization")
    assert type(bayesian.conv) is bayes.Conv2dLocalReparameterization
    assert bayesian.conv.padding_mode == "reflect"
    bayesian = bayes.bayesianize(LeNet(), types=[nn.Linear], estimator="flipout", bayesian_bias=False)
    assert type(bayesian.head[0]) is bayes.LinearFlipout
    assert bayesian.head[0].bias is not None
    assert bayesian.head[2].bias is None
    assert type(bayes.bayesianize(nn.Linear(2, 1), last=1)) is bayes.LinearLocalReparameterization


def test_other_modules_become_reparameterized():
    network = nn.ModuleDict(
        {
            "embed": nn.Embedding(5, 4),
            "lstm": nn.LSTM(4, 4),
            "norm": nn.LayerNorm(4),
            "attention": nn.MultiheadAttention(4, 2),
            "out": nn.Linear(4, 5),
        }
    )
    for init in ("fresh", "pretrained"):
        bayesian = bayes.bayesianize(network, names=["embed", "lstm", "norm", "attention"], init=init)
        for name in ("embed", "lstm", "norm", "attention"):
            assert type(bayesian[name]) is bayes.Reparameterized
            same = torch.equal(next(bayesian[name].module.parameters()), next(network[name].parameters()))
            assert same == (init == "pretrained" or name == "norm")
        assert type(bayesian["out"]) is nn.Linear
    assert bayes.kl_divergence(bayesian).isfinite()
    assert type(bayes.bayesianize(network, types=[nn.LSTM])["lstm"]) is bayes.Reparameterized
    # attention reads its projection without calling it, so types do not reach inside
    projection = bayes.bayesianize(network, types=[nn.Linear])["attention"].out_proj
    assert type(projection) is not bayes.LinearLocalReparameterization


def test_tied_layers_stay_tied_and_frozen_ones_frozen():
    layer = nn.Linear(3, 3)
    layer.weight.requires_grad_(False)
    network = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)})
    for choice in ({"last": 1}, {"names": ["b.0"]}, {"names": ["a", "b.0"]}, {"types": [nn.Linear]}):
        bayesian = bayes.bayesianize(network, **choice)
        assert bayesian["a"] is bayesian["b"][0]
        assert isinstance(bayesian["a"], bayes.LinearReparameterization)
        assert not bayesian["a"].mu_weight.requires_grad
        assert not bayesian["a"].rho_weight.requires_grad
        assert bayesian["a"].rho_bias.requires_grad


def sharing():
    network = nn.ModuleDict({"embed": nn.Embedding(5, 4), "out": nn.Linear(4, 5)})
    network["out"].weight = network["embed"].weight
    return network


def hooked():
    network = nn.Sequential(nn.Linear(2, 2))
    network[0].register_forward_hook(lambda *_: None)
    return network


class Wall(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))


class Block(Wall):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)


test_what_cannot_be_converted_is_refused_with_the_reason = refusals(
    ConversionError,
    (LeNet(), {}, "exactly one"),
    (LeNet(), {"last": 1, "names": ["conv"]}, "exactly one"),
    (LeNet(), {"last": 4}, r"last=4, but only 3 .* conv, head\.0, head\.2"),
    (nn.Sequential(nn.ReLU()), {"last": 1}, "no linear or convolutional"),
    (LeNet(), {"names": ["head.1"]}, r"'head\.1' \(ReLU\) .* no parameter"),
    (LeNet(), {"names": ["head"]}, r"choose among head\.0"),
    (LeNet(), {"names": ["cnov"]}, "did you mean 'conv'"),
    (LeNet(), {"types": [nn.LSTM]}, r"no layer is an instance of \['LSTM'\]; the network has Conv2d"),
    (LeNet(), {"last": 1, "init": "moped"}, "init='moped': did you mean"),
    (LeNet(), {"last": 1, "init": "pretrained", "posterior_std": 0.1}, "takes delta"),
    (LeNet(), {"last": 1, "prior": bayes.NormalPrior(0.0, 1.0), "prior_std": 1.0}, "give no .*prior_std"),
    (LeNet(), {"last": 1, "prior_std": 0.0}, "prior_std=0.0: .*standard deviation"),
    (nn.Sequential(bayes.LinearReparameterization(2, 2)), {"names": ["0"]}, "Bayesian already"),
    (nn.Sequential(nn.Linear(2, 2), bayes.LinearReparameterization(2, 2)), {"last": 1}, r"\['1'\] are Bayesian"),
    (nn.Sequential(nn.LazyLinear(2)), {"last": 1}, "lazy"),
    (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))), {"last": 1}, "parametrised"),
    (nn.Sequential(nn.LSTM(2, 2).requires_grad_(False)), {"names": ["0"]}, "only frozen"),
    (nn.ModuleDict({"a": nn.MultiheadAttention(4, 2)}), {"names": ["a.out_proj"]}, "inside an attention"),
    (sharing(), {"last": 1}, "shares a parameter with 'embed'"),
    (hooked(), {"last": 1}, "hooks"),
    (nn.Sequential(Block()), {"names": ["0", "0.inner"], "init": "pretrained"}, r"'0\.inner' is a part of '0'"),
    (nn.Sequential(Wall()), {"names": ["0"]}, "no reset_parameters"),
    call=lambda network, arguments: bayes.bayesianize(network, **arguments),
)


def masked(network):
    """Names of the layers whose output is dropped."""
    return [name.removesuffix(".mc_dropout") for name, m in network.named_modules() if isinstance(m, bayes.MCDropout)]


def test_dropout_is_on_at_prediction_and_off_at_the_mean():
    dropout, x = bayes.MCDropout(0.4).eval(), torch.ones(20_000)
    y = dropout(x)
    torch.testing.assert_close(y.unique(), torch.tensor([0.0, 1 / 0.6]))
    assert abs(float((y == 0).float().mean()) - 0.4) < 0.02
    with bayes.mean_only(dropout):
        assert torch.equal(dropout(x), x)
    assert not torch.equal(dropout(x), dropout(x))
    with pytest.raises(ConversionError, match="p=1"):
        bayes.MCDropout(1.0)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_moments_of_a_linear_network(rate):
    r"""Masks on the hidden units h alone: mean W h + b, covariance W diag(h² p/(1−p)) Wᵀ."""
    network = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2)).double()
    x = torch.randn(1, 3, dtype=torch.float64)
    draws, size = sample_outputs(with_mc_dropout(network, rate), x, 40_000)[:, 0], 40_000
    hidden, weight = network[0](x)[0].detach(), network[1].weight.detach()
    covariance = weight * hidden.square() * rate / (1 - rate) @ weight.T
    std = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - network(x)[0]).abs() < 5 * std / size**0.5).all()
    torch.testing.assert_close(draws.T.cov(), covariance, rtol=0.05, atol=0.05 * float(std.max()) ** 2)


@pytest.mark.parametrize(("network", "shape"), [(lenet(), (2, 1, 28, 28)), (resnet20(), (2, 3, 8, 8))])
def test_all_layers_but_the_last_are_masked_and_all_names_are_kept(network, shape):
    network.eval()
    dropped = with_mc_dropout(network, 0.2)
    layers = [name for name, m in network.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert masked(dropped) == layers[:-1]
    assert masked(network) == []
    assert list(dropped.state_dict()) == list(network.state_dict())
    for source, target in ((network, dropped), (dropped, network)):
        target.load_state_dict({name: value + 1 for name, value in source.state_dict().items()})
    dropped.load_state_dict(network.state_dict())
    x = torch.randn(shape)
    with bayes.mean_only(dropped):
        assert torch.equal(dropped(x), network(x))
    assert torch.equal(with_mc_dropout(network, 0.0)(x), network(x))
    assert is_stochastic(dropped)
    assert not torch.equal(dropped(x), dropped(x))  # in evaluation mode


TWO = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
test_what_cannot_be_converted_is_refused = refusals(
    ConversionError,
    (nn.Sequential(nn.ReLU()), 0.2, "has 0 linear layers"),
    (nn.Sequential(nn.Linear(2, 2)), 0.2, "at least two"),
    (TWO, 1.0, r"p=1.0: .* in \[0, 1\)"),
    (with_mc_dropout(TWO), 0.2, r"'0' \(Linear\) has Monte Carlo dropout already"),
    (bayes.bayesianize(TWO, last=1), 0.2, r"\['1'\] are Bayesian already"),
    call=with_mc_dropout,
)
