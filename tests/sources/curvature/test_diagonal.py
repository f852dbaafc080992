"""The Laplace approximation: beside closed forms and laplace-torch, alone and in a federation."""

import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.methods import Averaging
from tests.federations import Made, Plain, blobs, federate, loader, network, trainer
from tests.refusals import refusals

ENGINES = ("sequential", "vectorized")
X, Y = torch.ones(3, 2), torch.arange(3)
SIZES = fb.SizesPartition([40, 25, 13, 12])


def flat(posterior):
    return torch.cat([value.flatten() for value in posterior.variance.values()])


def cases():
    torch.manual_seed(0)
    linear, conv = nn.Linear(5, 3), nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    return {"linear": (linear, torch.randn(40, 5)), "convolution": (conv, torch.randn(40, 1, 6, 6))}


@pytest.mark.parametrize("name", ["linear", "convolution"])
@pytest.mark.parametrize(
    ("task", "curvature", "noise_std"),
    [("classification", "ggn", 1.0), ("classification", "empirical", 1.0), ("regression", "ggn", 0.7)],
)
def test_is_the_diagonal_posterior_of_laplace_torch(name, task, curvature, noise_std):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("laplace")
        from laplace import DiagLaplace
        from laplace.curvature import AsdlEF, AsdlGGN

        module, x = cases()[name]
        y = torch.randint(0, 3, (40,)) if task == "classification" else torch.randn(40, 3)
        data = DataLoader(TensorDataset(x, y), batch_size=16)
        options = {"sigma_noise": noise_std, "prior_precision": 0.8**-2}
        peer = DiagLaplace(module, task, backend=AsdlGGN if curvature == "ggn" else AsdlEF, **options)
        peer.fit(data)
    known = "categorical" if task == "classification" else fb.Gaussian(noise_std)
    ours = fb.Laplace(known, curvature, prior_std=0.8).posterior(module, data)
    assert torch.allclose(flat(ours), 1 / peer.posterior_precision.detach(), rtol=1e-5)


def test_the_empirical_information_of_a_regression_is_its_squared_gradient():
    """laplace-torch's is not: it takes gradients of the sum of squares, and divides by the noise once."""
    x, y = torch.randn(30, 4), torch.randn(30, 1)
    module = nn.Linear(4, 1)
    found = fb.Laplace(fb.Gaussian(0.5), "empirical").posterior(module, [[x, y]])
    errors = (y - module(x)).detach()
    assert torch.allclose(1 / found.variance["bias"], (errors / 0.25).square().sum().reshape(1) + 1, rtol=1e-4)
    assert torch.allclose(1 / found.variance["weight"][0], (errors * x / 0.25).square().sum(0) + 1, rtol=1e-4)


