"""The KL divergence that is added to a loss, alone and in a federation; and the advice where it is missing."""

import pytest
import torch
from torch import nn

import lightning_fedbayes as fb
from lightning_fedbayes.layers import LinearReparameterization
from tests.federations import CLASSES, FEATURES, Plain, assert_equal, federate, loader

WEIGHT = 0.3


class Mean(nn.Module):
    """A Bayesian layer of weights at their means: losses without noise, with a KL divergence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = LinearReparameterization(FEATURES, CLASSES)

    def forward(self, x):
        return nn.functional.linear(x, self.layer.mu_weight, self.layer.mu_bias)


class ByHand(Plain):
    """Adds the KL of the client's share itself."""

    def on_client_start(self, client):
        self.n = client.num_examples

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + WEIGHT / self.n * fb.kl_divergence(self)


def test_a_step_is_the_loss_and_the_kl_per_example():
    plain = Plain(Mean())
    module = fb.with_kl(plain, WEIGHT)
    assert list(module.state_dict()) == list(plain.state_dict())
    batch = next(iter(loader()))
    module.kl_examples = 50
    expected = plain.training_step(batch, 0) + WEIGHT / 50 * fb.kl_divergence(plain)
    torch.testing.assert_close(module.training_step(batch, 0), expected)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_in_a_federation_it_is_what_one_would_write_by_hand(engine):
    by_hand, added = ByHand(Mean()), fb.with_kl(Plain(Mean()), WEIGHT)
    for module in (by_hand, added):
        federate(module, fb.FederatedBayes(fb.SizesPartition((50, 30, 10)), engine=engine), 2, loader())
    assert_equal(dict(by_hand.state_dict()), dict(added.state_dict()))
    assert not torch.equal(added.net.layer.rho_weight, Mean().layer.rho_weight)  # only the KL has a gradient there


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("module", "lines"),
    [
        (lambda: fb.bayesianize(Plain(), last=1), 1),
        (lambda: fb.with_kl(fb.bayesianize(Plain(), last=1)), 0),
        (lambda: ByHand(Mean()), 0),
        (Plain, 0),
    ],
    ids=["bayesianize", "with_kl", "by hand", "deterministic"],
)
def test_a_loss_without_the_kl_of_its_layers_is_told_once(module, lines, engine, caplog):
    with caplog.at_level("INFO"):
        federate(module(), fb.FederatedBayes(fb.IIDPartition(3), engine=engine), 2, loader())
    told = [line for line in caplog.messages if "fb.kl_divergence(self) / n" in line]
    assert len(told) == lines
    assert all("net.2.mu_weight" in line or "net.2.weight" in line for line in told)
