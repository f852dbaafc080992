"""Shapes and parameter counts of the ready networks."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes import HybridBayesianClassifier
from lightning_fedbayes.core.errors import ConversionError, FedBayesError
from lightning_fedbayes.layers import BayesianLayer, kl_divergence, mean_only, read_posterior
from lightning_fedbayes.modules import lenet, mlp, resnet20
from tests.federations import federate, loader

from .helpers import summed_kl


def count(network):
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(("hidden", "weights"), [((), 7 * 3), ((5,), 7 * 5 + 5 * 3), ((5, 4), 7 * 5 + 5 * 4 + 4 * 3)])
def test_mlp(hidden, weights):
    network = mlp(7, 3, hidden)
    assert network(torch.zeros(2, 7)).shape == (2, 3)
    assert count(network) == weights + sum(hidden) + 3
    assert sum(isinstance(layer, nn.ReLU) for layer in network) == len(hidden)


@pytest.mark.parametrize(("channels", "size", "side"), [(1, 28, 4), (3, 32, 5), (1, 32, 5), (2, 16, 1), (1, 31, 4)])
def test_lenet(channels, size, side):
    """Two unpadded 5×5 convolutions, each halved by pooling, leave 16 maps of side × side."""
    network = lenet(channels, classes=7, size=size)
    assert network(torch.zeros(2, channels, size, size)).shape == (2, 7)
    convolutions = (6 * channels * 25 + 6) + (16 * 6 * 25 + 16)
    linear = (16 * side**2 * 120 + 120) + (120 * 84 + 84) + (84 * 7 + 7)
    assert count(network) == convolutions + linear


@pytest.mark.parametrize(
    ("channels", "size", "parameters"),
    [
        (1, 28, 156 + 2416 + 30840 + 10164 + 850),  # FashionMNIST: 44,426
        (1, 32, 61_706),  # the count that LeNet-5 is known by
        (3, 32, 62_006),
    ],  # CIFAR-10 and SVHN
)
def test_lenet_has_the_parameters_of_the_paper(channels, size, parameters):
    assert count(lenet(channels, size=size)) == parameters


@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_the_last_layers_of_lenet_become_bayesian(last):
    """A Bayesian parameter counts twice: mean and standard deviation."""
    model = HybridBayesianClassifier(lenet(), bayesian_last=last)
    bayesian = sum([850, 10164, 30840][:last])
    assert count(model) == 44_426 + bayesian
    assert model.sample(torch.zeros(2, 1, 28, 28), 4).shape == (4 if last else 1, 2, 10)


def test_lenet_says_which_images_are_too_small():
    with pytest.raises(FedBayesError, match="15"):
        lenet(size=15)


@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_the_layers_of_ba_bfl(last):
    """Weights of log-variance −9, deterministic biases, and a KL of the weights alone."""
    network = fb.bayesianize(lenet(), last=last, posterior_std=math.exp(-4.5), bayesian_bias=False)
    posterior = read_posterior(network)
    random = [name for name in posterior.names if posterior.variance[name].any()]
    assert random == ["7.weight", "9.weight", "11.weight"][3 - last :]
    weights = [256 * 120, 120 * 84, 84 * 10][3 - last :]
    assert sum(posterior.mean[name].numel() for name in random) == sum(weights)
    expected = 0.0
    for name in random:
        mean, variance = posterior.mean[name].double(), posterior.variance[name].double()
        torch.testing.assert_close(variance.log(), torch.full_like(variance, -9.0), rtol=0, atol=1e-4)
        expected += ((mean**2 + math.exp(-9) - 1 + 9) / 2).sum().item()
    assert kl_divergence(network).item() == pytest.approx(expected, rel=1e-5)


def test_lenet_has_five_layers_to_convert():
    with pytest.raises(ConversionError, match=r"last=6, but only 5 layers can be converted: 0, 3, 7, 9, 11"):
        fb.bayesianize(lenet(), last=6)


def flipout(network, **options):
    options = {"estimator": "flipout", "prior_std": 10.0, **options}
    return fb.bayesianize(network, types=[nn.Conv2d, nn.Linear], **options)


@pytest.mark.parametrize(("channels", "classes"), [(3, 10), (1, 7)])
def test_resnet_has_the_parameters_of_the_paper(channels, classes):
    """He et al. 2016 give 0.27 million; 269,722 with shortcuts that have none."""
    network = resnet20(channels, classes)
    convolutions = 9 * (channels * 16 + 6 * 16**2 + 16 * 32 + 5 * 32**2 + 32 * 64 + 5 * 64**2)
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    assert count(network) == convolutions + norms + 65 * classes
    assert (channels, classes) != (3, 10) or count(network) == 269_722
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in network.modules()) == 20


@pytest.mark.parametrize("size", [1, 5, 32, 33])
def test_resnet_takes_images_of_any_size(size):
    network = resnet20(2, 4).eval()
    assert network(torch.zeros(3, 2, size, size)).shape == (3, 4)
    stages = nn.Sequential(*list(network)[:-3])
    assert stages(torch.zeros(1, 2, size, size)).shape == (1, 64, *[math.ceil(size / 4)] * 2)


@pytest.mark.parametrize(("number", "before", "after", "stride"), [(4, 16, 16, 1), (6, 16, 32, 2), (9, 32, 64, 2)])
def test_a_block_without_a_residual_is_its_shortcut(number, before, after, stride):
    block = resnet20()[number]
    nn.init.zeros_(block.norm2.weight)
    x = torch.randn(2, before, 7, 7)
    shortcut = x.relu()[:, :, ::stride, ::stride]
    extra = (after - before) // 2
    y = block(x)
    assert torch.equal(y[:, extra : extra + before], shortcut)
    assert y.sum().item() == pytest.approx(shortcut.sum().item(), rel=1e-5)
    nn.init.constant_(block.norm2.bias, -1e9)
    assert not block(x).any()  # the last ReLU comes after the sum


def test_resnet_starts_with_the_variance_of_he():
    torch.manual_seed(0)
    for module in resnet20().modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            scaled = module.weight.square() * module.weight[0].numel() / 2  # χ² with mean 1 and variance 2
            assert scaled.mean().item() == pytest.approx(1, abs=5 * math.sqrt(2 / scaled.numel()))


def test_the_variational_resnet_is_bayesian_in_all_twenty_layers():
    network = flipout(resnet20())
    layers = [m for m in network.modules() if isinstance(m, BayesianLayer)]
    assert len(layers) == 20
    assert not any(isinstance(m, nn.Conv2d | nn.Linear) for m in network.modules())
    assert {each.prior.std for layer in layers for each in layer.gaussian_parameters()} == {10.0}  # variance 100
    assert count(network) == 269_722 + (269_722 - 2 * 688)  # all but BatchNorm's counts twice
    assert kl_divergence(network).item() == pytest.approx(summed_kl(network, prior_std=10.0), rel=1e-5)


@pytest.mark.parametrize("make", [fb.with_mc_dropout, lambda network: flipout(network, init="pretrained")])
def test_the_variants_of_a_pretrained_resnet_are_the_network_at_their_mean(make):
    network = resnet20()
    network(torch.randn(8, 3, 8, 8))  # gives BatchNorm something to remember
    variant = make(network).eval()
    x = torch.randn(2, 3, 8, 8)
    with mean_only(variant):
        torch.testing.assert_close(variant(x), network.eval()(x))
    assert not torch.equal(variant(x), variant(x))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("make", [fb.with_mc_dropout, flipout], ids=["dropout", "flipout"])
def test_stochastic_resnets_train_under_both_engines(make, engine):
    torch.manual_seed(0)
    module = HybridBayesianClassifier(make(resnet20(classes=2)), samples=2)
    before = [p.detach().clone() for p in module.parameters()]
    federate(module, fb.FederatedBayes(fb.IIDPartition(2), engine=engine), 1, loader(images(), 4))
    assert all(p.isfinite().all() and not torch.equal(p, old) for p, old in zip(module.parameters(), before))


def test_both_engines_train_the_same_resnet():
    results = []
    for engine in ("sequential", "vectorized"):
        torch.manual_seed(0)
        module = HybridBayesianClassifier(
            resnet20(classes=2), bayesian_last=0, optimizer=lambda p: torch.optim.SGD(p, 0.01)
        )
        federate(module, fb.FederatedBayes(fb.IIDPartition(2), engine=engine), 1, loader(images(), 4))
        results.append(module.network.state_dict())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def images():
    return TensorDataset(torch.randn(8, 3, 8, 8), torch.arange(8) % 2)
