"""IVON in a federation: its posterior is fused, kept, resumed and limited as that of Bayesian layers is."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.clients.learned import KEPT, natural_prior
from lightning_fedbayes.layers.priors import LocalPrior, NormalPrior
from lightning_fedbayes.methods import Averaging
from lightning_fedbayes.modules.sources.ivon_state import first_state
from tests.federations import Plain, federate, loader, network, trainer

SIZES = fb.SizesPartition([40, 25, 13, 12])
ENGINES = ("sequential", "vectorized")


class Own(Plain):
    def __init__(self, net=None, **options):
        super().__init__(net)
        self.options = {"lr": 0.01, **options}

    def configure_optimizers(self):
        return fb.IVON(self.parameters(), **self.options)


@pytest.fixture
def no_noise(monkeypatch):
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)


def run(engine, rounds=3, module=None, options=None, **settings):
    federation = fb.FederatedBayes(settings.pop("partition", SIZES), engine=engine, seed=1, **settings)
    made = federate(Own() if module is None else module, federation, rounds, loader(), **(options or {}))
    return federation, made


@pytest.mark.parametrize(
    "settings",
    [
        {"fusion": "sites", "stack": 3},
        {"fusion": "sites", "partition": fb.SizesPartition([30, 30, 30])},  # whose counts all clients share
        {"fusion": Averaging(prior="global"), "keep": "optimizer"},
        {"fusion": "reverse_kl_barycenter", "keep": "optimizer", "stack": 3, "local_parameters": ["*2*"]},
    ],
)
def test_both_engines_give_the_same_posterior_without_noise(no_noise, settings):
    options = {"local_epochs": 2, **settings}
    stack = options.pop("stack", "vectorized")
    one, _ = run("sequential", options={"gradient_clip_val": 0.5}, **options)
    other, _ = run(stack, options={"gradient_clip_val": 0.5}, **options)
    torch.testing.assert_close(dict(one.posterior.mean), dict(other.posterior.mean), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(dict(one.posterior.variance), dict(other.posterior.variance), rtol=1e-4, atol=1e-8)
    assert all(bool(value.all()) for value in one.posterior.variance.values())


@pytest.mark.slow
def test_both_engines_have_the_same_distribution_with_noise():
    """The unit of a tensor's curvature has noise that its entries share, and an average over them keeps."""
    first, second = (run(engine, 6, fusion="sites", local_epochs=5)[0].posterior for engine in ENGINES)
    for name in first.names:
        ratio = first.variance[name].log() - second.variance[name].log()
        assert ratio.abs().mean() < 0.25
        assert ((first.mean[name] - second.mean[name]).abs() < 5 * first.variance[name].sqrt()).all()


class Location(L.LightningModule):
    """Mean of Gaussian data of unit variance; the pooled posterior is known."""

    def __init__(self, **options):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(2))
        self.options = options

    def training_step(self, batch, batch_idx):
        return ((batch[0] - self.mean) ** 2).sum(1).mean() / 2

    def configure_optimizers(self):
        return fb.IVON(self.parameters(), **self.options)


@pytest.fixture
def pairs_of_draws(monkeypatch):
    """Draws at one standard deviation above and below the mean, in turn: exact for a quadratic loss."""
    state = {"sign": -1.0}

    def drawn(like):
        return torch.full_like(like, state["sign"])

    sampled = fb.IVON.sampled

    def turn(self):
        state["sign"] = -state["sign"]
        return sampled(self)

    monkeypatch.setattr(torch, "randn_like", drawn)
    monkeypatch.setattr(fb.IVON, "sampled", turn)


@pytest.mark.slow
@pytest.mark.usefixtures("pairs_of_draws")
@pytest.mark.parametrize("engine", ENGINES)
def test_sites_end_at_the_posterior_of_the_pooled_data(engine):
    sizes, centres = (30, 60, 120), (-1.0, 0.5, 2.0)
    parts = {f"c{k}": TensorDataset(at + torch.randn(size, 2)) for k, (size, at) in enumerate(zip(sizes, centres))}
    data = torch.cat([part.tensors[0] for part in parts.values()])
    module = Location(prior_std=0.2, betas=(0.0, 0.9), samples=2, lr=0.2)
    federation = fb.FederatedBayes(fusion=fb.Sites(prior_std=0.2), local_epochs=60, engine=engine)
    trainer(20, [federation]).fit(module, DataLoader(fb.ClientDatasets(parts), batch_size=200))
    precision = len(data) + 0.2**-2
    found = federation.posterior
    assert 0.5 < float(found.variance["mean"].mean()) * precision < 1.5  # its unit is an estimate
    assert ((found.mean["mean"] - data.sum(0) / precision).abs() < 0.5 * precision**-0.5).all()


def test_a_first_round_begins_at_the_optimizer_s_own_curvature_and_a_later_one_at_the_global_posterior():
    module = Own(hessian_init=2.0)
    federation, _ = run("sequential", 1, module, local_epochs=1)
    learned = federation.federation.engine.model.learned
    group = fb.IVON([torch.zeros(1, requires_grad=True)], hessian_init=2.0).param_groups[0]
    later = learned.start({}, 40)
    for name, number in ((n, i) for i, n in enumerate(federation.posterior.names)):
        assert torch.allclose(later[number]["precision"], 1 / federation.posterior.variance[name])
    fresh = fb.FederatedBayes(SIZES, engine="sequential")
    federate(Own(lr=0.0, betas=(0.9, 0.0)), fresh, 1, loader())
    states = learned.start(
        {}, 40, local={f"{name} (variance)": torch.full_like(v, 1 / (2 + 1)) for name, v in learned.variances.items()}
    )
    expected = first_state(torch.zeros(1), group, 40)["precision"]
    assert all(torch.allclose(state["precision"], expected) for state in states.values())