def test_a_linear_model_s_precision_is_that_of_its_design():
    x = torch.randn(30, 4)
    module = nn.Linear(4, 1)
    data = DataLoader(TensorDataset(x, torch.randn(30, 1)), batch_size=7)
    found = fb.Laplace(fb.Gaussian(0.5), prior_std=2.0).posterior(module, data)
    assert torch.allclose(1 / found.variance["weight"][0], x.square().sum(0) / 0.25 + 0.25, rtol=1e-5)
    assert torch.allclose(1 / found.variance["bias"], torch.tensor([30 / 0.25 + 0.25]), rtol=1e-5)
    warm = fb.Laplace(fb.Gaussian(0.5), prior_std=2.0, temperature=10.0).posterior(module, [[x, torch.randn(30, 1)]])
    assert torch.allclose(1 / warm.variance["bias"], torch.tensor([3 / 0.25 + 0.25]), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, of a second derivative
def test_softmax_information_is_the_hessian_of_a_linear_classifier():
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.randint(0, 4, (20,))
    module = nn.Linear(3, 4, bias=False).double()

    def loss(weight):
        return F.cross_entropy(x @ weight.view(4, 3).T, y, reduction="sum")

    hessian = torch.func.hessian(loss)(module.weight.detach().flatten()).diagonal()
    found = fb.Laplace().posterior(module, [[x, y]])
    assert torch.allclose(1 / flat(found), hessian + 1, rtol=1e-8)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        y = self.layer(x)
        return y if float(y.sum()) > -1e9 else -y


def test_a_network_that_does_not_vectorize_gives_the_same():
    x, y = torch.randn(9, 5), torch.randint(0, 3, (9,))
    module = Branches()
    for curvature in ("ggn", "empirical"):
        one, other = (fb.Laplace(curvature=curvature).posterior(m, [[x, y]]) for m in (module, module.layer))
        assert torch.allclose(flat(one), flat(other), rtol=1e-5)


def test_chosen_parameters_get_a_posterior_and_the_module_stays_as_it_is():
    module = network(batch_norm=True).train()
    x, y = blobs(30).tensors
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = fb.Laplace(parameters=["3.*"]).posterior(module, [[x, y]])
    assert [name for name in found.names if found.variance[name].any()] == ["3.weight", "3.bias"]
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def heavy():
    return Plain(optimizer=partial(torch.optim.SGD, momentum=0.9))


def run(engine, rounds=3, module=None, options=None, source=None, **settings):
    source = fb.Laplace() if source is None else source
    partition = settings.pop("partition", SIZES)
    federation = fb.FederatedBayes(partition, engine=engine, seed=1, posterior=source, **settings)
    made = federate(Plain() if module is None else module, federation, rounds, loader(), **(options or {}))
    return federation, made


@pytest.mark.parametrize("prior_std", [0.5, None])
def test_sites_of_one_network_add_up_to_the_posterior_of_the_pooled_data(prior_std):
    """Exactly so, whichever client has which examples, as information is a sum over them."""
    module, laplace = network(), fb.Laplace(prior_std=prior_std, temperature=0.5)
    x, y = blobs(60).tensors
    pooled = laplace.posterior(module, [(x, y)])
    for partition in (fb.DirichletPartition(clients=4, alpha=0.1), fb.IIDPartition(clients=7)):
        parts = partition.split(y, seed=0).indices
        found = laplace.fuse(module, [laplace.site(module, [(x[rows], y[rows])]) for rows in parts])
        assert torch.allclose(flat(found), flat(pooled), rtol=1e-5)
        assert all(torch.equal(found.mean[name], p) for name, p in module.named_parameters())
        assert found.linearised


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("fusion", ["sites", "reverse_kl_barycenter"])
def test_sites_take_the_information_at_the_model_received_and_averages_at_their_own(engine, batch_norm, fusion):
    """Of one client in round 3: half of what a site changes to is that at the model after two of them."""

    def after(rounds):
        made = Plain(network(batch_norm=batch_norm), lr=0.01)
        found, trained = run(engine, rounds, partition=fb.IIDPartition(1), module=made, fusion=fusion)
        return found, flat(fb.Laplace().posterior(trained.lightning_module, loader(shuffle=False)))

    (two, at_two), (three, at_three) = (after(rounds) for rounds in (2, 3))
    found, own, other = flat(three.posterior), at_three, at_two
    if fusion == "sites":
        kept = [1 / flat(each.posterior) - 1 for each in (two, three)]  # the prior is N(0, 1)
        found, own, other = 1 / (2 * kept[1] - kept[0] + 1), at_two, at_three
    assert torch.allclose(found, own, rtol=1e-3)
    assert not torch.allclose(found, other, rtol=1e-2)


def by_adam():
    module = heavy()
    module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), 1e-2)
    return module


PATH = {"source": fb.SWAG(), "local_epochs": 3}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fusion": "sites", "local_epochs": 2},
        {"fusion": Averaging(prior="global")},
        {"stack": 3},
        {"fusion": "sites", "local_parameters": ["*bias"]},
        {"fusion": "coordinate_median", "keep": ["optimizer"]},
        PATH,
        {**PATH, "stack": 3},
        {**PATH, "keep": ["optimizer"], "fusion": Averaging(prior="global")},
    ],
)
def test_both_engines_give_the_same_posterior(settings):
    settings = {"partition": fb.SizesPartition([40, 26, 14, 10]), **settings}
    engines = "sequential", settings.pop("stack", "vectorized")
    for make in (heavy, by_adam if "source" in settings else lambda: Plain(network(batch_norm=True))):
        one, other = (run(engine, module=make(), **settings)[0].posterior for engine in engines)
        torch.testing.assert_close(dict(one.mean), dict(other.mean), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dict(one.variance), dict(other.variance), rtol=1e-3, atol=1e-8)
        assert all(bool(value.all()) for value in one.variance.values())


class Line(Plain):
    """Linear regression, trained to its optimum by full batches."""

    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - batch[1]).square().mean() / 2


def lines(orthogonal):
    """Clients with unlike inputs; orthogonal: every example has one feature that is not 0."""
    random = torch.Generator().manual_seed(0)
    parts = {}
    for k, size in enumerate((12, 24, 60)):
        x = torch.randn(size, 3, generator=random) + (0.5 * k if not orthogonal else 0.0)
        if orthogonal:
            x = x * F.one_hot(torch.arange(size) % 3, 3)
        parts[f"c{k}"] = TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [0.5]]) + k)
    return parts


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "orthogonal"), [("sequential", True), ("vectorized", True), ("sequential", False)])
def test_sites_add_up_to_the_posterior_of_the_pooled_data(engine, orthogonal):
    parts = lines(orthogonal)
    source = fb.Laplace(fb.Gaussian(1.0))
    federation = fb.FederatedBayes(fusion="sites", local_epochs=30, engine=engine, posterior=source)
    module = Line(nn.Linear(3, 1, bias=False), 0.3 if orthogonal else 0.2)
    nn.init.zeros_(module.net.weight)
    trainer(40, [federation]).fit(module, DataLoader(fb.ClientDatasets(parts), batch_size=100))
    x, y = (torch.cat([part.tensors[i] for part in parts.values()]) for i in range(2))
    precision = x.T @ x + torch.eye(3)
    found = federation.posterior
    assert torch.allclose(1 / found.variance["net.weight"][0], precision.diagonal(), rtol=1e-4)
    exact = torch.linalg.solve(precision, x.T @ y)[:, 0]
    assert torch.allclose(found.mean["net.weight"][0], exact, atol=1e-3)


