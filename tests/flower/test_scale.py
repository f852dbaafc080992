"""The scale of clients' data over Flower: that of one process, kept by the server, and what may leave a client."""

import pytest
import torch
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.modules import mlp
from lightning_fedbayes.transport.flower import FusionStrategy, load_checkpoint
from tests.federations import blobs, federate
from tests.flower.clients import client_apps, run
from tests.flower.grid import LocalGrid
from tests.transport.federation import BlobData

pytestmark = pytest.mark.slow

PARTITION = fb.IIDPartition(4)


def data():
    x, labels = blobs().tensors
    return TensorDataset(x, labels * 500.0 + 1e4 + x[:, 0])


def make(**options):
    torch.manual_seed(0)
    return fb.HybridBayesianRegressor(mlp(6, 1, (5,)), learning_rate=1e-2, **options)


def apps(**settings):
    return client_apps(**{"make": make, **settings}, shared=False, data=lambda: BlobData(data()), partition=PARTITION)


def test_a_federation_over_flower_is_that_of_one_process(tmp_path):
    path = tmp_path / "server.pt"
    strategy = FusionStrategy("weighted_average", wait_for=4, seed=3, checkpoint=path)
    run(grid := LocalGrid(apps()), strategy, 1, make)
    once, train = ([sorted(reply.content["arrays"]) for *_, reply in grid.of(kind)] for kind in ("query.once", "train"))
    assert once == [["moments/inputs", "moments/targets"]] * 4
    assert not any("scale" in name for arrays in train for name in arrays)
    strategy = FusionStrategy("weighted_average", wait_for=4, seed=3, checkpoint=path)
    run(LocalGrid(apps()), strategy, 2, make)
    alone = make()
    federation = fb.FederatedBayes(PARTITION, fusion="weighted_average", engine="sequential", seed=3)
    federate(alone, federation, 2, BlobData(data()).train_dataloader())
    found = make()
    load_checkpoint(found, path)
    assert torch.equal(found.scaler.target_units, alone.scaler.target_units)
    mean = data().tensors[1].double().mean().item()
    assert found.scaler.target_units[0].item() == pytest.approx(mean, rel=1e-10)
    for name, value in alone.named_parameters():
        assert torch.equal(dict(found.named_parameters())[name], value), name


def fixed(**options):
    return make(noise="fixed", noise_std=100.0, **options)  # no buffer that privacy refuses


def private(folder, make=fixed, **settings):
    return apps(make=make, privacy=fb.UpdatePrivacy(clip=1.0, noise_multiplier=1.0), state_folder=folder, **settings)


def test_a_private_client_sends_none_unless_it_is_allowed_and_trains_where_the_scale_is_known(tmp_path, caplog):
    strategy = FusionStrategy("weighted_average", wait_for=4, seed=3)
    with pytest.raises(FederationError, match="no client's answer can be used"):
        run(LocalGrid(private(tmp_path)), strategy, 1, fixed)
    assert "exact=['scale'] at the client would allow it" in caplog.text
    strategy = FusionStrategy("weighted_average", wait_for=4, seed=3)
    run(LocalGrid(private(tmp_path, exact=["scale"])), strategy, 1, fixed)

    def known():
        return fixed(scaler=fb.FederatedScaler(targets=(1e4, 500.0)))

    strategy = FusionStrategy("weighted_average", wait_for=4, seed=3)
    run(LocalGrid(private(tmp_path, known)), strategy, 1, known)
    assert strategy.server.rounds == 1
