"""Sites in training: one client, fixed points, the pooled posterior, the engines, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import lightning as L
import numpy as np
import pytest
import torch
from bayesian_torch.layers import LinearReparameterization as PeerLinear
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.fusion import Sites
from lightning_fedbayes.fusion.sites import MEMORY
from lightning_fedbayes.layers import LinearReparameterization, kl_divergence, mean_only
from lightning_fedbayes.layers.priors import CavityPrior, NormalPrior, RenyiCavityPrior
from lightning_fedbayes.modules import mlp
from tests.federations import Plain, federate

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
        return torch.optim.LBFGS(self.parameters(), max_iter=300, tolerance_grad=1e-11, tolerance_change=1e-14,
                                 history_size=20, line_search_fn="strong_wolfe")


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
    """Least squares without any Gaussian parameter."""

    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__(optimizer)
        self.layer = nn.Linear(FEATURES, 1, bias=False).double()
        nn.init.ones_(self.layer.weight)

    def training_step(self, batch, batch_idx) -> Tensor:
        x, y = batch
        return ((y - self.layer(x)[:, 0]) ** 2).mean() / 2


def unlike(sizes: tuple[int, ...]) -> tuple[fb.ClientDatasets, TensorDataset]:
    """Clients that differ: each has the next examples in the order of the first column. And all data in this order."""
    x, y = data()[data().tensors[0][:, 0].argsort()]
    parts = zip(x.split(sizes), y.split(sizes))
    return fb.ClientDatasets({str(k): TensorDataset(*part) for k, part in enumerate(parts)}), TensorDataset(x, y)


def whole(examples: TensorDataset) -> DataLoader:
    return DataLoader(examples, batch_size=EXAMPLES)


def fit(module: L.LightningModule, rounds: int, examples=None, **options) -> fb.FederatedBayes:
    federation = fb.FederatedBayes(options.pop("partition", fb.SizesPartition((30, 20, 10))), **options)
    federate(module, federation, rounds, whole(examples or data()))
    return federation


def test_one_client_is_plain_variational_training():
    """With ρ = α = 1 its cavity is the prior, in every round, and Adam goes on, as sites have it by default."""
    module, plain, examples = Exact(), Exact(), data()
    rule = Sites(1.0, 1.0, "pvi", precision="trained")
    fit(module, 3, examples, partition=fb.SizesPartition((EXAMPLES,)), fusion=rule, local_epochs=7)
    trainer = L.Trainer(max_epochs=21, accelerator="cpu", logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(plain, whole(examples))
    ours, theirs = fb.read_posterior(module), fb.read_posterior(plain)
    torch.testing.assert_close(ours.mean["layer.weight"], theirs.mean["layer.weight"], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours.variance["layer.weight"], theirs.variance["layer.weight"], rtol=1e-6, atol=1e-8)


def test_a_conjugate_model_is_the_pooled_one_after_a_round():
    x, _ = data().tensors
    module = Exact("lbfgs")
    federation = fit(module, 2, fusion=Sites(1.0, 1.0, "pvi"), engine="sequential")
    orthogonal = 1 + (x**2).sum(0) / NOISE**2
    torch.testing.assert_close(1 / fb.read_posterior(module).variance["layer.weight"][0], orthogonal, rtol=1e-7, atol=0)
    assert federation.history[1]["sites/held_back"] == 0


@pytest.mark.parametrize(("kind", "rule", "rounds"), [
    (Logistic, Sites(), 36), (Logistic, Sites(1.0, 0.5, "pvi"), 28),
    (Logistic, Sites(1.0, 1.0, "admm"), 56), (Exact, Sites(1.0, 0.5, "pvi"), 17), (Mixed, Sites(pull=4.0), 27),
    (Mixed, Sites(1.0, 1.0, "admm", pull=4.0), 45),
])
def test_the_pooled_elbo_is_stationary_at_a_fixed_point(kind, rule, rounds):
    """And so the posterior is the mean-field posterior of the pooled data, which does not depend on the partition."""
    examples, module = data(binary=kind is Logistic), kind("lbfgs")
    federation = fit(module, rounds, examples, fusion=rule, engine="sequential")
    assert federation.history[-1]["sites/change"] < 1e-9
    module.count = EXAMPLES
    module.training_step(examples.tensors, 0).backward()
    for name, parameter in module.named_parameters():
        assert float(parameter.grad.abs().max()) < 1e-5, name


def distance_to(module: Squares, weights: Tensor, examples: TensorDataset) -> float:
    """From the minimiser of the sum of squares with these weights of the examples."""
    x, y = (each * weights.sqrt().view(-1, *[1] * (each.dim() - 1)) for each in examples.tensors)
    return float((module.layer.weight[0] - torch.linalg.lstsq(x, y).solution).abs().max().detach())


@pytest.mark.parametrize(("options", "rounds"), [
    ({}, 40), ({"fraction": 0.67}, 60), ({"fraction": 0.34}, 200), ({"weighting": "equal"}, 40),
    ({"sizes": (EXAMPLES,)}, 40),
], ids=str)
def test_a_pull_ends_at_the_minimiser_of_the_pooled_data(options, rounds):
    """Whose network has no Gaussian parameter: FedDyn, where averaging ends elsewhere unless there is one client."""
    sizes = options.get("sizes", (30, 20, 10))
    (clients, examples), weights = unlike(sizes), torch.ones(EXAMPLES).double()
    if "weighting" in options:  # every client counts the same
        weights = torch.cat([torch.full((size,), 1 / size) for size in sizes]).double()
    options = {"partition": None, "engine": "sequential", **options}
    options.pop("sizes", None)
    module, averaged = Squares("lbfgs"), Squares("lbfgs")
    fit(module, rounds, clients, fusion=Sites(pull=1.0), **options)
    assert distance_to(module, weights, examples) < 1e-6
    fit(averaged, 5, clients, fusion="weighted_average", **options)
    assert (distance_to(averaged, weights, examples) > 1e-2) == (len(sizes) > 1)


@pytest.mark.parametrize("options", [
    {}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}, {"lbfgs": True}
], ids=str)
def test_the_pull_is_a_term_of_the_loss(options):
    """However Lightning takes its steps; in a first round, where v = 0, of one client: 2 times its result less θ_g."""

    class Pulled(Squares):
        def training_step(self, batch, batch_idx) -> Tensor:
            return super().training_step(batch, batch_idx) + 0.7 / 2 * (self.layer.weight - 1).square().sum()

    options = dict(options)
    kind = "lbfgs" if options.pop("lbfgs", False) else "adam"
    ours, theirs, batches = Squares(kind), Pulled(kind), DataLoader(data(), batch_size=15)
    federate(ours, fb.FederatedBayes(fb.SizesPartition((EXAMPLES,)), fusion=Sites(pull=0.7), local_epochs=3,
                                     engine="sequential"), 1, batches, **options)
    plain = fb.FederatedBayes(fb.SizesPartition((EXAMPLES,)), fusion="rklb", local_epochs=3, engine="sequential")
    federate(theirs, plain, 1, batches, **options)
    torch.testing.assert_close(ours.layer.weight, 2 * theirs.layer.weight - 1, rtol=1e-6, atol=1e-9)
    assert "training_step" not in vars(ours)


def test_a_parameter_that_is_frozen_after_rounds_with_a_pull_is_refused():
    """Its global value would move with the duals for ever."""

    class Freezes(Mixed):
        def on_train_epoch_start(self) -> None:
            self.bias.requires_grad_(self.current_epoch != 1)

    with pytest.raises(FederationError, match="'bias' has been trained with pull=1"):
        fit(Freezes(), 2, fusion=Sites(pull=1.0), engine="sequential")


@pytest.mark.parametrize("options", [{}, {"fraction": 0.67}, {"local_epochs": 2}, {"stack": 2}], ids=str)
@pytest.mark.parametrize(("kind", "rule"), [
    (Exact, Sites()), (Exact, Sites(0.5, 1.0, "admm")), (Exact, Sites(1.0, 0.3, "pvi")), (Mixed, Sites(pull=0.5)),
    (Squares, Sites(pull=0.5)), (Exact, Sites(renyi=0.5)), (Exact, Sites(0.5, 1.0, "admm", renyi=0.5)),
], ids=["share", "admm", "pvi", "mixed", "squares", "renyi", "renyi_admm"])
def test_both_engines_give_one_posterior(kind, rule, options):
    posteriors, options = [], {"local_epochs": 4, **options}
    for engine in ("sequential", options.pop("stack", "vectorized")):
        module = kind()
        federation = fit(module, 3, fusion=rule, engine=engine, **options)
        posteriors.append((fb.read_posterior(module), federation.history[-1].get("sites/change", 0.0)))
    (first, change), (second, other) = posteriors
    torch.testing.assert_close(first.mean, second.mean, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(first.variance, second.variance, rtol=1e-6, atol=1e-9)
    assert change == pytest.approx(other, rel=1e-6)


class Two(Exact):
    """Two small layers and a large one: joint draws, and a cavity on its own."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.other = LinearReparameterization(FEATURES, 2).double()
        self.large = LinearReparameterization(130, 130, bias=False).double()
        self.draws = draws
        for name, parameter in self.named_parameters() if draws else ():
            if "rho" in name:
                parameter.data.fill_(-30.0)

    def training_step(self, batch, batch_idx) -> Tensor:
        x, y = batch
        with nullcontext() if self.draws else fb.layers.mean_only(self):
            outputs = self.layer(x)[:, 0] + self.other(x).sum(1) + self.large(x[:, :1].expand(-1, 130)).mean(1)
        return ((outputs - y) ** 2).mean() + kl_divergence(self) / self.count


