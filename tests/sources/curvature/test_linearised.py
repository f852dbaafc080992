"""The linearised predictive: closed forms, laplace-torch, explicit Jacobians, chunks and what does not vectorize."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.modules.sources.curvature import KroneckerPosterior, draws_of_outputs, linearised_outputs


def random_posterior(network, seed=0, point=()):
    generator = torch.Generator().manual_seed(seed)
    mean, variance = {}, {}
    for name, p in network.named_parameters():
        mean[name] = torch.randn(p.shape, generator=generator, dtype=p.dtype) / 3
        variance[name] = torch.rand(p.shape, generator=generator, dtype=p.dtype)
        if name in point:
            variance[name] = torch.zeros((), dtype=p.dtype).expand(p.shape)
    return fb.GaussianPosterior(mean, variance)


def dense(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7, bias=bias), nn.Tanh(), nn.Linear(7, 3, bias=bias)).eval(), torch.randn(9, 5)


def convolution(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=bias), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3, bias=bias)
    ).eval(), torch.randn(9, 1, 6, 6)


NETWORKS = {"dense": dense, "convolution": convolution}


def explicit(network, mean, x):
    """Outputs and Jacobians of the whole batch by the slow way, shape (batch, outputs, parameters)."""
    names = list(mean)

    def output(*values):
        return torch.func.functional_call(network, dict(zip(names, values)), (x,))

    jacobians = torch.autograd.functional.jacobian(output, tuple(mean.values()))
    return output(*mean.values()).detach(), torch.cat([each.flatten(2) for each in jacobians], 2)


def several_clients(network, x, clients=2):
    """A Kronecker posterior of several clients, one with a small weight."""
    y = torch.arange(len(x)) % 3
    one_shot = fb.KroneckerLaplace(fb.Laplace(prior_std=0.7))
    return one_shot.fuse([one_shot.site(network, [(x[k::clients], y[k::clients])]) for k in range(clients)])


def full_covariance(posterior):
    """The covariance matrix of all parameters, in the order of the means."""
    blocks = {}
    for layer, terms in posterior.terms.items():
        precision = sum(torch.kron(b, a) for a, b in terms)
        blocks[layer] = torch.linalg.inv(precision + posterior.prior_precisions[layer] * torch.eye(len(precision)))
    sizes = [value.numel() for value in posterior.mean.values()]
    order, start = [], 0
    for layer, terms in posterior.terms.items():  # [weight, bias] of a row of the block to the order of the means
        rows, columns = len(terms[0][1]), len(terms[0][0])
        index = torch.arange(start, start + rows * columns).reshape(rows, columns)
        bias = f"{layer}.bias" in posterior.mean
        order += [index[:, :-1].flatten(), index[:, -1]] if bias else [index.flatten()]
        start += rows * columns
    order = torch.cat(order)
    assert len(order) == sum(sizes)
    return torch.block_diag(*blocks.values())[order][:, order]


@pytest.mark.parametrize("clients", [None, 1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_is_the_covariance_by_an_explicit_jacobian(name, bias, clients):
    """Of independent parameters and a point mass, or of the inverted sum of clients' Kronecker factors."""
    network, x = NETWORKS[name](bias)
    if clients is None:
        posterior = random_posterior(network, point=(list(dict(network.named_parameters()))[-2],))
        covariance = torch.cat([each.flatten() for each in posterior.variance.values()]).double().diag()
    else:
        posterior = several_clients(network, x, clients)
        covariance = full_covariance(posterior)
    found = linearised_outputs(network, posterior, x)
    mean, jacobian = explicit(network, posterior.mean, x)
    assert torch.allclose(found[0], mean, atol=1e-5)
    wanted = jacobian.double() @ covariance @ jacobian.double().mT
    assert torch.allclose(found[1].double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_is_the_glm_predictive_of_laplace_torch(name, task, structure):
    network, x = NETWORKS[name](bias=structure == "diagonal")  # its factors of a bias are apart from the weight's
    y = torch.arange(len(x)) % 3 if task == "classification" else torch.randn(len(x), 3)
    data = DataLoader(TensorDataset(x, y), batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("laplace")
        from laplace import DiagLaplace, KronLaplace
        from laplace.curvature import AsdlGGN

        kind = DiagLaplace if structure == "diagonal" else KronLaplace
        peer = kind(network, task, prior_precision=0.8**-2, backend=AsdlGGN)
        peer.fit(data)
        wanted = peer._glm_predictive_distribution(x)
        factors = [] if structure == "diagonal" else peer.H_facs.kfacs
    if structure == "diagonal":
        known = "categorical" if task == "classification" else fb.Gaussian(1.0)
        posterior = fb.Laplace(known, prior_std=0.8).posterior(network, data)
    else:
        layers = [each.removesuffix(".weight") for each in dict(network.named_parameters())]
        terms = {layer: [(a.double(), b.double())] for layer, (b, a) in zip(layers, factors)}
        mean = {name: p.detach() for name, p in network.named_parameters()}
        posterior = KroneckerPosterior(mean, terms, dict.fromkeys(layers, 0.8**-2))
    for ours, theirs in zip(linearised_outputs(network, posterior, x), wanted, strict=True):
        assert torch.allclose(ours, theirs.detach(), rtol=1e-5, atol=1e-5)


def test_inference_mode_point_masses_collections_and_scalar_outputs():
    network, x = dense()
    posterior = random_posterior(network)
    wanted = linearised_outputs(network, posterior, x)
    with torch.inference_mode():
        mean, covariance = linearised_outputs(network, posterior, x.clone())
        inside = linearised_outputs(network, fb.GaussianPosterior.point_mass(posterior.mean), x)
    assert torch.equal(covariance, wanted[1])
    assert torch.allclose(inside[0], mean, atol=1e-6)
    assert not inside[1].any()
    assert inside[1].shape == (9, 3, 3)

    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, inputs):
            return self.network(inputs["x"] + inputs["y"])[:, 0]

    named = random_posterior(Scalar())
    mean, covariance = linearised_outputs(Scalar(), named, {"x": x / 4, "y": 3 * x / 4})
    assert mean.shape == (9,)
    assert torch.allclose(mean, wanted[0][:, 0], atol=1e-6)
    assert torch.allclose(covariance[:, 0, 0], wanted[1][:, 0, 0], atol=1e-5)


def test_bayesian_layers_are_linearised_at_their_means_without_their_noise():
    network = fb.bayesianize(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), last=1)
    posterior, x = fb.read_posterior(network), torch.randn(6, 4)
    found = linearised_outputs(network, posterior, x)
    features = torch.tanh(x @ posterior.mean["0.weight"].T + posterior.mean["0.bias"])
    variance = features.square() @ posterior.variance["2.weight"].T + posterior.variance["2.bias"]
    assert torch.allclose(found[1], torch.diag_embed(variance), rtol=1e-4)
    assert torch.allclose(found[0], features @ posterior.mean["2.weight"].T + posterior.mean["2.bias"], atol=1e-6)


def test_draws_of_outputs_have_their_mean_and_covariance():
    root = torch.randn(3, 4, 4)
    root[1, :, 2:] = 0  # of rank 2
    mean, covariance = torch.randn(3, 4), root @ root.mT
    drawn = draws_of_outputs(mean, covariance, 2**13)
    assert torch.allclose(drawn.mean(0), mean, atol=0.01)
    centred = drawn - drawn.mean(0)
    found = torch.einsum("sni,snj->nij", centred, centred) / len(drawn)
    scale = covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    assert ((found - covariance) / scale).abs().max() < 0.02
    kurtosis = (centred / centred.std(0)).pow(4).mean(0)
    assert (kurtosis - 3).abs().max() < 0.1
    assert draws_of_outputs(mean[:, 0], covariance[:, :1, :1], 5).shape == (5, 3)
    assert not torch.equal(draws_of_outputs(mean, covariance, 4), draws_of_outputs(mean, covariance, 4))
