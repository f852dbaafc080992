import bayesian_torch.layers as bt
import pytest
import torch
from torch import nn

from lightning_fedbayes.errors import ConversionError
from lightning_fedbayes.layers import (
    Conv1dFlipout,
    LinearReparameterization,
    MCDropout,
    Reparameterized,
    mean_only,
    use_estimator,
)


@pytest.fixture
def network():
    return nn.Sequential(Conv1dFlipout(1, 2, 3), nn.Flatten(), MCDropout(0.5), LinearReparameterization(6, 4),
                         Reparameterized(nn.LayerNorm(4)), bt.LinearFlipout(4, 4))


def test_mean_only_is_deterministic_nests_and_restores_also_after_an_exception(network):
    network[5].dnn_to_bnn_flag = True
    x = torch.randn(2, 1, 5)
    parameters = {name: (id(p), p.detach().clone()) for name, p in network.named_parameters()}
    with pytest.raises(RuntimeError, match="boom"), mean_only(network):  # noqa: PT012
        y = network(x)
        with mean_only(network):
            assert torch.equal(network(x), y)
        assert torch.equal(network(x), y)
        with mean_only(network[3]):
            pass
        assert torch.equal(network(x), y)
        raise RuntimeError("boom")
    assert not torch.equal(network(x), network(x))
    for name, p in network.named_parameters():
        assert (id(p)) == parameters[name][0]
        assert torch.equal(p, parameters[name][1])


@pytest.mark.parametrize("layer", [bt.LinearReparameterization(3, 2), bt.LinearFlipout(3, 2),
                                   bt.LSTMReparameterization(3, 2), bt.LSTMFlipout(3, 2)])
def test_foreign_layers_run_at_their_mean(layer):
    x = torch.randn(2, 4, 3)
    with mean_only(layer):
        assert torch.equal(layer(x)[0], layer(x)[0])
    assert not torch.equal(layer(x)[0], layer(x)[0])


def test_mean_only_draws_no_noise_and_calls_no_softplus():
    layer = LinearReparameterization(3, 2)
    state = torch.get_rng_state()
    with mean_only(layer), torch.profiler.profile() as profile:
        layer(torch.ones(1, 3))
    assert torch.equal(state, torch.get_rng_state())
    names = {event.key for event in profile.key_averages()}
    assert "aten::linear" in names
    assert "aten::softplus" not in names


def test_estimator_is_used_by_every_layer_and_restored(network):
    with pytest.raises(RuntimeError, match="boom"), use_estimator(  # noqa: PT012
            network, "local_reparameterization"):
        assert {network[0].estimator, network[3].estimator} == {"local_reparameterization"}
        with use_estimator(network[0], "reparameterization"):
            assert network[0].estimator == "reparameterization"
        assert network[0].estimator == "local_reparameterization"
        raise RuntimeError("boom")
    assert (network[0].estimator, network[3].estimator) == ("flipout", "reparameterization")


def test_unknown_estimator_is_refused_before_anything_changes(network):
    with pytest.raises(ConversionError, match="did you mean 'flipout'"), use_estimator(network, "flipuot"):
        pass
    assert network[3].estimator == "reparameterization"