def test_a_precision_falls_anew_in_every_round_of_a_client_that_keeps_its_state():
    """By a half in the first step, a quarter in the second: rounds of few steps widen a posterior, too."""
    module = Own(hessian_init=100.0)
    federation, _ = run("sequential", 1, module, local_epochs=1)
    learned, optimizer = federation.federation.engine.model.learned, module.optimizers(use_pl_optimizer=False)
    parameters = [*module.parameters()]
    kept = {n: {"step": torch.tensor(40.0), "square": torch.full_like(p, 1e-9)} for n, p in enumerate(parameters)}
    states = learned.start(kept, 40)
    optimizer.state.update(dict(zip(parameters, states.values(), strict=True)))
    for factor in (1 / 2, 3 / 4, 5 / 6):
        before = [state["precision"].clone() for state in states.values()]
        with optimizer.sampled():
            for p in parameters:
                p.grad = torch.full_like(p, 1e-9)
        optimizer.step()
        for state, precision in zip(states.values(), before, strict=True):
            torch.testing.assert_close(state["precision"], factor * precision)


def test_a_local_problem_and_a_prior_are_what_the_optimizer_reads():
    like = torch.zeros(3)
    normal = natural_prior(NormalPrior(torch.full((3,), 2.0), torch.full((3,), 0.5)), like)
    assert torch.allclose(normal["prior_precision"], torch.full((3,), 4.0))
    assert torch.allclose(normal["prior_shift"], torch.full((3,), 8.0))
    local = LocalPrior(*(torch.rand(3) + i for i in range(3)))
    found = natural_prior(local, like)
    at = torch.randn(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(local.kl(at, torch.ones(3)), at)
    assert torch.allclose(found["prior_precision"] * at - found["prior_shift"], gradient, atol=1e-5)


def test_what_never_leaves_a_client_keeps_its_variance():
    federation, _ = run("vectorized", local_parameters=["*2*"], local_epochs=30)
    names = federation.posterior.names
    assert names
    assert not any("2" in name for name in names)
    kept = federation.federation.engine.states.state_dict()[0]["local"]
    variances = [value for name, value in kept.items() if name.endswith("(variance)")]
    assert len(variances) == 2
    assert all((value > 0).all() and value.std() > 0 for value in variances)


@pytest.mark.slow
def test_a_head_of_bayesian_layers_above_ivon():
    class Head(Plain):
        def __init__(self):
            super().__init__(fb.bayesianize(network(), last=1))

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + fb.kl_divergence(self) / 30

        def configure_optimizers(self):
            head = {"params": self.net[2].parameters(), "posterior": False, "lr": 1e-2}
            return fb.IVON([{"params": self.net[0].parameters()}, head])

    for fusion in ("reverse_kl_barycenter", "sites"):
        found = [run(engine, 2, Head(), fusion=fusion)[0].posterior for engine in ENGINES]
        assert found[0].names == found[1].names
        assert all(bool(v.all()) for each in found for v in each.variance.values())
        assert len(found[0].names) == 4


class Frozen(Own):
    def __init__(self):
        super().__init__()
        self.net[0].weight.requires_grad_(False)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_frozen_parameter_is_a_point_mass(engine):
    module = Frozen()
    before = module.net[0].weight.detach().clone()
    federation, _ = run(engine, 2, module)
    assert torch.allclose(federation.posterior.mean["net.0.weight"], before)
    assert not federation.posterior.variance["net.0.weight"].any()
    assert federation.posterior.variance["net.2.weight"].all()


def manual():
    module = Own()
    module.automatic_optimization = False
    return module


THAW = LambdaCallback(on_train_epoch_start=lambda made, own: own.net[0].weight.requires_grad_(made.current_epoch > 0))


@pytest.mark.parametrize(
    ("module", "settings", "options", "message"),
    [
        (Own, {}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2 with fb.IVON"),
        (lambda: Own(curvature="ivon"), {"fusion": "sites"}, {}, "leave curvature= at 'squares'"),
        (Own, {"fusion": fb.Sites(prior_std=2.0)}, {}, "fb.Sites"),
        (lambda: Own(prior_std=float("inf")), {"fusion": "sites"}, {}, "no prior"),
        (lambda: Own(fb.bayesianize(network(), last=1)), {}, {}, "is a parameter of a Bayesian layer.*posterior=False"),
        (manual, {}, {}, "automatic_optimization is False"),
        (Frozen, {"engine": "sequential", "fusion": "rklb"}, {"callbacks": [THAW]}, "was frozen when the fit began"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(module, settings, options, message):
    with pytest.raises(fb.FedBayesError, match=message):
        run(settings.pop("engine", "auto"), module=module(), options=options, **settings)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_client_of_ivon_keeps_what_its_next_round_reads(engine):
    """Not the precision, which is the global posterior's, nor the prior: with a site 24 bytes each, and two counts."""
    made = fb.FederatedBayes(fb.IIDPartition(3), fusion="sites", engine=engine)
    federate(Plain(optimizer=fb.IVON), made, 2)
    state = made.federation.engine.states.of(0)
    assert {key for entries in state.optimizers[0].values() for key in entries} <= {*KEPT}
    kept = [*state.kept.values(), *(v for each in state.optimizers[0].values() for v in each.values() if v.dim())]
    assert sum(each.numel() * each.element_size() for each in kept) == 24 * made.posterior.num_parameters + 16
