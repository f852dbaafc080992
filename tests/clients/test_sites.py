"""Sites in training: fixed points of real networks, the engines, and what is refused."""

import lightning as L
import numpy as np
import pytest
import torch
from bayesian_torch.layers import LinearReparameterization as PeerLinear
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.layers import LinearReparameterization, kl_divergence
from lightning_fedbayes.methods import Averaging
from lightning_fedbayes.methods.method import split
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
        return torch.optim.LBFGS(
            self.parameters(),
            max_iter=300,
            tolerance_grad=1e-11,
            tolerance_change=1e-14,
            history_size=20,
            line_search_fn="strong_wolfe",
        )


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
    torch.testing.assert_close(first.mean, second.mean, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(first.variance, second.variance, rtol=1e-6, atol=1e-9)
    assert change == pytest.approx(other, rel=1e-6)


class Peer(Plain):
    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1))
        self.peer = PeerLinear(6, 3)


REFUSALS = {
    "layers of another package": (Peer, {}, "takes proper priors alone"),
    "another prior": (Exact, {"fusion": fb.Sites(prior_std=0.5)}, "'layer.weight' has the prior NormalPrior"),
    "scaled gradients": (Exact, {"precision": "16-mixed"}, "bf16-mixed"),
}


@pytest.mark.parametrize(("kind", "options", "says"), REFUSALS.values(), ids=REFUSALS)
def test_networks_without_sites_are_refused_before_training(kind, options, says):
    if "precision" in options and not torch.cuda.is_available():
        pytest.skip("Lightning takes it on a GPU alone")
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

    after = fit(Fails(), 2, fusion="sites", engine="sequential")
    once = fit(Fails(), 1, fusion="sites", engine="sequential").state_dict()
    sites = after.state_dict()["clients"]
    for name, kept in sites[1]["kept"].items():
        assert torch.equal(kept, once["clients"][1]["kept"][name])
    for name, total in split(after.federation.server.buffers)[1].items():
        if name in fb.Sites.sent:
            torch.testing.assert_close(
                sum(sites[client]["kept"][name] for client in range(3)), total, rtol=1e-12, atol=1e-12
            )


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
    others = 1 + sum(state["clients"][k]["kept"]["precision"] for k in (0, 2))
    for source in (federation, {"callbacks": {"FederatedBayes": state, "ModelCheckpoint": {}}}):
        removed = fb.remove_client(source, 1)
        torch.testing.assert_close(1 / removed.variance["layer.weight"][0], others)
    for wrong, client in ((federation, 7), ({}, 0), (None, 0), (fb.FederatedBayes(), 0)):
        with pytest.raises(FederationError, match=r"has no part|has trained"):
            fb.remove_client(wrong, client)
