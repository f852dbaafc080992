"""The scale of clients' data over FLARE is that of one process, and stays at the server."""

import pytest

pytest.importorskip("nvflare")

import torch

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import federate
from tests.flower.test_scale import PARTITION, data, fixed, make
from tests.nvflare.local import clients, run
from tests.transport.federation import BlobData

pytestmark = pytest.mark.slow


def own():
    return BlobData(data())


def test_a_federation_over_flare_is_that_of_one_process():
    sent, alone = [], make()
    made = clients(make=make, data=own, partition=PARTITION, fusion="weighted_average")
    controller = run(made, "weighted_average", make=make, rounds=2, seed=3, sent=sent)
    federation = fb.FederatedBayes(PARTITION, fusion="weighted_average", engine="sequential", seed=3)
    federate(alone, federation, 2, own().train_dataloader())
    assert torch.equal(controller.server.buffers["scale/target_units"], alone.scaler.target_units)
    assert all(
        torch.equal(mean, federation.posterior.mean[name]) for name, mean in controller.server.posterior.mean.items()
    )
    assert [each.meta["kind"] for each in sent] == ["scale"] * 4 + ["update"] * 8


def test_private_clients_send_none(tmp_path):
    private = {"privacy": fb.UpdatePrivacy(clip=1.0, noise_multiplier=1.0), "state_folder": tmp_path}
    with pytest.raises(FederationError, match="no client's answer can be used"):
        run(
            clients(make=fixed, data=own, partition=PARTITION, fusion="weighted_average", **private),
            "weighted_average",
            make=fixed,
            rounds=1,
        )
