"""Shapes and parameter counts of the ready networks."""

import pytest
import torch
from torch import nn

from lightning_fedbayes import HybridBayesianClassifier
from lightning_fedbayes.errors import FedBayesError
from lightning_fedbayes.modules import lenet, mlp


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
    [(1, 28, 156 + 2416 + 30840 + 10164 + 850),  # FashionMNIST: 44,426
     (1, 32, 61_706),  # the count that LeNet-5 is known by
     (3, 32, 62_006)],  # CIFAR-10 and SVHN
)
def test_lenet_has_the_parameters_of_the_paper(channels, size, parameters):
    assert count(lenet(channels, size=size)) == parameters


@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_the_last_layers_of_lenet_become_bayesian(last):
    """A Bayesian parameter counts twice: mean and standard deviation."""
    model = HybridBayesianClassifier(lenet(), bayesian_last=last)
    bayesian = sum([850, 10164, 30840][:last])
    assert count(model) == 44_426 + bayesian
    assert model.sample_probs(torch.zeros(2, 1, 28, 28), 4).shape == (4 if last else 1, 2, 10)


def test_lenet_says_which_images_are_too_small():
    with pytest.raises(FedBayesError, match="15"):
        lenet(size=15)
