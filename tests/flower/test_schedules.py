"""Learning rates that move in every step end over networks where they end in one process."""

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import random_split

import lightning_fedbayes as fb
from lightning_fedbayes.transport.flower import FusionStrategy
from tests.federations import assert_equal, blobs, federate, loader
from tests.flower.clients import client_apps, run
from tests.flower.grid import LocalGrid
from tests.trainer.test_schedules import Own, Told
from tests.transport.federation import BlobData

ROUNDS = 3


def parts(sizes=(12, 20, 36)):
    found = random_split(blobs(sum(sizes)), sizes, torch.Generator().manual_seed(0))
    return fb.ClientDatasets({str(client): part for client, part in enumerate(found)})


class Data(BlobData):
    """Clients of 3, 5 and 9 batches."""

    def __init__(self, dataset=None):
        super().__init__(parts() if dataset is None else dataset)

    def train_dataloader(self):
        return loader(self.dataset, batch_size=4)


RATES = {}


class Noted(Told):
    """Notes the rates of each client, which another process of the client would not."""

    def note(self, optimizer, *_):
        RATES.setdefault(self.client, []).append((optimizer.param_groups[0]["lr"], self.trainer.global_step))


class Estimated(Noted):
    def __init__(self):
        super().__init__("cosine")

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()["optimizer"]
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["initial_lr"] = 0.1
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [{"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, steps), "interval": "step"}]


class Stepping(Own, Noted):
    pass


MODULES = {
    **{name: lambda name=name: Noted(name) for name in ("one cycle", "cosine", "warm-up", "one after the other")},
    "of the estimated steps": Estimated,
    "in the step": lambda: Stepping("in the step"),
    "after the batch": lambda: Stepping("after the batch"),
}


def alone(make, rounds=ROUNDS, data=Data, **options):
    federation = fb.FederatedBayes(engine="sequential", seed=3, fusion="rklb", **options)
    federate(make(), federation, rounds, data().train_dataloader())
    return federation.posterior


def taken():
    found = dict(RATES)
    RATES.clear()
    return found


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("shared", [True, False], ids=["simulation", "deployment"])
def test_rates_and_weights_are_those_of_one_process(make, shared):
    taken()
    wanted, rates = alone(make, rounds=2), taken()
    strategy = FusionStrategy(wait_for=3, seed=3)
    grid = LocalGrid(client_apps(3, make, shared, Data, partition=None))
    run(grid, strategy, make=make, rounds=2)
    assert taken() == rates
    assert_equal(strategy.server.posterior.mean, wanted.mean)