@pytest.mark.parametrize("renyi", [None, 0.5])
@pytest.mark.parametrize("draws", [False, True])
def test_the_joint_form_of_a_stack_is_that_of_single_clients(draws, renyi):
    """Of the draws, and of the divergence; σ of 1e-13 makes a draw its mean. Adam's first step is a sign."""
    results = []
    for engine in ("sequential", "vectorized"):
        module = Two(draws)
        rule = Sites(0.7, 1.0, "admm", renyi=renyi, precision="trained" if draws else "auto")
        fit(module, 3, fusion=rule, engine=engine, local_epochs=4)
        results.append(fb.read_posterior(module))
    torch.testing.assert_close(results[0].mean, results[1].mean, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(results[0].variance, results[1].variance, rtol=1e-5, atol=1e-12)


def test_the_cavity_prior_is_the_divergence_from_the_cavity():
    """Where the cavity is proper: ρ KL(q ‖ cavity), less its value at the global posterior."""
    generator = torch.Generator().manual_seed(0)
    mean, shift, spread = (torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(3))
    centre, std, rho = torch.ones(4).double(), torch.full((4,), 0.5).double(), 0.3
    precision, eta = torch.full((4,), 0.2).double(), shift
    cavity = CavityPrior(centre, std, rho / std**2 - precision, eta - precision * centre, torch.full_like(std, rho))
    natural = 1 / std**2 - precision / rho, centre / std**2 - eta / rho
    proper = NormalPrior(natural[1] / natural[0], natural[0].rsqrt())
    sigma = spread.exp()
    expected = rho * (proper.kl(mean, sigma) - proper.kl(centre, std))
    torch.testing.assert_close(cavity.kl(mean, sigma), expected)
    mean.requires_grad_()
    sigma.requires_grad_()
    gradients = torch.autograd.grad(cavity.kl(mean, sigma), (mean, sigma))
    for found, closed in zip(gradients, cavity.gradients(mean.detach(), sigma.detach()), strict=True):
        torch.testing.assert_close(found, closed)


def cavity_at(curvature: Tensor, order: float | None, slope: float = 0.7) -> CavityPrior:
    """A cavity of the global posterior N(1, 0.25) and the step 0.3."""
    own = torch.ones_like(curvature), torch.full_like(curvature, 0.5), curvature, torch.full_like(curvature, slope)
    step = torch.full_like(curvature, 0.3)
    return CavityPrior(*own, step) if order is None else RenyiCavityPrior(*own, step, order)


@pytest.mark.parametrize("order", [0.1, 0.5, 0.9])
def test_the_renyi_divergence_is_that_of_numerical_integration(order):
    """ρ / α(α − 1) log ∫ q^α cavity^(1 − α), less its value at the global posterior; and its gradient."""
    curvature, step, slope, points = 0.8, 0.3, 0.7, torch.linspace(-60, 60, 400_001, dtype=torch.float64)
    cavity = torch.distributions.Normal(torch.tensor(1 - slope / curvature, dtype=torch.float64),
                                        (step / curvature) ** 0.5)

    def integrated(mean: float, std: float) -> Tensor:
        q = torch.distributions.Normal(torch.tensor(mean, dtype=torch.float64), std)
        integrand = (order * q.log_prob(points) + (1 - order) * cavity.log_prob(points)).exp()
        return step / order / (order - 1) * torch.trapezoid(integrand, points).log()

    for mean, std in ((1.0, 0.5), (-1.3, 0.2), (3.0, 2.5), (0.1, 4.0)):
        q = torch.tensor([mean, std], dtype=torch.float64, requires_grad=True)
        prior = cavity_at(torch.tensor([curvature], dtype=torch.float64), order)
        value = prior.kl(q[:1], q[1:])
        torch.testing.assert_close(value, integrated(mean, std) - integrated(1.0, 0.5), rtol=1e-9, atol=1e-9)
        closed = torch.cat(prior.gradients(q[:1].detach(), q[1:].detach()))
        torch.testing.assert_close(torch.autograd.grad(value, q)[0], closed)


def test_the_limit_of_the_renyi_divergence_is_the_kl_and_improper_cavities_keep_it():
    """Their values and gradients are finite and those of the KL, at every order; nearly flat ones are no exception."""
    generator = torch.Generator().manual_seed(0)
    curvature = torch.tensor([2.0, 0.3, 1e-12, 1e-30, 0.0, -1e-12, -0.4, -3.0], dtype=torch.float64)
    mean, std = torch.randn(8, generator=generator).double(), torch.randn(8, generator=generator).double().exp()
    kl, limit, half = (cavity_at(curvature, order) for order in (None, 1 - 1e-8, 0.5))
    torch.testing.assert_close(limit.kl(mean, std), kl.kl(mean, std), rtol=1e-6, atol=1e-6)
    for here, there in zip(limit.gradients(mean, std), kl.gradients(mean, std), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-6)
    inputs = mean.clone().requires_grad_(), std.clone().requires_grad_()
    gradients, closed = torch.autograd.grad(half.kl(*inputs), inputs), half.gradients(mean, std)
    for found, expected, of_kl in zip(gradients, closed, kl.gradients(mean, std), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.isfinite().all()
        torch.testing.assert_close(expected[4:], of_kl[4:], rtol=1e-12, atol=1e-12)
        assert not torch.isclose(expected[:2], of_kl[:2], rtol=1e-3).any()


@pytest.mark.parametrize("renyi", [0.0, 1.0, 2.5, -0.5, float("nan"), True])
def test_an_order_without_a_divergence_is_refused(renyi):
    with pytest.raises(fb.FusionError, match=r"renyi=.*in \(0, 1\)"):
        Sites(renyi=renyi)


class Still(Exact):
    """Does not move; with a KL weight, and a loss of another scale."""

    scale, weight = 3.0, 0.25

    def training_step(self, batch, batch_idx) -> Tensor:
        return self.scale * (self.expected_loss(*batch) + self.weight * kl_divergence(self) / self.count)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("options", [
    {}, {"engine": "vectorized"}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 1e-3},
    {"gradient_clip_val": 1e-3, "engine": "vectorized"}, {"engine": 2},
], ids=str)
def test_a_precision_is_measured_by_squared_gradients(options):
    """n/τ · B · g² of the loss's own data term, whatever its scale; of the batch before clipping; twice, from a cavity.

    It is half of the first site; the other half is a third of the precision that the layers begin with, or of one over
    the mean square of their means. A multiple of the loss is a multiple of the gradient and of the factor of the KL:
    the precision is one, too.
    """
    examples, options = data(), {"engine": "sequential", **options}
    trainer = {name: options.pop(name) for name in list(options) if name.startswith(("acc", "grad"))}
    module = Still()
    federation = fb.FederatedBayes(fb.SizesPartition((30, 20, 10)), local_epochs=2, fusion="sites", **options)
    federate(module, federation, 1, whole(examples), **trainer)
    first = federation.state_dict()["clients"]
    assert federation.clients is not None
    start = Still()
    for client, rows in enumerate(federation.clients.datasets):
        x, y = (torch.stack(each) for each in zip(*rows))  # pyright: ignore[reportArgumentType]
        (gradient,) = torch.autograd.grad(start.scale * start.expected_loss(x, y), [start.layer.mu_weight])
        wanted = len(x) / start.weight * len(x) * gradient.flatten() ** 2 / start.scale
        mean, variance = fb.read_posterior(start).flatten()
        wanted = (wanted + (1 / variance).clamp_max(1 / mean.square().mean()) / 3) / 2
        torch.testing.assert_close(first[client]["kept"]["precision"], wanted, rtol=1e-6, atol=1e-6)
    module = Still()
    federate(module, fb.FederatedBayes(fb.SizesPartition((EXAMPLES,)), local_epochs=2, fusion="sites", **options), 2,
             whole(examples), **trainer)
    mean = fb.read_posterior(module).mean["layer.weight"]
    assert bool(mean.isfinite().all())


class StillAtMeans(Still):
    """Runs its layer, at the means, which are 0, so that no site moves them."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.layer.mu_weight)

    def expected_loss(self, x: Tensor, y: Tensor) -> Tensor:
        with mean_only(self):
            return (y - self.layer(x)[:, 0]).square().mean() / 2 / NOISE**2


@pytest.mark.parametrize("options", [
    {}, {"engine": "vectorized"}, {"accumulate_grad_batches": 2}, {"engine": 2},
], ids=str)
def test_squares_of_batches_give_way_to_those_of_single_examples(options, monkeypatch):
    """In round 2 after a settling time of 1: half n/τ · B · g², half n/τ times the mean of g² over examples.

    Nothing trains and all means are 0, so that both are the same in both rounds. The first sites begin at a third of
    the precision of the layers.
    """
    monkeypatch.setattr("lightning_fedbayes.fusion.sites.SETTLING", 1)
    examples, options = data(), {"engine": "sequential", **options}
    trainer = {name: options.pop(name) for name in list(options) if name.startswith("acc")}
    federation = fb.FederatedBayes(fb.SizesPartition((30, 20, 10)), local_epochs=2, fusion="sites", **options)
    federate(StillAtMeans(), federation, 2, whole(examples), **trainer)
    sites = federation.state_dict()["clients"]
    assert federation.clients is not None
    for client, rows in enumerate(federation.clients.datasets):
        x, y = (torch.stack(each) for each in zip(*rows))  # pyright: ignore[reportArgumentType]
        of_each = -x * y[:, None] / NOISE**2
        batch, single = len(x) * of_each.mean(0).square(), of_each.square().mean(0)
        factor = len(x) * StillAtMeans.scale / StillAtMeans.weight
        start = (factor * batch + 1 / fb.read_posterior(StillAtMeans()).flatten()[1] / 3) / 2
        wanted = MEMORY * start + (1 - MEMORY) * factor * (batch + single) / 2
        torch.testing.assert_close(sites[client]["kept"]["precision"], wanted, rtol=1e-6, atol=1e-6)


def test_processes_that_see_parts_of_batches_measure_by_batches(monkeypatch):
    """Their squares of single examples would count the processes, too."""
    monkeypatch.setattr("lightning_fedbayes.fusion.sites.SETTLING", 1)
    federation = fb.FederatedBayes(fb.IIDPartition(3), fusion="sites", engine="sequential")
    federate(Exact(), federation, 2, whole(data()))
    engine, parts = federation.federation.engine, []
    for mean in (None, lambda value: value):
        engine.context = replace(engine.context, mean_over_processes=mean)
        server = federation.federation.server
        engine.begin_method(fb.Shared(server.posterior, round=3, share=1 / 3, is_new=False))
        parts.append(engine.problem(0, engine.states.of(0)).cavity.batch_part)
    assert parts == [0.25, 1.0]


def test_the_widths_that_layers_begin_with_are_forgotten():
    """After a few rounds σ is that of the data, from starts that are a thousand times apart."""

    class Noisy(Exact):
        def __init__(self, std: float) -> None:
            super().__init__()
            start = fb.read_posterior(self)
            fb.load_posterior(self, start.unflatten(torch.zeros(FEATURES), torch.full((FEATURES,), std**2)))

    widths = []
    for std in (1e-3, 1.0):
        module = Noisy(std)
        federation = fb.FederatedBayes(fb.IIDPartition(3), local_epochs=8, fusion="sites", engine="vectorized")
        federate(module, federation, 25, DataLoader(data(), batch_size=4, shuffle=True))
        widths.append(fb.read_posterior(module).variance["layer.weight"].sqrt())
    assert float((widths[0] / widths[1]).log().abs().max()) < 0.2
    pooled = (1 + (data().tensors[0] ** 2).sum(0) / NOISE**2).rsqrt()
    assert float((widths[0][0] / pooled).log().abs().max()) < 0.7


@pytest.mark.parametrize("start", [0.001, 0.02])
def test_draws_do_not_take_an_untrained_network_apart(start):
    """After round 1 no σ is far above the weights, whatever is measured: half of Λ is at least 1 over their square."""
    L.seed_everything(0, verbose=False)
    module = fb.HybridBayesianClassifier(
        mlp(64, 10, [50, 50, 50]), bayesian_last=4, learning_rate=0.01, kl_weight=1.0, posterior_std=start
    )
    federation = fb.FederatedBayes(fb.DirichletPartition(10, alpha=0.5), fusion="sites", local_epochs=2)
    digits = fb.DigitsDataModule()
    digits.setup()
    federate(module, federation, 1, digits.train_dataloader())
    for name, mean in federation.posterior.mean.items():
        width, weights = federation.posterior.variance[name].max().sqrt(), mean.square().mean().sqrt()
        assert 0.5 * weights < width < 2 * weights, name


class Peer(Plain):
    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1))
        self.peer = PeerLinear(6, 3)


REFUSALS = {
    "no Gaussian parameter": (Plain, {"fusion": Sites(pull=None)}, "has no Gaussian parameter"),
    "layers of another package": (Peer, {}, "whose prior must be proper"),
    "another prior": (Exact, {"fusion": Sites(prior_std=0.5)}, "has the prior NormalPrior"),
    "all are local": (Exact, {"local_parameters": ["*layer*"]}, "local_parameters|Gaussian"),
}


@pytest.mark.parametrize(("kind", "options", "says"), REFUSALS.values(), ids=REFUSALS)
def test_networks_without_sites_are_refused_before_training(kind, options, says):
    with pytest.raises(FederationError, match=says):
        fit(kind(), 1, engine="sequential", **{"fusion": "sites", **options})


def test_the_layers_have_their_own_priors_between_rounds():
    module = Exact()
    fit(module, 2, fusion="sites", engine="sequential")
    (parameter,) = module.layer.gaussian_parameters()
    assert parameter.prior is module.layer.priors["weight"]


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

    module, rule = Fails(), Sites(1.0, 0.5, "pvi", pull=0.3)
    federation = fit(module, 2, fusion=rule, engine="sequential")
    after = federation.state_dict()
    fit_once = Fails()
    one = fit(fit_once, 1, fusion=rule, engine="sequential").state_dict()
    for name, kept in after["clients"][1]["kept"].items():
        assert torch.equal(kept, one["clients"][1]["kept"][name])
    (state,) = after["rule_states"].values()
    sites = [kept["kept"] for _, kept in sorted(after["clients"].items())]
    total = 1 + sum(site["precision"] for site in sites)
    torch.testing.assert_close(state["precision"][-FEATURES:], total, rtol=1e-12, atol=1e-12)
    dual = sum(size * site["dual"] for size, site in zip((30, 20, 10), sites, strict=True))
    torch.testing.assert_close(state["dual"][:1], dual, rtol=1e-12, atol=1e-12)
    assert float(dual.abs()) > 1e-3


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_training_that_leaves_the_finite_numbers_fails_that_client_alone(engine, caplog):
    class Runs(Exact):
        def expected_loss(self, x: Tensor, y: Tensor) -> Tensor:
            return super().expected_loss(x, y) * torch.where(y.abs().max() > 1e3, torch.inf, 1.0)

    x, y = data().tensors
    parts = {str(k): TensorDataset(x[k::3], y[k::3] + 1e4 * (k == 1)) for k in range(3)}
    federation = fb.FederatedBayes(fusion=Sites(step=0.1), engine=engine)
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


def test_a_client_without_data_is_refused_before_training():
    empty = TensorDataset(*(each[:0] for each in data().tensors))
    examples = whole(fb.ClientDatasets({"full": data(), "empty": empty}))
    with pytest.raises(FederationError, match="empty"):
        federate(Exact(), fb.FederatedBayes(fusion="sites"), 1, examples)


def test_clients_in_turn_pass_once_over_the_data_as_streaming_bayes_does():
    """Undamped, ρ = 1: after one pass a conjugate model is the pooled one, whatever the number of rounds after it."""
    x, _ = data().tensors
    module = Exact("lbfgs")
    federation = fit(module, 3, fusion=Sites(1.0, 1.0, "pvi"), engine="sequential", fraction="turns")
    assert [row["valid_clients"] for row in federation.history] == [1, 1, 1]
    assert sorted(federation.state_dict()["clients"]) == [0, 1, 2]
    after = fb.read_posterior(module)
    torch.testing.assert_close(1 / after.variance["layer.weight"][0], 1 + (x**2).sum(0) / NOISE**2, rtol=1e-5, atol=0)
    more = Exact("lbfgs")
    again = fit(more, 5, fusion=Sites(1.0, 1.0, "pvi"), engine="sequential", fraction="turns")
    assert again.history[-1]["sites/change"] < 1e-3 < federation.history[-1]["sites/change"]


@pytest.mark.parametrize(("method", "warned"), [
    (fb.Averaging("conflation", "global"), 1), (fb.Averaging("weighted_sum", "global"), 1), ("conflation", 0),
    (fb.Averaging("weighted_average", "global"), 0),
], ids=str)
def test_a_variance_that_shrinks_in_every_round_is_named_once(method, warned, caplog):
    caplog.set_level("INFO")
    fit(Exact(), 6, engine="sequential", fusion=method)
    assert caplog.text.count("fusion='sites' keeps its meaning") == warned


def test_a_client_is_removed_from_a_callback_and_from_a_checkpoint():
    federation = fit(Exact(), 3, fusion="sites", engine="sequential")
    state = federation.state_dict()
    others = 1 + sum(state["clients"][k]["kept"]["precision"] for k in (0, 2))
    for source in (federation, {"callbacks": {"FederatedBayes": state, "ModelCheckpoint": {}}}):
        removed = fb.remove_client(source, 1)
        torch.testing.assert_close(1 / removed.variance["layer.weight"][0], others)
    for wrong, client in ((federation, 7), ({}, 0), (None, 0), (fb.FederatedBayes(), 0)):
        with pytest.raises(FederationError, match=r"has no site|has trained"):
            fb.remove_client(wrong, client)


def test_a_parameter_without_a_dimension_has_a_pull():
    class Scalar(Mixed):
        def __init__(self, optimizer: str = "adam") -> None:
            super().__init__(optimizer)
            self.bias = nn.Parameter(torch.ones((), dtype=torch.float64))

    results = [Scalar(), Scalar()]
    for module, engine in zip(results, ("sequential", "vectorized")):
        fit(module, 2, fusion=Sites(pull=1.0), engine=engine)
    assert (results[0].bias - 1).abs() > 1e-3
    torch.testing.assert_close(results[0].bias, results[1].bias, rtol=1e-6, atol=1e-8)
