"""What is told, or refused, before the first step."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FedBayesError, FederationError
from tests.federations import Plain, blobs, clients, federate, network


@pytest.mark.parametrize(
    ("drop_last", "sizes", "told"), [(False, (9, 8, 17), "clients c0, c2 "), (True, (9, 8), ""), (False, (8, 10), "")]
)
def test_batchnorm_and_a_last_batch_of_one_example(drop_last, sizes, told, recwarn):
    module, loader = Plain(network(batch_norm=True)), DataLoader(clients(*sizes), batch_size=4, drop_last=drop_last)
    federate(module, fb.FederatedBayes(), 1, loader)
    found = [str(each.message) for each in recwarn if "BatchNorm needs more" in str(each.message)]
    assert len(found) == bool(told)
    assert all(told in each and "drop_last=True" in each for each in found)


@pytest.mark.parametrize("package", ["ivon", "torch_uncertainty", "pyro"])
def test_posteriors_of_other_packages_are_named_with_what_to_take(package, recwarn, monkeypatch):
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    kind = type("BayesLinear", (nn.Linear,), {"__module__": f"{package}.layers"})
    optimizer = type("IVON", (torch.optim.SGD,), {"__module__": package})
    layer, made = (nn.Linear, optimizer) if package == "ivon" else (kind, torch.optim.SGD)
    module = Plain(nn.Sequential(layer(6, 3)), optimizer=made)
    federate(module, fb.FederatedBayes(fb.IIDPartition(3), engine="sequential"), 1)
    found = [str(each.message) for each in recwarn if f"posterior of {package}'s" in str(each.message)]
    assert len(found) == 1
    assert "fb.IVON" in found[0] or "fb.bayesianize" in found[0]


def test_a_buffer_that_comes_after_the_federation_is_refused_by_name():
    class Late(Plain):
        def on_train_start(self):
            self.register_buffer("w", torch.ones(1))

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * getattr(self, "w", 1.0)

    with pytest.raises(FederationError, match=r"the buffers w were registered after.*on_train_start"):
        federate(Late(), fb.FederatedBayes(fb.IIDPartition(3), engine="vectorized"))
    federate(Late(), fb.FederatedBayes(fb.IIDPartition(3), engine="sequential"))


def test_outputs_that_are_probabilities_are_no_logits():
    module = nn.Sequential(network(), nn.Softmax(-1))
    loader = DataLoader(blobs(), batch_size=16)
    with pytest.raises(FedBayesError, match="probabilities, and logits are needed: leave the softmax out"):
        fb.Laplace().posterior(module, loader)
    fb.Laplace().posterior(module[0], loader)


def test_rounding_is_no_state():
    """Barlow Twins in single precision: correlations over a batch, large losses, and a bias without any gradient."""

    class Twins(Plain):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8)))

        def training_step(self, batch, batch_idx):
            first, second = (self.net(batch[0] + shift) for shift in (0.0, 0.1))
            first, second = ((z - z.mean(0)) / (z.std(0) + 1e-5) for z in (first, second))
            products = first.T @ second / len(first)
            return 100 * (products - torch.eye(8)).square().sum()

    federation = fb.FederatedBayes(fb.IIDPartition(3), engine="vectorized")
    federate(Twins(), federation, 1, DataLoader(TensorDataset(*blobs(96).tensors), batch_size=16))
    assert federation.history[0]["valid_clients"] == 3
