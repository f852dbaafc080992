"""Sites in training: fixed points of real networks, the engines, and what is refused."""

from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from bayesian_torch.layers import LinearReparameterization as PeerLinear
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError, FusionError
from lightning_fedbayes.layers import LinearReparameterization, kl_divergence
from lightning_fedbayes.methods import Averaging, FedProx
from lightning_fedbayes.methods.method import split
from tests import federations
from tests.federations import Plain, assert_close, bayesian, federate, loader, network, parameters, saving

NOISE, EXAMPLES, FEATURES = 0.5, 60, 3


def data(seed: int = 1, binary: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(EXAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    y = y + NOISE * torch.randn(EXAMPLES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (y > 0).double() if binary else y)


class Exact(L.LightningModule):
    """One Bayesian layer whose expected loss is in closed form, so that training draws nothing."""

    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = LinearReparameterization(FEATURES, 1, bias=False).double()
        self.optimizer, self.count = optimizer, EXAMPLES

    def on_client_start(self, client) -> None:
        self.count = client.num_examples

    def expected_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean over the examples of the expectation of (y − wx)² / 2s²."""
        gaussian = next(self.layer.gaussian_parameters())
        errors = (y - (x @ gaussian.mean.T)[:, 0]) ** 2 + (x**2 @ gaussian.variance.T)[:, 0]
        return errors.mean() / 2 / NOISE**2

    def training_step(self, batch, batch_idx) -> Tensor:
        return self.expected_loss(*batch) + kl_divergence(self) / self.count

    def configure_optimizers(self):
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.05)
        ends = {"tolerance_grad": 1e-11, "tolerance_change": 1e-14, "history_size": 20}
        return torch.optim.LBFGS(self.parameters(), max_iter=300, line_search_fn="strong_wolfe", **ends)


class Logistic(Exact):
    """The expectation by quadrature: the logit of an example is Gaussian."""

    def expected_loss(self, x: Tensor, y: Tensor) -> Tensor:
        nodes, weights = (torch.as_tensor(each) for each in np.polynomial.hermite_e.hermegauss(20))
        gaussian = next(self.layer.gaussian_parameters())
        centre, spread = (x @ gaussian.mean.T)[:, 0], (x**2 @ gaussian.variance.T)[:, 0].sqrt()
        logits = centre + spread * nodes[:, None]
        losses = nn.functional.binary_cross_entropy_with_logits(logits, y.expand_as(logits), reduction="none")
        return (weights[:, None] * losses).sum(0).mean() / weights.sum()


class Mixed(Exact):
    """A bias that is deterministic beside weights that are not."""

    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__(optimizer)
        self.bias = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def expected_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().expected_loss(x, y - self.bias)


class Squares(Exact):
    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__(optimizer)
        self.layer = nn.Linear(FEATURES, 1, bias=False).double()
        nn.init.ones_(self.layer.weight)

    def training_step(self, batch, batch_idx) -> Tensor:
        x, y = batch
        return ((y - self.layer(x)[:, 0]) ** 2).mean() / 2


def unlike(sizes: tuple[int, ...]) -> fb.ClientDatasets:
    """Clients that differ: each has the next examples in the order of the first column."""
    x, y = data()[data().tensors[0][:, 0].argsort()]
    parts = zip(x.split(sizes), y.split(sizes))
    return fb.ClientDatasets({str(k): TensorDataset(*part) for k, part in enumerate(parts)})


def whole(examples: TensorDataset) -> DataLoader:
    return DataLoader(examples, batch_size=EXAMPLES)


def fit(module: L.LightningModule, rounds: int, examples=None, **options) -> fb.FederatedBayes:
    federation = fb.FederatedBayes(options.pop("partition", fb.SizesPartition((30, 20, 10))), **options)
    federate(module, federation, rounds, whole(examples or data()))
    return federation


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Exact, Logistic])
def test_the_pooled_elbo_is_stationary_in_the_means_at_a_fixed_point(kind):
    """At the global widths, whatever the partition."""
    examples, module = data(binary=kind is Logistic), kind("lbfgs")
    federation = fit(module, 60, examples, fusion="sites", engine="sequential", local_epochs=2)
    assert federation.history[-1]["sites/change"] < 1e-9
    module.count = EXAMPLES
    module.training_step(examples.tensors, 0).backward()
    for name, parameter in module.named_parameters():
        if not name.endswith(("rho_weight", "rho")):
            assert float(parameter.grad.abs().max()) < 1e-4, name


@pytest.mark.parametrize(("kind", "options"), [(Exact, {"fraction": 0.67}), (Mixed, {"local_epochs": 2, "stack": 2})])
def test_both_engines_give_one_posterior(kind, options):
    posteriors, options = [], {"local_epochs": 4, **options}
    for engine in ("sequential", options.pop("stack", "vectorized")):
        module = kind()
        federation = fit(module, 3, fusion="sites", engine=engine, **options)
        posteriors.append((fb.read_posterior(module), federation.history[-1]["sites/change"]))
    (first, change), (second, other) = posteriors
    assert_close(first, second, 1e-6, 1e-9)
    assert change == pytest.approx(other, rel=1e-6)


def test_a_network_without_sites_is_refused_before_training():
    module = Plain(nn.Linear(1, 1))
    module.peer = PeerLinear(6, 3)
    with pytest.raises(FederationError, match="takes proper priors alone"):
        fit(module, 1, engine="sequential", fusion="sites")


def test_a_failed_client_keeps_the_site_it_had():
    class Fails(Mixed):
        broken = False

        def on_client_start(self, client) -> None:
            super().on_client_start(client)
            self.broken = client.number == 1 and client.round == 1

        def training_step(self, batch, batch_idx) -> Tensor:
            if self.broken:
                raise RuntimeError("no")
            return super().training_step(batch, batch_idx)

    after = fit(Fails(), 2, fusion="sites", engine="sequential")
    once = fit(Fails(), 1, fusion="sites", engine="sequential").state_dict()
    sites = after.state_dict()["clients"]
    torch.testing.assert_close(sites[1]["kept"], once["clients"][1]["kept"], rtol=0, atol=0)
    totals = split(after.federation.server.buffers)[1]
    for name in fb.Sites.sent:
        found = sum(sites[client]["kept"][name] for client in range(3))
        torch.testing.assert_close(found, totals[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_training_that_leaves_the_finite_numbers_fails_that_client_alone(engine, caplog):
    class Runs(Exact):
        def expected_loss(self, x: Tensor, y: Tensor) -> Tensor:
            return super().expected_loss(x, y) * torch.where(y.abs().max() > 1e3, torch.inf, 1.0)

    x, y = data().tensors
    parts = {str(k): TensorDataset(x[k::3], y[k::3] + 1e4 * (k == 1)) for k in range(3)}
    federation = fb.FederatedBayes(fusion="sites", engine=engine)
    module = Runs()
    federate(module, federation, 2, whole(fb.ClientDatasets(parts)))
    assert [row["failed_clients"] for row in federation.history] == [1, 1]
    assert "client 1: training has left the finite numbers" in caplog.text
    assert not federation.state_dict()["clients"].get(1, {}).get("kept")
    assert fb.read_posterior(module).mean["layer.weight"].isfinite().all()


def test_a_site_of_another_network_is_refused():
    module, federation = Exact(), fb.FederatedBayes(fb.SizesPartition((30, 20, 10)), fusion="sites")
    trainer = federate(module, federation, 1, whole(data()))
    federation.federation.engine.states.of(1).kept["precision"] = torch.zeros(5)
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(FederationError, match=r"site of client 1 is of 5 parameters .* the network has 3"):
        trainer.fit(module, whole(data()))


@pytest.mark.parametrize(
    ("method", "warned"),
    [
        (Averaging("conflation", "global"), 1),
        (Averaging("weighted_sum", "global"), 1),
        ("conflation", 0),
        (Averaging("weighted_average", "global"), 0),
    ],
    ids=str,
)
def test_a_variance_that_shrinks_in_every_round_is_named_once(method, warned, caplog):
    caplog.set_level("INFO")
    fit(Exact(), 6, engine="sequential", fusion=method)
    assert caplog.text.count("fusion='sites' keeps its meaning") == warned


def test_a_client_is_removed_from_a_callback_and_from_a_checkpoint():
    federation = fit(Exact(), 3, fusion="sites", engine="sequential")
    state = federation.state_dict()
    others = 1 + sum(state["clients"][k]["kept"]["precision"] for k in (0, 2)) + state["buffers"]["method/start"]
    for source in (federation, {"callbacks": {"FederatedBayes": state, "ModelCheckpoint": {}}}):
        removed = fb.remove_client(source, 1)
        torch.testing.assert_close(1 / removed.variance["layer.weight"][0], others)
    for wrong, client in ((federation, 7), ({}, 0), (None, 0), (fb.FederatedBayes(), 0)):
        with pytest.raises(FederationError, match=r"has no part|has trained"):
            fb.remove_client(wrong, client)


@pytest.mark.parametrize("strength", [0.1, 3.0])
def test_a_client_ends_at_the_minimum_of_its_proximal_problem(strength):
    r"""Least squares: :math:`(X^\top X / n + \mu I)^{-1} (X^\top y / n + \mu \theta_g)`, and the server averages."""
    module, clients = Squares("lbfgs"), unlike((30, 20, 10))
    expected = torch.zeros(FEATURES, dtype=torch.float64)
    for part in clients.datasets:
        x, y = part.tensors
        hessian = x.T @ x / len(x) + strength * torch.eye(FEATURES).double()
        expected += len(x) / EXAMPLES * torch.linalg.solve(hessian, x.T @ y / len(x) + strength)
    fit(module, 1, clients, partition=None, fusion=FedProx(strength, "weighted_average"), engine="sequential")
    torch.testing.assert_close(module.layer.weight[0].detach(), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}], ids=str
)
def test_the_term_is_that_of_a_module_that_adds_it_itself(options):
    class Own(Squares):
        def on_client_start(self, client) -> None:
            super().on_client_start(client)
            self.start = self.layer.weight.detach().clone()

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 0.7 / 2 * (self.layer.weight - self.start).square().sum()

    ours, theirs, batches = Squares(), Own(), DataLoader(data(), batch_size=15)
    for module, strength in ((ours, 0.7), (theirs, 0.0)):
        partition = fb.SizesPartition((30, 30))
        method = FedProx(strength) if strength else "rklb"
        federation = fb.FederatedBayes(partition, fusion=method, local_epochs=3, engine="sequential")
        federate(module, federation, 2, batches, **options)
    torch.testing.assert_close(ours.layer.weight, theirs.layer.weight, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", [Plain, bayesian])
def test_a_strong_term_leaves_little_of_a_round_but_local_parameters_move(kind):
    moves = {}
    for strength in (0.0, 1e4):
        method = FedProx(strength) if strength else "rklb"
        module = kind(optimizer=partial(torch.optim.Adam, lr=0.05))
        before = parameters(module)
        name = next(iter(before))
        options = {"local_epochs": 20, "local_parameters": [name], "engine": "vectorized"}
        federation = fb.FederatedBayes(fb.IIDPartition(3), fusion=method, **options)
        federate(module, federation, 1, loader())
        kept = federation.state_dict()["clients"][0]["local"][name]
        after = parameters(module)
        moves[strength] = max(float((after[each] - before[each]).abs().max()) for each in before if each != name)
        assert float((kept - before[name]).abs().max()) > 0.02
    assert moves[1e4] < moves[0.0] / 3


@pytest.mark.parametrize("strength", [-0.1, 0.0, float("nan")])
def test_a_term_that_cannot_be_is_refused_at_once(strength):
    with pytest.raises(FusionError, match=f"strength={strength}: give a finite number above 0"):
        FedProx(strength)


SCHOOLS = (20, 12, 30, 8)
POPULATION = {"fusion": "population", "safeguards": fb.Safeguards(max_influence=None)}


def schools():
    """Clients whose coefficients are draws from a population."""
    random = torch.Generator().manual_seed(2)
    parts = {}
    for number, size in enumerate(SCHOOLS):
        x = torch.randn(size, FEATURES, generator=random, dtype=torch.float64)
        own = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        own = own + torch.tensor([0.1, 1.0, 0.5], dtype=torch.float64) * torch.randn(
            FEATURES, generator=random, dtype=torch.float64
        )
        noise = NOISE * torch.randn(size, generator=random, dtype=torch.float64)
        parts[f"c{number}"] = TensorDataset(x, x @ own + noise)
    return fb.ClientDatasets(parts)


def population(rounds, optimizer="lbfgs", **options):
    made = fb.FederatedBayes(**POPULATION, seed=1, **options)
    federate(Exact(optimizer), made, rounds, DataLoader(schools(), batch_size=EXAMPLES))
    return made


def em(rounds, prior_std=1.0):
    """The same by hand: the best factorised posteriors of each client, then the moments of all of them."""
    population_mean = torch.zeros(FEATURES, dtype=torch.float64)
    population_variance = torch.full((FEATURES,), prior_std**2, dtype=torch.float64)
    for _ in range(rounds):
        means, variances = [], []
        for part in schools().datasets:
            x, y = part.tensors
            gram, moment = x.T @ x / NOISE**2, x.T @ y / NOISE**2 + population_mean / population_variance
            means.append(torch.linalg.solve(gram + torch.diag(1 / population_variance), moment))
            variances.append(1 / (1 / population_variance + gram.diagonal()))
        mean, variance = torch.stack(means), torch.stack(variances)
        population_mean = mean.mean(0)
        population_variance = (variance + (mean - population_mean).square()).mean(0)
    return population_mean, population_variance, mean, variance


@pytest.mark.whole
@pytest.mark.parametrize("rounds", [1, 2, 15])
def test_rounds_are_the_steps_of_em(rounds):
    made = population(rounds)
    mean, variance, means, variances = em(rounds)
    close = {"rtol": 1e-4, "atol": 1e-6}
    found = [made.posterior, *(made.posterior_of(number) for number in range(len(SCHOOLS)))]
    for own, at, spread in zip(found, [mean, *means], [variance, *variances], strict=True):
        torch.testing.assert_close(own.mean["layer.weight"][0], at, **close)
        torch.testing.assert_close(own.variance["layer.weight"][0], spread, **close)


def test_engines_agree():
    one, stack = (population(4, "adam", engine=engine, local_epochs=5) for engine in ("sequential", "vectorized"))
    for number in range(len(SCHOOLS)):
        assert_close(one.posterior_of(number), stack.posterior_of(number), 1e-9, 1e-12)


class StopsMoving(Plain):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: float(epoch == 0))]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("make", "optimizer"),
    [(lambda: fb.bayesianize(network(), last=2), torch.optim.SGD), (network, fb.IVON)],
    ids=["layers", "IVON"],
)
def test_a_client_goes_on_where_it_was(engine, make, optimizer):
    def own(rounds):
        made = fb.FederatedBayes(fb.SizesPartition((40, 30, 20)), **POPULATION, engine=engine)
        federate(StopsMoving(make(), optimizer=optimizer), made, rounds, loader())
        return made, [made.posterior_of(number) for number in range(3)]

    (_, before), (made, after) = own(1), own(2)
    for first, second in zip(before, after, strict=True):
        federations.assert_equal(dict(first.mean), dict(second.mean))
        assert not any(torch.equal(first.mean[name], made.posterior.mean[name]) for name in first.names)


@pytest.mark.slow
@federations.quiet_checkpoints
@pytest.mark.parametrize(("before", "after"), [("population", "linear_pool"), ("linear_pool", "population")])
def test_a_run_that_goes_on_with_another_prior_does_so_on_both_engines(before, after, tmp_path):
    def run(method, rounds, engine, **options):
        given = {"fusion": method, "weighting": "equal", "safeguards": fb.Safeguards(max_influence=None)}
        made = fb.FederatedBayes(**given, seed=1, engine=engine, local_epochs=3)
        federate(Exact("adam"), made, rounds, DataLoader(schools(), batch_size=EXAMPLES), **options)
        return made

    for engine in ("sequential", "vectorized"):
        run(before, 2, engine, **saving(tmp_path / engine, save_last=True))
    ours, theirs = (
        run(after, 3, engine, ckpt_path=tmp_path / engine / "last.ckpt").posterior
        for engine in ("sequential", "vectorized")
    )
    assert_close(ours, theirs, 1e-9, 1e-12)


@pytest.mark.parametrize(
    ("options", "text"), [({"weighting": "distance"}, "count alike"), ({"posterior": fb.SWAG()}, "a SWAG has no prior")]
)
def test_other_rounds_than_those_of_em_are_refused(options, text):
    with pytest.raises(FederationError, match=text):
        fb.FederatedBayes(fusion="population", **options)
