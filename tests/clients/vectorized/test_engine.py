"""Clients that fail, and the module and optimizer during a round."""

import logging

import lightning as L
import pytest
import torch
from torch.utils.data import Dataset

import lightning_fedbayes as fb
from lightning_fedbayes.clients.vectorized import engine as vectorized
from tests.federations import CLASSES, Plain, assert_equal, blobs, federate, loader, parameters


class Torn(Dataset):
    """Example 7 cannot be read; example 3 has a label that the network has not."""

    def __init__(self, fault: str) -> None:
        self.inner, self.fault = blobs(24), fault

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if self.fault == "torn" and index == 7:
            raise OSError("truncated file")
        x, y = self.inner[index]
        if self.fault == "label" and index == 3:
            y = torch.tensor(CLASSES + 5)
        if self.fault == "nan" and index == 3:
            x = x * float("nan")
        return x, y


@pytest.mark.parametrize("fault", ["torn", "label", "nan"])
def test_a_client_with_bad_data_is_left_out_and_the_others_end_as_without_it(fault, caplog):
    names = ("first", "bad", "last")
    parts = {name: Torn(fault if name == "bad" else "none") for name in names}
    federation = fb.FederatedBayes(engine="vectorized", keep=["optimizer"])
    module = Plain()
    with caplog.at_level(logging.INFO):
        federate(module, federation, 2, loader(fb.ClientDatasets(parts)))
    assert [row["failed_clients"] for row in federation.history] == [1, 1]
    assert sum("client bad is left out" in line for line in caplog.messages) == 2

    class OnlyGood(Plain):  # the same by the reference, which trains the good clients under their own numbers
        def training_step(self, batch, batch_idx):
            if self.client.number == 1:
                raise RuntimeError("left out")
            return super().training_step(batch, batch_idx)

        def on_client_start(self, client):
            self.client = client

    reference = OnlyGood()
    federate(reference, fb.FederatedBayes(engine="sequential", keep=["optimizer"]), 2, loader(fb.ClientDatasets(parts)))
    for (name, value), other in zip(reference.named_parameters(), module.parameters()):
        torch.testing.assert_close(other, value, rtol=1e-5, atol=1e-6, msg=name)


def test_a_client_that_has_failed_comes_back_in_the_next_round():
    class Later(Plain):
        def training_step(self, batch, batch_idx):
            if self.current_epoch == 1:
                raise RuntimeError("a bad day")
            return super().training_step(batch, batch_idx)

    federation = fb.FederatedBayes(fb.IIDPartition(3), engine="vectorized")
    federate(Later(), federation, 3)
    assert [row["failed_clients"] for row in federation.history] == [0, 3, 0]


def test_the_module_holds_the_global_model_during_a_round_and_the_optimizer_its_own_parameters_after_it(monkeypatch):
    monkeypatch.setattr(vectorized, "STEPS_PER_BATCH", 1)
    seen = []

    class Spy(L.Callback):
        sees_stacks = True

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx + 1 < trainer.num_training_batches:
                seen.append((trainer.current_epoch, parameters(pl_module)))

        def on_train_epoch_end(self, trainer, pl_module):
            held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
            assert all(a is b for a, b in zip(held, pl_module.parameters(), strict=True))
            assert not trainer.optimizers[0].state

    module = Plain()
    start = parameters(module)
    federate(module, fb.FederatedBayes(fb.IIDPartition(3), engine="vectorized"), 2, callbacks=[Spy()])
    assert_equal(seen[0][1], start)
    assert_equal(seen[-1][1], next(p for epoch, p in seen if epoch == 1))
    assert "log" not in vars(module)
