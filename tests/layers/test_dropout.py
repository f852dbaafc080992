"""Monte Carlo dropout as a conversion: moments in closed form, the same names, no mask on the outputs."""

import pytest
import torch
from torch import nn

from lightning_fedbayes import bayesianize, with_mc_dropout
from lightning_fedbayes.core.errors import ConversionError
from lightning_fedbayes.layers import MCDropout, mean_only
from lightning_fedbayes.modules import is_stochastic, lenet, resnet20, sample_outputs
from tests.refusals import refusals


def masked(network):
    """Names of the layers whose output is dropped."""
    return [name.removesuffix(".mc_dropout") for name, m in network.named_modules() if isinstance(m, MCDropout)]


def test_dropout_is_on_at_prediction_and_off_at_the_mean():
    dropout, x = MCDropout(0.4).eval(), torch.ones(20_000)
    y = dropout(x)
    torch.testing.assert_close(y.unique(), torch.tensor([0.0, 1 / 0.6]))
    assert abs(float((y == 0).float().mean()) - 0.4) < 0.02
    with mean_only(dropout):
        assert torch.equal(dropout(x), x)
    assert not torch.equal(dropout(x), dropout(x))
    with pytest.raises(ConversionError, match="p=1"):
        MCDropout(1.0)


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
    with mean_only(dropped):
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
    (bayesianize(TWO, last=1), 0.2, r"\['1'\] are Bayesian already"),
    call=with_mc_dropout,
)
