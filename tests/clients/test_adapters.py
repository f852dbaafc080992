"""Federated adapters W + BA: A frozen and B with a posterior (FFA-LoRA), or A shared and B personal (FedSA-LoRA)."""

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.clients.engine import Engine
from tests.clients.vectorized.modules import Adapter, Backbone
from tests.federations import Plain, federate

ENGINES = ("sequential", "vectorized")
SIZES = fb.SizesPartition((35, 22, 20, 13))


class Adapted(Plain):
    """Adapters in a frozen network."""

    def __init__(self, *, freeze: str = "", **options) -> None:
        super().__init__(Backbone(), **options)
        for name, parameter in self.named_parameters():
            if freeze and freeze in name:
                parameter.requires_grad_(False)

    def configure_optimizers(self):
        return self.optimizer_class([p for p in self.parameters() if p.requires_grad], lr=self.lr)


@pytest.fixture
def sent(monkeypatch) -> list[set[str]]:
    """The names in what every client sends."""
    names: list[set[str]] = []
    original = Engine.sent_and_kept

    def spy(self, *args):
        posterior, buffers, own = original(self, *args)
        names.append({*posterior.names, *buffers})
        return posterior, buffers, own

    monkeypatch.setattr(Engine, "sent_and_kept", spy)
    return names


def halves(module) -> dict[str, dict[str, torch.Tensor]]:
    return {
        half: {name: p.detach().clone() for name, p in module.named_parameters() if half in name}
        for half in ("lora_A", "lora_B")
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_a_frozen_and_b_with_a_posterior_by_sites(engine, sent):
    module = Adapted(freeze="lora_A", optimizer=fb.IVON)
    before = halves(module)
    federation = fb.FederatedBayes(SIZES, fusion="sites", engine=engine)
    federate(module, federation, 3)
    after, posterior = halves(module), federation.posterior
    assert len(sent) == 3 * 4
    assert all("lora_A" not in name for names in sent for name in names)
    assert all({*before["lora_B"]} <= names for names in sent)
    assert all(torch.equal(before["lora_A"][name], value) for name, value in after["lora_A"].items())
    for name, value in after["lora_B"].items():
        assert not torch.equal(before["lora_B"][name], value)
        assert bool((posterior.variance[name] > 0).all())
    assert all(float(posterior.variance[name].sum()) == 0 for name in before["lora_A"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("optimizer", "fusion"), [(torch.optim.SGD, "weighted_average"), (fb.IVON, "sites")])
def test_a_shared_and_b_personal(engine, optimizer, fusion, sent):
    module = Adapted(optimizer=optimizer)
    before = halves(module)
    federation = fb.FederatedBayes(SIZES, fusion=fusion, engine=engine, local_parameters=["*lora_B*"])
    federate(module, federation, 3)
    after = halves(module)
    assert all("lora_B" not in name for names in sent for name in names)
    assert all({*before["lora_A"]} <= names for names in sent)
    assert not any(torch.equal(before["lora_A"][name], value) for name, value in after["lora_A"].items())
    own = [federation.federation.engine.states.of(client).local for client in range(4)]
    for name in before["lora_B"]:
        values = [before["lora_B"][name], *(each[name] for each in own)]
        assert all(not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])


def test_a_layer_with_a_frozen_is_linear_in_b_so_averages_of_b_are_averages_of_the_network():
    """Of the same B and A that both train they are not: averages of products are not products of averages."""
    torch.manual_seed(0)
    layers = [Adapter(6, 4) for _ in range(3)]
    for layer in layers:
        layer.base = layers[0].base
    x = torch.randn(5, 6)

    @torch.no_grad()
    def gap() -> float:
        mean = Adapter(6, 4)
        mean.base = layers[0].base
        for half in ("lora_A", "lora_B"):
            weights = torch.stack([getattr(layer, half).weight for layer in layers])
            getattr(mean, half).weight.data = weights.mean(0)
        return float((mean(x) - torch.stack([layer(x) for layer in layers]).mean(0)).norm())

    assert gap() > 0.1
    for layer in layers:
        layer.lora_A = layers[0].lora_A
    assert gap() < 1e-5
