"""One-shot federation by Kronecker-factored Laplace posteriors: beside closed forms, exact draws, bad input."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.modules.sources.curvature.systems import KroneckerSystem

NOISE, PRIOR = 0.5, 0.8
LINEAR = fb.KroneckerLaplace(fb.Laplace(fb.Gaussian(NOISE), prior_std=PRIOR))
SIZES = (7, 20, 13)


def ridge(x, y, share):
    """A linear model at the mode of its posterior, whose prior is taken to the power of ``share``."""
    design = F.pad(x, (0, 1), value=1.0)
    precision = design.T @ design / NOISE**2 + share * PRIOR**-2 * torch.eye(design.shape[1], dtype=x.dtype)
    solution = torch.linalg.solve(precision, design.T @ y / NOISE**2).T
    module = nn.Linear(x.shape[1], y.shape[1]).double()
    module.weight.data, module.bias.data = solution[:, :-1].clone(), solution[:, -1].clone()
    return module, precision


def linear_clients():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SIZES), 4, dtype=torch.float64, generator=generator) @ torch.tensor(
        [[1.0, 0.9, 0, 0], [0, 1, 0.5, 0], [0, 0, 1, 0.9], [0, 0, 0, 0.1]], dtype=torch.float64
    )
    y = torch.randn(sum(SIZES), 2, dtype=torch.float64, generator=generator)
    return x, y, list(zip(x.split(SIZES), y.split(SIZES)))


def test_one_round_of_linear_models_is_the_pooled_posterior():
    x, y, parts = linear_clients()
    sites = [LINEAR.site(ridge(*part, len(part[0]) / len(x))[0], [part]) for part in parts]
    pooled, precision = ridge(x, y, 1.0)
    posterior = LINEAR.fuse(sites)
    assert torch.allclose(posterior.mean["weight"], pooled.weight.data, atol=1e-9)
    assert torch.allclose(posterior.mean["bias"], pooled.bias.data, atol=1e-9)
    found = posterior.diagonal()
    assert torch.allclose(1 / found.variance["weight"], precision.diagonal()[:-1].expand(2, -1))
    assert torch.allclose(1 / found.variance["bias"], precision.diagonal()[-1:].expand(2))


def test_draws_have_the_pooled_covariance():
    x, y, parts = linear_clients()
    posterior = LINEAR.fuse([LINEAR.site(ridge(*part, len(part[0]) / len(x))[0], [part]) for part in parts])
    drawn = posterior.sample(4000, torch.Generator().manual_seed(0))
    rows = torch.cat([drawn["weight"], drawn["bias"][..., None]], 2)
    wanted = torch.linalg.inv(ridge(x, y, 1.0)[1])
    root = torch.linalg.inv(torch.linalg.cholesky(wanted))
    for output in range(2):
        white = (rows[:, output] - rows[:, output].mean(0)) @ root.T
        assert (white.T @ white / len(white) - torch.eye(5)).abs().max() < 0.1  # 4 standard errors


def test_a_convolution_over_the_whole_image_is_a_linear_layer():
    x, y = torch.randn(30, 2, 3, 3), torch.randint(0, 4, (30,))
    for conv, inputs in ((nn.Conv2d(2, 4, 3), x), (nn.Conv1d(2, 4, 9), x.flatten(2))):
        linear = nn.Linear(18, 4)
        linear.weight.data, linear.bias.data = conv.weight.data.flatten(1), conv.bias.data
        one = fb.KroneckerLaplace().site(nn.Sequential(conv, nn.Flatten()), [(inputs, y)])
        other = fb.KroneckerLaplace().site(linear, [(x.flatten(1), y)])
        assert torch.allclose(one.inputs["0"], other.inputs[""], atol=1e-6)
        assert torch.allclose(one.outputs["0"], other.outputs[""], atol=1e-6)


def test_positions_of_a_convolution_are_summed_in_its_inputs_and_averaged_in_its_gradients():
    x, y = torch.randn(5, 2, 4, 4), torch.randint(0, 3, (5,))
    conv = nn.Conv2d(2, 3, 2, stride=2, padding=1)
    site = fb.KroneckerLaplace(fb.Laplace(curvature="empirical")).site(
        nn.Sequential(conv, nn.Tanh(), nn.AvgPool2d(3), nn.Flatten()), [(x[:2], y[:2]), (x[2:], y[2:])]
    )
    inner, outer = torch.zeros(9, 9), torch.zeros(3, 3)
    for one, label in zip(x, y):
        before = conv(one[None])[0].detach().requires_grad_()
        before.tanh().mean((1, 2)).log_softmax(-1)[label].backward()
        padded = F.pad(one, (1, 1, 1, 1))
        for i in range(3):
            for j in range(3):
                patch = F.pad(padded[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].flatten(), (0, 1), value=1.0)
                inner += torch.outer(patch, patch) / 5
                outer += torch.outer(before.grad[:, i, j], before.grad[:, i, j]) / 9
    assert torch.allclose(site.inputs["0"], inner, atol=1e-6)
    assert torch.allclose(site.outputs["0"], outer, atol=1e-6)


@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
def test_factors_are_those_of_their_definition(curvature):
    x, y = torch.randn(12, 3), torch.randint(0, 4, (12,))
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    site = fb.KroneckerLaplace(fb.Laplace(curvature=curvature, temperature=0.5)).site(network, [(x, y)])
    inner, outer = torch.zeros(4, 4), torch.zeros(5, 5)
    for one, label in zip(x, y):
        before = network[0](one).detach().requires_grad_()
        logs = network[2](before.tanh()).log_softmax(-1)
        inner += torch.outer(F.pad(one, (0, 1), value=1.0), F.pad(one, (0, 1), value=1.0)) / 12
        for target in range(4) if curvature == "ggn" else [int(label)]:
            gradient = torch.autograd.grad(logs[target], before, retain_graph=True)[0]
            outer += torch.outer(gradient, gradient) * (logs[target].exp().detach() if curvature == "ggn" else 1) / 0.5
    assert torch.allclose(site.inputs["0"], inner, atol=1e-6)
    assert torch.allclose(site.outputs["0"], outer, atol=1e-6)


def test_damping_draws_the_solution_to_the_average_by_the_mean_of_the_diagonal():
    networks = [nn.Linear(3, 2, bias=False) for _ in SIZES]
    data = [[(torch.randn(n, 3), torch.randint(0, 2, (n,)))] for n in SIZES]
    sites = [fb.KroneckerLaplace().site(*each) for each in zip(networks, data)]
    precisions = [torch.kron(each.outputs[""].double(), each.inputs[""].double()) for each in sites]
    means = [each.mean["weight"].double().flatten() for each in sites]
    centre = sum(n * mean for n, mean in zip(SIZES, means)) / sum(SIZES)
    total = sum(precisions)
    for damping in (0.0, 0.3, 1e9):
        found = fb.KroneckerLaplace(fb.Laplace(prior_std=2.0), damping).fuse(sites)
        prior = 0.25 + damping * total.diagonal().mean()
        pushed = sum(precision @ (mean - centre) for precision, mean in zip(precisions, means))
        wanted = centre + torch.linalg.solve(total + prior * torch.eye(6), pushed)
        assert torch.allclose(found.mean["weight"].double().flatten(), wanted, atol=1e-6)
        variances = found.diagonal().variance["weight"].double().flatten()
        assert torch.allclose(1 / variances, total.diagonal() + prior, rtol=1e-5)


def test_a_single_client_keeps_its_weights():
    body = nn.Sequential(nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    network = nn.Sequential(*body, nn.Linear(27, 2, bias=False))
    site = fb.KroneckerLaplace().site(network, [(torch.randn(8, 1, 5, 5), torch.randint(0, 2, (8,)))])
    posterior = fb.KroneckerLaplace().fuse([site])
    found = {**posterior.mean, **posterior.buffers}
    for name, value in network.state_dict().items():
        if value.is_floating_point():
            assert torch.allclose(found[name], value, atol=1e-6)
    assert not network.load_state_dict(found, strict=False).unexpected_keys
    assert fb.PosteriorPredictive(network, posterior.diagonal()).sample(torch.randn(3, 1, 5, 5), 10).shape == (10, 3, 2)
    assert not posterior.diagonal().variance["1.weight"].any()
    assert posterior.diagonal().variance["0.weight"].min() > 0


def test_the_solution_solves_a_badly_conditioned_system():

    def factor(size):
        rows = torch.randn(2 * size, size, dtype=torch.float64)
        return rows.T @ torch.diag(10.0 ** -torch.arange(2 * size, dtype=torch.float64)) @ rows

    terms = [(factor(6), 1e3 * factor(4)) for _ in range(3)]
    wanted = torch.randn(4, 6, dtype=torch.float64)
    target = sum(b @ wanted @ a for a, b in terms) + 1e-3 * wanted
    system = KroneckerSystem(terms, 1e-3)
    assert torch.allclose(system.solve(target), wanted, atol=1e-4)
    assert torch.allclose(system.product(wanted), target)
    factors = torch.tensor([0, 1, 1e6]).reshape(3, 1, 1)  # each to its own accuracy
    found = system.solve(factors * target) / factors.clamp_min(1)
    assert torch.allclose(found, torch.stack([0 * wanted, wanted, wanted]), atol=1e-4)


def drawn_terms(count):
    """Pairs of factors, (5, 5) and (3, 3)."""
    generator = torch.Generator().manual_seed(0)
    roots = [[torch.randn(n, n, generator=generator, dtype=torch.float64) for n in (5, 3)] for _ in range(count)]
    return [tuple(root @ root.T for root in pair) for pair in roots]


def test_a_small_system_is_solved_as_one_matrix(monkeypatch):
    terms = drawn_terms(3)
    target, rows = torch.randn(3, 5, dtype=torch.float64), torch.randn(2, 4, 3, 5, dtype=torch.float64)
    small = KroneckerSystem(terms, 0.1)
    direct = small.solve(target), small.covariance(rows), small.eigenvalues()
    monkeypatch.setattr("lightning_fedbayes.modules.sources.curvature.systems.DENSE", 0)
    large = KroneckerSystem(terms, 0.1)
    torch.testing.assert_close(direct[0], large.solve(target), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(direct[1], large.covariance(rows), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(small.product(direct[0]), target)
    whole = sum(torch.kron(b, a) for a, b in terms)
    torch.testing.assert_close(direct[2], torch.linalg.eigvalsh(whole))
    values, coordinates = small.coordinates(target)
    torch.testing.assert_close((values * coordinates.square()).sum(), target.flatten() @ whole @ target.flatten())
    one = KroneckerSystem(terms[:1], 0.1)
    values, coordinates = one.coordinates(target)
    torch.testing.assert_close((coordinates.square() / (values + 0.1)).sum(), (target * one.solve(target)).sum())


@pytest.mark.parametrize(("count", "dense"), [(1, 1024), (3, 1024), (3, 0)])
def test_the_covariance_of_a_linear_layer(monkeypatch, count, dense):
    monkeypatch.setattr("lightning_fedbayes.modules.sources.curvature.systems.DENSE", dense)
    terms, generator = drawn_terms(count), torch.Generator().manual_seed(1)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    whole = torch.linalg.inv(sum(torch.kron(b, a) for a, b in terms) + 0.1 * torch.eye(15).double())
    jacobian = torch.stack([torch.kron(torch.eye(3).double(), each) for each in x])
    other = KroneckerSystem(terms, 3.0)
    assert other.eigenvalues().shape == (15,)
    other.solve(torch.ones(3, 5).double())
    for system in (KroneckerSystem(terms, 0.1), other.with_prior(0.1)):
        torch.testing.assert_close(system.solve(system.product(x[:3])), x[:3], atol=1e-6, rtol=1e-5)
    found = other.with_prior(0.1).covariance_of_linear(x)
    torch.testing.assert_close(found, jacobian @ whole @ jacobian.mT, atol=1e-6, rtol=1e-5)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(self.layer(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.other(self.one(x))


DATA = [(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))]


@pytest.mark.parametrize(
    ("network", "patterns", "data", "expected"),
    [
        (Twice(), ("*",), DATA, "runs several times in a pass"),
        (Tied(), ("*",), DATA, "is the weight of another layer, too"),
        (nn.Linear(3, 3), ("head*",), DATA, "matches no weight of a linear layer"),
        (nn.Linear(3, 3), ("*",), [], "without an example"),
        (nn.Linear(3, 3), ("*",), [torch.randn(4, 3)], "a batch is a Tensor, and not inputs with a tensor of targets"),
        (nn.Sequential(nn.Conv1d(2, 2, 1, groups=2), nn.Flatten()), ("*",), DATA, "has groups"),
    ],
)
def test_what_has_no_factors_is_refused(network, patterns, data, expected):
    with pytest.raises(FederationError) as error:
        fb.KroneckerLaplace(fb.Laplace(parameters=patterns)).site(network, data)
    assert expected in str(error.value)


def test_sites_that_do_not_go_together_are_refused():
    one_shot = fb.KroneckerLaplace()
    small, large = (one_shot.site(nn.Linear(3, n), DATA) for n in (3, 4))
    with pytest.raises(FederationError, match=r"sites\[1\].mean: .* and that of sites\[0\]"):
        one_shot.fuse([small, large])
    broken = one_shot.site(nn.Linear(3, 3), DATA)
    broken.inputs[""][0, 0] = float("nan")
    with pytest.raises(FederationError, match=r"sites\[1\].inputs\[''\] is not finite"):
        one_shot.fuse([small, broken])
    with pytest.raises(FederationError, match="no site"):
        one_shot.fuse([])


@pytest.mark.parametrize("same", [True, False])
def test_weights_of_clients_in_different_units_are_not_fused(same):
    one_shot, sites = fb.KroneckerLaplace(fb.Laplace(likelihood=fb.Gaussian(noise=0.5))), []
    for mean in (0.0, 0.0 if same else 5.0):
        scaler = fb.FederatedScaler(targets=(mean, 2.0))
        module = fb.HybridBayesianRegressor(nn.Sequential(nn.Linear(4, 1)), bayesian_last=0, scaler=scaler)
        sites.append(one_shot.site(module, [(torch.randn(8, 4), torch.randn(8))]))
    if same:
        one_shot.fuse(sites)
    else:
        with pytest.raises(FederationError, match=r"target_units'\] is not that of sites\[0\]"):
            one_shot.fuse(sites)
