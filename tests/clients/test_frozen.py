"""What is frozen stays with the module: it is neither sent, fused, noised nor kept, and joins when it trains."""

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.layers import LinearReparameterization
from lightning_fedbayes.methods import Averaging
from tests.federations import Plain, federate, network

ENGINES = ("sequential", "vectorized")
HEAD = ("net.2.weight", "net.2.bias")
ALL = ("net.0.weight", "net.0.bias", *HEAD)


def frozen(**options) -> Plain:
    module = Plain(network(), **options)
    module.net[0].requires_grad_(False)
    return module


def bayesian() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(LinearReparameterization(6, 5), nn.ReLU(), LinearReparameterization(5, 3))


class Thawing(Plain):
    """Trains its first layer from the second round on; or from the first, where that is frozen in the first round."""

    def __init__(self, *, from_start: bool = False, **options) -> None:
        super().__init__(network(), **options)
        self.net[0].requires_grad_(from_start)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


def states(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in one if torch.equal(one[name], other[name])]


@pytest.mark.parametrize(
    ("engine", "options"),
    list(zip(ENGINES * 2, [{}, {"fusion": "sites"}, {"fusion": "fedprox"}, {"fusion": "fedadam"}])),
)
def test_what_is_frozen_is_not_sent_and_the_rest_is_what_it_would_be(engine, options, tmp_path):
    """Beside local parameters, which never left a client before either."""
    modules = frozen(), frozen()
    federations = [
        fb.FederatedBayes(fb.IIDPartition(3), engine=engine, **each, **options)
        for each in ({}, {"local_parameters": ["net.0.*"]})
    ]
    before = states(modules[0])
    federate(modules[0], federations[0], 3).save_checkpoint(tmp_path / "last.ckpt")
    federate(modules[1], federations[1], 3)
    assert equal(states(modules[0]), states(modules[1])) == [*ALL]
    assert equal(states(modules[0]), before) == ["net.0.weight", "net.0.bias"]
    assert federations[0].federation.server.posterior.names == HEAD
    assert federations[0].posterior.names == ALL
    stored = torch.load(tmp_path / "last.ckpt", weights_only=False)["callbacks"]
    mine = next(state for state in stored.values() if isinstance(state, dict) and "rule_states" in state)
    assert set(mine["posterior"]["mean"]) == {*HEAD}
    assert all(not state["local"] for state in mine["clients"].values())


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_weights_do_not_move_by_a_bit_under_noise(engine):
    pytest.importorskip("opacus")
    module = frozen()
    before = states(module)
    privacy = fb.UpdatePrivacy(clip=1.0, noise_multiplier=3.0)
    federate(module, fb.FederatedBayes(fb.IIDPartition(3), engine=engine, privacy=privacy), 3)
    assert equal(states(module), before) == ["net.0.weight", "net.0.bias"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{"fusion": Averaging(prior="global")}, {"fusion": "sites"}], ids=str)
def test_a_frozen_bayesian_layer_keeps_its_posterior_and_its_prior(engine, options):
    module = fb.with_kl(Plain(bayesian()))
    layer = next(each for each in module.modules() if hasattr(each, "mu_weight"))
    layer.requires_grad_(False)
    before = states(layer)
    federation = fb.FederatedBayes(fb.IIDPartition(3), engine=engine, **options)
    federate(module, federation, 3)
    assert equal(states(layer), before) == [*before]
    variances = federation.posterior.variance
    assert len(variances) == 4
    assert all(bool(value.all()) for value in variances.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_what_trains_later_joins_with_the_value_that_it_has(engine):
    modules = Thawing(), Thawing(from_start=True)
    federations = [fb.FederatedBayes(fb.IIDPartition(3), engine=engine) for _ in modules]
    for module, federation in zip(modules, federations):
        federate(module, federation, 3)
    torch.testing.assert_close(states(modules[0]), states(modules[1]), rtol=1e-6, atol=1e-7)
    assert federations[0].federation.server.posterior.names == ALL


def test_a_run_goes_on_after_something_has_joined(tmp_path):
    def run(rounds, module, path=None):
        made = federate(module, fb.FederatedBayes(fb.IIDPartition(3)), rounds, ckpt_path=path)
        made.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return states(module)

    whole = run(4, Thawing())
    run(2, Thawing())
    assert equal(run(4, Thawing(), tmp_path / "2.ckpt"), whole) == [*ALL]


def test_a_rule_with_a_memory_cannot_take_in_more():
    with pytest.raises(FederationError, match=r"train from round 2 on.*fusion='sites' remembers.*freeze them in on_tr"):
        federate(Thawing(), fb.FederatedBayes(fb.IIDPartition(3), fusion="sites"), 3)


class Tuned(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.net = nn.Sequential(self.backbone, nn.ReLU(), self.head)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


@pytest.mark.parametrize("fusion", ["fedavg", "sites"])
def test_lightning_s_finetuning_takes_everything_from_the_start(fusion):
    module = Tuned()
    before = states(module)
    federation = fb.FederatedBayes(fb.IIDPartition(3), fusion=fusion, engine="sequential")
    federate(module, federation, 4, callbacks=[BackboneFinetuning(2, verbose=False)])
    assert len(federation.federation.server.posterior.names) == 4
    assert not equal(states(module), before)


class Momentum(Plain):
    """A network that follows another one, as in self-supervised learning."""

    def __init__(self, way: str) -> None:
        super().__init__(network())
        self.target, self.way = nn.Linear(6, 5).requires_grad_(False), way

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            moved = 0.9 * self.target.weight + 0.1 * self.net[0].weight
            if self.way == "data":
                self.target.weight.data = moved
            else:
                self.target.weight.copy_(moved)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("way", ["data", "copy"])
def test_a_client_that_writes_into_what_is_frozen_ends_the_run_with_the_remedy(way):
    with pytest.raises(FederationError, match=r"'target.weight' was frozen.*requires_grad_\(True\)"):
        federate(Momentum(way), fb.FederatedBayes(fb.IIDPartition(3)), 1)


def test_hooks_and_personal_posteriors_have_what_is_frozen():
    class Seen(Plain):
        def on_round_end(self, posterior, clients):
            self.names = [posterior.names, *(each.names for each in clients)]

        needs_client_posteriors = True

    module = Seen(network())
    module.net[0].requires_grad_(False)
    federation = fb.FederatedBayes(fb.IIDPartition(3), keep=["posterior"], local_parameters=["net.0.bias"])
    federate(module, federation, 1)
    federated = tuple(name for name in ALL if name != "net.0.bias")
    assert module.names == [federated] * 4
    assert federation.posterior_of(1).names == ALL


def test_a_federation_that_is_complete_has_the_whole_posterior(tmp_path):
    module = frozen()
    federate(module, fb.FederatedBayes(fb.IIDPartition(3)), 2).save_checkpoint(tmp_path / "last.ckpt")
    federation = fb.FederatedBayes(fb.IIDPartition(3))
    federate(frozen(), federation, 2, ckpt_path=tmp_path / "last.ckpt")
    assert federation.posterior.names == ALL
    assert equal(states(module), dict(federation.posterior.mean)) == [*ALL]
