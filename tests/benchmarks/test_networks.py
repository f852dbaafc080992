"""Shapes and parameter counts of the networks of published figures."""

import pytest
import torch
from torch import nn

from benchmarks.networks import lenet, resnet20


def count(network):
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(("channels", "size", "parameters"), [(1, 28, 44_426), (1, 32, 61_706), (3, 32, 62_006)])
def test_lenet_has_the_parameters_of_the_paper(channels, size, parameters):
    assert count(lenet(channels, size=size)) == parameters


@pytest.mark.parametrize(("channels", "classes"), [(3, 10), (1, 7)])
def test_resnet_has_the_parameters_of_the_paper(channels, classes):
    """He et al. 2016 give 0.27 million; 269,722 with shortcuts that have none."""
    network = resnet20(channels, classes)
    convolutions = 9 * (channels * 16 + 6 * 16**2 + 16 * 32 + 5 * 32**2 + 32 * 64 + 5 * 64**2)
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    assert count(network) == convolutions + norms + 65 * classes
    assert (channels, classes) != (3, 10) or count(network) == 269_722
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in network.modules()) == 20


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