def test_swag_is_the_mean_and_the_variance_of_the_path():
    seen = []

    def note(_, module, *batch):
        seen.append(torch.cat([p.detach().flatten() for p in module.parameters()]))

    path = LambdaCallback(on_train_batch_end=note)
    settings = {"partition": fb.IIDPartition(1), "source": fb.SWAG(start=0.25, scale=2.0, min_std=0.01)}
    federation, _ = run("sequential", 1, local_epochs=4, options={"callbacks": [path]}, **settings)
    assert len(seen) == 48
    late = torch.stack(seen[12:])
    mean = torch.cat([value.flatten() for value in federation.posterior.mean.values()])
    assert torch.allclose(mean, late.mean(0), atol=1e-5)
    assert torch.allclose(flat(federation.posterior), 2 * late.var(0, correction=0) + 1e-4, rtol=1e-3, atol=1e-8)


REFUSED = (
    (lambda: Plain(optimizer=partial(torch.optim.SGD, weight_decay=0.1)), {}, "SGD has weight_decay=0.1"),
    (lambda: Plain(optimizer=fb.IVON), {}, "IVON has a posterior of its own"),
    (Plain, {"source": fb.Laplace(parameters=["head.*"])}, "'head.*' matches no parameter"),
    (Plain, {"source": fb.Laplace(fb.Gaussian(1.0))}, "one output per target"),
    (Plain, {"source": fb.Laplace(prior_std=0.5), "fusion": "sites"}, "fb.Sites"),
    (Plain, {"source": fb.Laplace(prior_std=None)}, "FederatedBayes needs the prior from the start"),
    (Plain, {"source": "laplace"}, "posterior='laplace': give .*PosteriorSource"),
    (Plain, {"source": fb.SWAG(), "fusion": "sites"}, "has no prior"),
    (lambda: Plain(optimizer=fb.IVON), {"source": fb.SWAG()}, "not IVON"),
)
test_what_cannot_be_is_refused_with_the_remedy = refusals(
    fb.FedBayesError,
    *((engine, *row) for engine in ENGINES for row in REFUSED),
    call=lambda engine, module, settings: run(engine, module=module(), **settings),
)


def test_data_that_cannot_be_read_again_fail_their_client_alone(caplog):
    """Laplace reads a client's data once more after its training."""
    torn, module = [], Plain()

    def example(index):
        if torn:
            raise OSError("torn")
        return blobs()[index]

    module.on_train_batch_end = lambda outputs, batch, batch_idx: torn.append(batch_idx)
    clients = fb.ClientDatasets({"north": Made(example, count=16), "south": blobs()})
    federation = fb.FederatedBayes(engine="sequential", posterior=fb.Laplace())
    federate(module, federation, 1, loader(clients, batch_size=16))
    assert "client north is left out: OSError: torn" in caplog.text


test_a_mistake_is_named = refusals(
    FederationError,
    (lambda: fb.Laplace("ranking"), "likelihood='ranking'"),
    (lambda: fb.Laplace(prior_std=0.0), "prior_std=0.0"),
    (lambda: fb.Laplace().posterior(nn.Linear(2, 2), [[torch.zeros(1, 2), torch.zeros(1)]]), "noise is not known"),
    (lambda: fb.Laplace().posterior("network", []), "module"),
    (lambda: fb.Laplace().posterior(nn.Linear(2, 3), [({"x": X}, Y)]), "Linear cannot be measured: "),
    (lambda: fb.Laplace().posterior(nn.Linear(2, 3), [(X, Y[:2])]), "give as many of both"),
    (lambda: fb.Laplace().posterior(nn.Linear(2, 3), [(X[:0], Y[:0])]), "at least one"),
    (lambda: fb.Laplace("categorical", "empirical").posterior(nn.Linear(2, 3), [(X, Y + 2)]), "from 2 to 4"),
    (lambda: fb.Laplace().posterior(nn.Linear(2, 3), [(X * torch.nan, Y)]), "is not finite at 6 of 6 entries"),
    (lambda: fb.KroneckerLaplace(fb.Laplace(prior_std=None)), "KroneckerLaplace needs the prior"),
    (lambda: fb.Laplace().fuse(nn.Linear(2, 2), []), "no site"),
    (lambda: fb.Laplace().fuse(nn.Linear(2, 2), [{"weight": torch.ones(2, 2)}]), "'bias' is missing"),
    (lambda: fb.Laplace().fuse(nn.Linear(2, 1, bias=False), [{"weight": -torch.ones(1, 2)}]), "negative"),
    (lambda: fb.SWAG(start=1.0), "start=1.0"),
)
