"""KL divergence, exchanged priors, posterior means and estimators of whole networks."""

import copy

import bayesian_torch.layers as bt
import pytest
import torch
from torch import nn
from torch.distributions import Normal as TorchNormal
from torch.distributions import kl_divergence as torch_kl

from lightning_fedbayes import layers
from lightning_fedbayes.core.errors import PosteriorError
from lightning_fedbayes.core.posterior import GaussianPosterior

from .helpers import make


def torch_sum(each, mean, std):
    return torch_kl(TorchNormal(each.mean, each.std), TorchNormal(mean, std)).sum()


def test_every_layers_kl_is_the_sum_of_torchs(kind, estimator):
    layer = make(kind, estimator, prior_mean=0.3, prior_variance=4.0)
    expected = sum(torch_sum(each, 0.3, 2.0) for each in layer.gaussian_parameters())
    torch.testing.assert_close(layer.kl_loss(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layers.kl_divergence(layer), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("small", [0, 2**14])
def test_parameters_count_the_same_joined_or_one_by_one(small, monkeypatch):
    """Numbers, tensors and other families as priors, two dtypes, small and large parameters, a tied layer."""
    monkeypatch.setattr(layers.base, "SMALL", small)
    tied = layers.LinearReparameterization(5, 5, prior_std=0.5)
    network = nn.Sequential(
        layers.LinearReparameterization(150, 130),
        layers.LinearFlipout(3, 2, prior_mean=0.4),
        layers.LinearFlipout(3, 2, prior_std=0.5),
        tied,
        tied,
        layers.LinearFlipout(2, 2, dtype=torch.float64),
        layers.Reparameterized(nn.LSTM(2, 3)),
        layers.LinearReparameterization(2, 2, prior=layers.NormalPrior(torch.ones(()), 0.3)),
    )
    assert max(each.mean.numel() for each in layers.gaussian_parameters(network).values()) > 2**14
    joined = layers.kl_divergence(network)
    joined.backward()
    gradients = [p.grad for p in network.parameters()]
    network.zero_grad()
    alone = sum(each.kl() for each in layers.gaussian_parameters(network).values())
    alone.backward()
    torch.testing.assert_close(joined, alone, rtol=1e-6, atol=0)
    for gradient, p in zip(gradients, network.parameters()):
        torch.testing.assert_close(gradient, p.grad)
    layers.set_prior(network, layers.read_posterior(network))
    torch.testing.assert_close(layers.kl_divergence(network).float(), torch.zeros(()), atol=1e-4, rtol=0)


FOREIGN = [
    lambda: bt.LinearReparameterization(3, 2, prior_mean=0.5, prior_variance=4.0),
    lambda: bt.Conv2dFlipout(2, 3, 3, prior_mean=0.5, prior_variance=4.0),
    lambda: bt.ConvTranspose2dFlipout(2, 5, 3, prior_mean=0.5, prior_variance=4.0),  # its sigma buffer is misshapen
    lambda: bt.LSTMReparameterization(3, 2, prior_mean=0.5, prior_variance=4.0),
]


@pytest.mark.parametrize("build", FOREIGN)
def test_bayesian_torch_layers_count_by_their_sum_and_variance(build):
    layer = build()
    expected = sum(torch_sum(each, 0.5, 2.0) for each in layers.gaussian_parameters(layer).values())
    torch.testing.assert_close(layers.kl_divergence(layer), expected)


def networks():
    ours = nn.Sequential(
        layers.LinearReparameterization(3, 2, prior_std=0.5),
        layers.Reparameterized(nn.LayerNorm(2)),
        layers.LinearFlipout(2, 2),
    )
    theirs = nn.Sequential(bt.LinearReparameterization(3, 2), bt.LinearFlipout(2, 2))
    return [ours, theirs, nn.Sequential(bt.ConvTranspose2dFlipout(2, 5, 3))]


@pytest.mark.parametrize("network", networks())
def test_own_posterior_as_prior_gives_zero_and_none_restores(network):
    before = layers.kl_divergence(network).detach()
    names = set(network.state_dict())
    layers.set_prior(network, layers.read_posterior(network))
    torch.testing.assert_close(layers.kl_divergence(network), torch.zeros(()), atol=1e-5, rtol=0)
    with torch.no_grad():
        for each in layers.gaussian_parameters(network).values():
            each.mean.add_(1.0)
    assert layers.kl_divergence(network) > 1  # the prior is a copy, and stayed where it was
    assert set(network.state_dict()) == names
    moved = copy.deepcopy(network).double()
    torch.testing.assert_close(layers.kl_divergence(moved).float(), layers.kl_divergence(network).detach())
    with torch.no_grad():
        for each in layers.gaussian_parameters(network).values():
            each.mean.sub_(1.0)
    layers.set_prior(network, layers.read_posterior(network))  # twice in a row, as a federation does
    layers.set_prior(network, None)
    torch.testing.assert_close(layers.kl_divergence(network), before, rtol=1e-4, atol=1e-4)
    layers.set_prior(network, None)


def test_any_posterior_as_prior_is_the_gaussian_kl():
    network = networks()[0]
    read = layers.read_posterior(network)
    prior = GaussianPosterior(
        {n: torch.randn_like(m) for n, m in read.mean.items()},
        {n: torch.rand_like(m) + 0.1 for n, m in read.mean.items()},
    )
    layers.set_prior(network, prior)
    expected = read.clone().kl(GaussianPosterior(dict(prior.mean), dict(prior.variance)))
    torch.testing.assert_close(layers.kl_divergence(network).double(), expected, rtol=1e-5, atol=1e-5)


def test_bayesian_torchs_own_kl_reads_the_mean_and_std_of_a_set_prior():
    layer = bt.LinearReparameterization(3, 2)
    read = layers.read_posterior(layer)
    wide = {n: torch.full_like(v, 4.0) for n, v in read.variance.items()}
    layers.set_prior(layer, GaussianPosterior(read.mean, wide))
    assert layer.prior_weight_sigma.unique().tolist() == [2.0]
    own = sum(each.kl() / each.mean.numel() for each in layers.gaussian_parameters(layer).values())
    torch.testing.assert_close(layer.kl_loss(), own)  # a mean per tensor, but with the right prior


def test_a_point_mass_or_a_foreign_posterior_is_no_prior():
    layer = layers.LinearReparameterization(3, 2)
    before = layer.kl_loss()
    read = layers.read_posterior(layer)
    with pytest.raises(PosteriorError, match="'weight' has variance 0 at 6 of 6"):
        layers.set_prior(layer, GaussianPosterior.point_mass(read.mean))
    with pytest.raises(PosteriorError, match="no 'bias'"):
        layers.set_prior(layer, GaussianPosterior({"weight": read.mean["weight"]}, {"weight": read.variance["weight"]}))
    with pytest.raises(PosteriorError, match="shape"):
        layers.set_prior(layer, layers.read_posterior(layers.LinearReparameterization(2, 2)))
    assert torch.equal(layer.kl_loss(), before)


@pytest.fixture
def network():
    return nn.Sequential(
        layers.Conv1dFlipout(1, 2, 3),
        nn.Flatten(),
        layers.MCDropout(0.5),
        layers.LinearReparameterization(6, 4),
        layers.Reparameterized(nn.LayerNorm(4)),
        bt.LinearFlipout(4, 4),
    )


def test_mean_only_is_deterministic_nests_and_restores_also_after_an_exception(network):
    network[5].dnn_to_bnn_flag = True
    x = torch.randn(2, 1, 5)
    parameters = {name: (id(p), p.detach().clone()) for name, p in network.named_parameters()}
    with pytest.raises(RuntimeError, match="boom"), layers.mean_only(network):  # noqa: PT012
        y = network(x)
        with layers.mean_only(network):
            assert torch.equal(network(x), y)
        assert torch.equal(network(x), y)
        with layers.mean_only(network[3]):
            pass
        assert torch.equal(network(x), y)
        raise RuntimeError("boom")
    assert not torch.equal(network(x), network(x))
    for name, p in network.named_parameters():
        assert (id(p)) == parameters[name][0]
        assert torch.equal(p, parameters[name][1])


@pytest.mark.parametrize(
    "layer",
    [bt.LinearReparameterization(3, 2), bt.LinearFlipout(3, 2), bt.LSTMReparameterization(3, 2), bt.LSTMFlipout(3, 2)],
)
def test_foreign_layers_run_at_their_mean(layer):
    x = torch.randn(2, 4, 3)
    with layers.mean_only(layer):
        assert torch.equal(layer(x)[0], layer(x)[0])
    assert not torch.equal(layer(x)[0], layer(x)[0])
