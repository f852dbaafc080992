import bayesian_torch.layers as bt
import pytest
import torch
from torch import nn

from lightning_fedbayes import layers
from lightning_fedbayes.core.errors import PosteriorError
from lightning_fedbayes.core.posterior import GaussianPosterior, is_zero
from lightning_fedbayes.layers.functional import smallest_std
from tests.federations import of_bayesian_torch


def hybrid():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        layers.Conv2dFlipout(2, 2, 3),
        nn.BatchNorm2d(2),
        nn.Flatten(),
        layers.Reparameterized(nn.Linear(8, 3)),
        layers.LinearReparameterization(3, 2, bayesian_bias=False),
    )


def dnn_to_bnn_network():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    return of_bayesian_torch(network, "Flipout")


def test_names_order_and_kinds():
    posterior = layers.read_posterior(hybrid())
    kinds = {"0": "weight", "1": "kernel", "2": "weight", "4.module": "weight", "5": "weight"}
    assert posterior.names == tuple(f"{at}.{each}" for at, kind in kinds.items() for each in (kind, "bias"))
    point_masses = {name for name, variance in posterior.variance.items() if is_zero(variance)}
    assert point_masses == {"0.weight", "0.bias", "2.weight", "2.bias", "5.bias"}


@pytest.mark.parametrize(
    "build",
    [
        hybrid,
        dnn_to_bnn_network,
        lambda: bt.LSTMReparameterization(3, 2),
        lambda: nn.Linear(2, 2).double(),
        lambda: layers.LinearReparameterization(2, 2).bfloat16(),
    ],
)
def test_loading_what_was_read_changes_no_bit(build):
    network = build()
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(3 * torch.randn_like(p))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    layers.load_posterior(network, layers.read_posterior(network).clone())
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_what_is_loaded_is_read_and_the_dtype_stays():
    network = hybrid()
    read = layers.read_posterior(network)
    target = GaussianPosterior(
        {n: torch.randn_like(m).double() for n, m in read.mean.items()},
        {n: torch.rand_like(m).double() + 1e-4 for n, m in read.mean.items()},
    )
    layers.load_posterior(network, target)
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    again = layers.read_posterior(network)
    for name in target.names:
        torch.testing.assert_close(again.mean[name], target.mean[name].float())
        if not is_zero(again.variance[name]):
            torch.testing.assert_close(again.variance[name], target.variance[name].float(), rtol=1e-5, atol=0)


def test_only_entries_with_another_variance_get_another_rho():
    layer = layers.LinearReparameterization(2, 2, posterior_rho_init=0.123)
    posterior = layers.read_posterior(layer).clone()
    posterior.variance["weight"][0, 0] = 4.0
    layers.load_posterior(layer, posterior)
    assert (layer.rho_weight == layer.rho_weight[1, 1]).sum() == 3
    torch.testing.assert_close(layers.gaussian_parameters(layer)["weight"].std[0, 0], torch.tensor(2.0))


def test_variance_zero_becomes_the_smallest_std():
    layer = layers.LinearReparameterization(2, 2)
    layers.load_posterior(layer, GaussianPosterior.point_mass(layers.read_posterior(layer).mean))
    std = layers.gaussian_parameters(layer)["weight"].std
    assert std.max() <= 1.001 * smallest_std(torch.float32)
    assert (layers.read_posterior(layer).variance["weight"] > 0).all()


def test_a_tied_parameter_appears_once():
    shared = layers.LinearReparameterization(3, 3)
    network = nn.Sequential(shared, nn.ReLU(), shared)
    assert list(layers.gaussian_parameters(network)) == ["0.weight", "0.bias"]
    other = layers.LinearReparameterization(3, 3)
    for name in ("mu_weight", "rho_weight"):
        setattr(other, name, getattr(shared, name))
    network = nn.ModuleList([shared, other])
    assert list(layers.gaussian_parameters(network)) == ["0.weight", "0.bias", "1.bias"]
    assert layers.read_posterior(network).names == ("0.weight", "0.bias", "1.bias")
    linear = nn.Linear(2, 2)
    assert layers.read_posterior(nn.ModuleList([linear, linear])).names == ("0.weight", "0.bias")


def test_excluded_parameters_are_neither_read_nor_written():
    network = hybrid()
    posterior = layers.read_posterior(network, exclude={"1.kernel", "0.weight"})
    assert {"1.kernel", "0.weight"}.isdisjoint(posterior.names)
    kernel = network[1].mu_kernel.detach().clone()
    moved = GaussianPosterior({n: m + 1 for n, m in posterior.mean.items()}, posterior.variance)
    layers.load_posterior(network, moved, exclude={"1.kernel", "0.weight"})
    assert torch.equal(network[1].mu_kernel, kernel)
    assert torch.equal(layers.read_posterior(network).mean["5.bias"], moved.mean["5.bias"])
    with pytest.raises(PosteriorError, match=r"did you mean '1\.kernel'"):
        layers.PosteriorView(network, exclude=["1.mu_kernel"])


def test_foreign_posteriors_are_refused_by_name_and_shape():
    network, point = nn.Linear(2, 1), GaussianPosterior.point_mass
    good = layers.read_posterior(network)
    with pytest.raises(PosteriorError, match=r"lacks bias and has bia that"):
        layers.load_posterior(network, point({"weight": good.mean["weight"], "bia": torch.zeros(1)}))
    with pytest.raises(PosteriorError, match=r"'weight' has shape \(1, 1\)"):
        layers.load_posterior(network, point({"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}))


@pytest.mark.parametrize("last", [nn.Linear(3, 1), layers.LinearFlipout(3, 1)])
def test_frozen_parameters_may_be_missing_and_stay(last):
    """A federation sends what is trained, such as an adapter: its posterior is loaded into the whole network."""
    network = nn.Sequential(nn.Linear(2, 3).requires_grad_(False), last)
    whole = layers.read_posterior(network)
    frozen, part = whole.mean["0.weight"].clone(), layers.read_posterior(network, exclude=["0.weight", "0.bias"])
    expected = part.mean["1.weight"] + 1
    layers.load_posterior(network, GaussianPosterior({n: v + 1 for n, v in part.mean.items()}, part.variance))
    assert torch.equal(network[0].weight, frozen)
    assert torch.equal(layers.read_posterior(network).mean["1.weight"], expected)
    layers.load_posterior(network, whole)
    network[0].weight.requires_grad_(True)
    with pytest.raises(PosteriorError, match=r"lacks 0.weight and has nothing"):
        layers.load_posterior(network, part)


def test_bayesian_torch_parameters_have_its_mean_and_std():
    network = dnn_to_bnn_network()
    parameters = layers.gaussian_parameters(network)
    assert list(parameters) == ["0.kernel", "0.bias", "4.weight", "4.bias"]
    torch.testing.assert_close(parameters["0.kernel"].std, network[0].rho_kernel.exp().log1p())
    assert list(layers.gaussian_parameters(bt.LSTMFlipout(3, 2))) == ["ih.weight", "ih.bias", "hh.weight", "hh.bias"]
