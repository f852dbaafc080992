"""A federation over Flower ends at the very posterior of the same federation in one process."""

from functools import partial

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.methods import Averaging, FedProx
from lightning_fedbayes.transport.flower import FusionStrategy, personal_posterior
from tests.federations import Plain, assert_close, assert_equal, blobs, federate, loader, network
from tests.flower.clients import assert_same, client_apps, one_shot, run
from tests.flower.grid import LocalGrid
from tests.flower.hardening import restart
from tests.flower.test_schedules import Estimated
from tests.trainer.scenarios import of_the_page
from tests.transport.federation import PARTITION, BlobData, hybrid, in_process

OWN = of_the_page()["MyFedDyn"]


class Scheduled(Plain):
    """Learning rates fall from round to round, momentum is what an optimizer keeps."""

    def __init__(self) -> None:
        super().__init__(network(0), optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class ByRound(Scheduled):
    """A hook of the epoch sets an attribute and a rate by the round, and ends the states that clients keep."""

    configure_optimizers = Plain.configure_optimizers

    def on_train_epoch_start(self):
        self.scale = 1.0 + self.current_epoch
        if self.current_epoch == 1:
            self.optimizers().state.clear()
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1 * self.scale

    def training_step(self, batch, batch_idx):
        return self.scale * super().training_step(batch, batch_idx)


Learned = partial(Plain, optimizer=fb.IVON)
"""A posterior from the optimizer."""


class Headed(fb.HeadModule):
    """Sums of one exchange."""

    def __init__(self, likelihood="one_hot", **options) -> None:
        super().__init__(torch.nn.Identity(), fb.BayesianHead(3, likelihood, **options), 6)


class Measured(fb.HybridBayesianRegressor):
    """A noise that clients measure in the first of their local epochs."""

    def __init__(self) -> None:
        super().__init__(network(0), bayesian_last=0, scaler=False, learning_rate=0.1)

    def unpack(self, batch):
        return batch[0], torch.nn.functional.one_hot(batch[1], 3).float()


SITES, HALF, PAGE, KEPT = {"fusion": "sites"}, {"fraction": 0.5}, {"fusion": OWN(0.1)}, {"keep": ["optimizer"]}
CASES = {
    "rklb": (hybrid, {"fusion": "reverse_kl_barycenter"}, {"local_epochs": 2}),
    "dwc": (hybrid, {"fusion": Averaging("dwc", "global")}, {"fusion": Averaging("dwc", "global")}),
    "linear pool": (hybrid, {"fusion": "linear_pool", "weighting": "max_discrepancy"}, {}),
    "with a state": (hybrid, {"fusion": "ivar_vb", "weighting": "equal"}, {}),
    "cohorts": (hybrid, HALF, {}),
    "sites": (hybrid, {**SITES, "weighting": "equal"}, SITES),
    "sites of cohorts": (hybrid, {**SITES, "weighting": "equal", **HALF}, {**SITES, "local_epochs": 2}),
    "sites of no Gaussian": (Scheduled, {**SITES, **HALF}, SITES),
    "kept optimizers": (Scheduled, {}, KEPT),
    "hooks of the epoch": (ByRound, {}, KEPT),
    "cohorts that keep": (Scheduled, HALF, {"keep": ["optimizer"], "local_parameters": ["net.2.*"]}),
    "IVON": (Learned, {}, {"local_epochs": 2}),
    "IVON with the global prior": (Learned, {"fusion": "linear_pool"}, {"fusion": Averaging("linear_pool", "global")}),
    "IVON with sites": (Learned, {**SITES, **HALF}, SITES),
    "IVON that keeps": (Learned, HALF, {"keep": ["optimizer"], "local_parameters": ["net.2.*"]}),
    "Laplace": (Scheduled, {}, {"local_epochs": 2, "posterior": fb.Laplace()}),
    "SWAG": (Scheduled, {}, {"local_epochs": 2, "posterior": fb.SWAG()}),
    "FedProx": (Scheduled, {}, {"local_epochs": 2, "fusion": FedProx(0.3)}),
    "Laplace with sites": (Scheduled, {**SITES, **HALF}, {**SITES, "posterior": fb.Laplace()}),
    "population": (hybrid, {"fusion": "population", **HALF}, {"fusion": "population"}),
    "population of IVON": (Learned, {"fusion": "population"}, {"fusion": "population"}),
    "SCAFFOLD of cohorts": (Plain, {"fusion": "scaffold", **HALF}, {"fusion": "scaffold"}),
    "FedNova": (hybrid, {"fusion": "fednova"}, {"fusion": "fednova", "local_epochs": 2}),
    "Ditto of cohorts": (hybrid, {"fusion": "ditto", **HALF}, {"fusion": "ditto", "local_epochs": 2}),
    "the method of docs/extend.md": (hybrid, {**PAGE, **HALF}, {**PAGE, "local_epochs": 2}),
    "measured noise": (Measured, HALF, {"local_epochs": 3}),
    "local buffers": (hybrid, {}, {"buffers": "local"}),
    "frozen buffers": (hybrid, {}, {"buffers": "frozen"}),
    **{
        f"rates of every step, {rule}": (Estimated, {"fusion": rule, "fraction": part}, {"fusion": rule, **KEPT})
        for rule, part in (("weighted_average", "turns"), ("sites", "turns"), ("fednova", 0.5), ("ditto", 0.5))
    },
}


@pytest.mark.parametrize(("make", "server", "client"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("shared", [True, False], ids=["simulation", "deployment"])
def test_same_posterior_as_in_one_process(make, server, client, shared, tmp_path):
    strategy = FusionStrategy(**server, wait_for=4, seed=3)
    kept = {name: client[name] for name in ("buffers", "local_parameters", "posterior") if name in client}
    grid = LocalGrid(client_apps(make=make, shared=shared, state_folder=tmp_path, **client))
    run(grid, strategy, make=make, **kept)
    alone = in_process(make=make, **{**server, **client}, seed=3)
    assert_same(strategy, alone)
    assert_equal(dict(strategy.server.buffers), dict(alone.federation.server.buffers))


@pytest.mark.slow
def test_a_deployment_whose_server_is_killed_ends_at_the_posterior_of_one_process():
    """TLS, authenticated nodes, a process per message."""
    restart()


@pytest.mark.parametrize("shared", [True, False], ids=["simulation", "deployment"])
def test_examples_are_protected_at_remote_clients_as_in_one_process(shared, tmp_path):
    """A seed repeats their noise; each client's steps are in its folder, and a client without it counts all rounds."""
    pytest.importorskip("opacus")
    privacy = fb.ExamplePrivacy(0.5, 1.0, seed=3)

    def federated(rounds):
        strategy = FusionStrategy(wait_for=4, seed=3, checkpoint=tmp_path / "server.pt")
        options = {"make": Plain, "shared": shared, "state_folder": tmp_path}
        trainer = {"callbacks": [privacy if shared else fb.ExamplePrivacy(0.5, 1.0, seed=3)], "accelerator": "cpu"}
        run(LocalGrid(client_apps(**options, trainer=trainer)), strategy, rounds, make=Plain)
        return strategy, strategy.server.history[-1]["privacy/simulated_example_epsilon"]

    federation, alone = fb.FederatedBayes(PARTITION, fusion="rklb", engine="sequential", seed=3), []
    together = fb.ExamplePrivacy(0.5, 1.0, seed=3)
    for rounds in (3, 4):
        made = federate(Plain(), federation, rounds, BlobData().train_dataloader(), callbacks=[together])
        alone.append(float(made.callback_metrics["privacy/simulated_example_epsilon"]))
        together = fb.ExamplePrivacy(0.5, 1.0, seed=3)
        if rounds == 3:
            strategy, spent = federated(3)
            assert_same(strategy, federation)
            assert spent == pytest.approx(alone[0])
    for client in range(4):
        (tmp_path / f"client-{client}.pt").unlink()
    with pytest.warns(UserWarning, match="no account of the private messages"):
        assert federated(4)[1] == pytest.approx(alone[1])


def test_a_head_in_one_exchange_is_that_of_the_pooled_data(tmp_path, monkeypatch):
    monkeypatch.setattr(BlobData, "train_dataloader", lambda self: loader(self.dataset))
    strategy = FusionStrategy(fusion="sums", fraction=0.5, wait_for=4, seed=3)
    run(LocalGrid(client_apps(make=Headed, fusion="sums", state_folder=tmp_path)), strategy, 8, make=Headed)
    model = Headed()
    fb.load_posterior(model, strategy.server.posterior)
    pooled = model.head.fit_clients([blobs().tensors])
    torch.testing.assert_close(model.fitted.weights, pooled.weights, atol=1e-9, rtol=1e-9)


class Asked(fb.HeadModule):
    """A head behind a frozen layer."""

    def __init__(self, **options) -> None:
        torch.manual_seed(1)
        super().__init__(torch.nn.Linear(6, 5), fb.BayesianHead(3, **options), 5)


def features_of_clients(module):
    with torch.inference_mode():
        return [
            (module.features(blobs().tensors[0][rows]).clone(), blobs().tensors[1][rows])
            for rows in PARTITION.split(blobs().tensors[1], seed=0).indices
        ]


def assert_same_head(found, alone):
    """Bit by bit."""
    assert found.exchanges == alone.exchanges
    assert found.prior_precision == alone.prior_precision
    assert torch.equal(found.weights, alone.weights)
    for ours, theirs in zip(found.terms, alone.terms, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"inference": "laplace"}, {"likelihood": "one_hot"}, {"prior_std": 0.5, "exchanges": 4}], ids=str
)
@pytest.mark.parametrize("large", [False, True])
def test_a_head_that_is_asked_for_is_that_of_one_process(options, large, monkeypatch):
    if large:
        monkeypatch.setattr("lightning_fedbayes.modules.head.head.DENSE", 0)
    make = partial(Asked, **options)
    apps = client_apps(make=make, one_shot=make().head)
    found, alone = one_shot(apps, make().head, make), make().head.fit_clients(features_of_clients(make()))
    assert found.exchanges == 0 if "likelihood" in options else found.exchanges > 2
    assert_same_head(found, alone)


def test_a_head_begins_anew_without_a_client_that_fails_on_the_way():
    counts = [0, 0]

    def counted(client, last):
        def change(reply):
            counts[client] += 1
            return reply if counts[client] <= last else None

        return change

    apps, change = client_apps(make=Asked, one_shot=Asked().head), {0: counted(0, 999), 1: counted(1, 2)}
    found = one_shot(apps, Asked().head, Asked, change)
    assert counts[1] == 3 < counts[0]
    rest = [each for client, each in enumerate(features_of_clients(Asked())) if client != 1]
    assert_same_head(found, Asked().head.fit_clients(rest))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_numbers_of_examples_are_bounded_as_in_one_process(fraction, tmp_path, caplog):
    """Also in cohorts of four by what all have said last, and where the server is another one from round 4 on."""
    partition, options = fb.SizesPartition((8, 8, 8, 8, 9, 9, 9, 31)), {"fraction": fraction, "seed": 3}
    alone = fb.FederatedBayes(partition, fusion="fedavg", engine="sequential", **options)
    with caplog.at_level("INFO"):
        federate(Plain(), alone, 6, BlobData().train_dataloader())
        for rounds in (3, 6):
            strategy = FusionStrategy("fedavg", wait_for=8, checkpoint=tmp_path / "server.pt", **options)
            run(LocalGrid(client_apps(8, Plain, partition=partition)), strategy, rounds, make=Plain)
    assert_same(strategy, alone)
    assert len([line for line in caplog.messages if "client 7 says 31, counts as 16. To believe" in line]) in (2, 3)
    assert_equal(*(server.state_dict()["guard"] for server in (strategy.server, alone.federation.server)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [hybrid, Learned], ids=["layers", "IVON"])
def test_a_bounded_client_keeps_what_the_server_has_counted_as_in_one_process(make, tmp_path):
    """Also where the server is another one from the fourth round on, which has to tell clients of the third."""
    partition, bound = fb.SizesPartition((8, 8, 9, 9, 10, 10, 10, 20)), fb.Safeguards(max_influence=1.0)
    number = 8
    federation = fb.FederatedBayes(partition, fusion="sites", engine="sequential", safeguards=bound, seed=3)
    federate(make(), federation, 6, BlobData().train_dataloader())
    assert sum(row["outlying_clients"] for row in federation.history) > 3
    options = {"wait_for": number, "safeguards": bound, "seed": 3, "checkpoint": tmp_path / "server.pt"}
    apps = client_apps(number, make, partition=partition, fusion="sites", state_folder=tmp_path)
    for rounds in (3, 6):
        strategy = FusionStrategy("sites", **options)
        run(LocalGrid(apps), strategy, rounds, make=make)
    assert_same(strategy, federation)
    for client, kept in federation.state_dict()["clients"].items():
        for name, value in strategy.server.sites[client].items():
            assert torch.equal(value, kept["kept"][name])
    for name in fb.Sites.sent:
        total = sum(kept[name] for kept in strategy.server.sites.values())
        torch.testing.assert_close(total, strategy.server.buffers[f"method/{name}"], rtol=0, atol=1e-12)
    stored = torch.load(tmp_path / "server.pt", weights_only=True)
    left = [fb.remove_client(each, 0) for each in (federation, strategy.server, stored)]
    assert all(torch.equal(each.flatten()[0], left[0].flatten()[0]) for each in left)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"keep": ["posterior"], "local_parameters": ["network.0.*"]}, {"fusion": "population"}, {"fusion": "ditto"}],
)
def test_a_client_keeps_and_scores_its_own_posterior_as_in_one_process(options, tmp_path):
    local = options.get("local_parameters", ())
    rule = {"fusion": options.get("fusion", "reverse_kl_barycenter"), "weighting": "equal"}
    strategy = FusionStrategy(**rule, wait_for=4, seed=3, evaluate=True)
    run(LocalGrid(client_apps(state_folder=tmp_path, **options)), strategy, local_parameters=local)
    alone = in_process(**{**rule, **options}, seed=3)
    shared = strategy.server.posterior
    for client in range(4):
        for weight in (0.0, 0.4, 1.0):
            ours = personal_posterior(hybrid(), tmp_path, client, shared, weight, local_parameters=local)
            theirs = alone.posterior_of(client, weight)
            assert_close(ours, theirs)
        drawn = fb.PosteriorPredictive(hybrid(), alone.posterior_of(client, 1.0))
        assert drawn.predict_step(torch.zeros(2, 6)).probs.shape == (2, 3)
    scores = strategy.client_scores
    assert {"val/nll", "personal/val/nll"} <= set(scores.values)
    assert not torch.equal(scores.values["val/nll"], scores.values["personal/val/nll"])
    with pytest.raises(FederationError, match=r"client-9\.pt is not there: give the folder"):
        personal_posterior(hybrid(), tmp_path, 9, strategy.server.posterior)
