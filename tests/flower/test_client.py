"""A client over Flower: its checks, its state and its refusals."""

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.errors import FederationError
from lightning_fedbayes.flower import FusionStrategy, client_app, initial_arrays
from lightning_fedbayes.flower.client import StateFile
from tests.federations import Plain, network
from tests.flower.clients import BlobData, client_apps, hybrid, run
from tests.flower.grid import LocalGrid


class Plateau(Plain):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/nll"}}


class Wide(Plain):
    def __init__(self):
        super().__init__(torch.nn.Linear(6, 9))


REFUSALS = {
    "another network": (lambda: client_apps(make=Wide), "the global model and this client's network name different"),
    "too few parts": (
        lambda: [*client_apps()[:3], data_of_two()], "partition-id=3, but the data are those of 2 clients"
    ),
    "a schedule of a metric": (lambda: client_apps(make=Plateau), "ReduceLROnPlateau follows a validation metric"),
    "a Trainer that cuts rounds": (
        lambda: [client_app(hybrid(), BlobData(), trainer={"max_steps": 1})] * 4, "max_steps=1 stops inside a round"
    ),
}


def data_of_two():
    return client_app(hybrid(), BlobData(), partition=fb.IIDPartition(clients=2), trainer={"accelerator": "cpu"})


@pytest.mark.parametrize(("apps", "says"), REFUSALS.values(), ids=REFUSALS)
def test_clients_that_cannot_train_are_reported_at_the_server(apps, says, caplog):
    caplog.set_level("INFO")
    made = apps()
    strategy = FusionStrategy(wait_for=4)
    make = (lambda: Plain(network())) if "schedule" in says or "metric" in says else hybrid
    run(LocalGrid(made), strategy, rounds=1, make=make)
    assert says in caplog.text
    assert strategy.server.history[0]["failed_clients"] >= 1


@pytest.mark.parametrize("number", [None, -1, "0", 1.5, True])
def test_a_node_needs_a_number(number, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr("lightning_fedbayes.flower.roster.POLL_SECONDS", 0.01)
    grid = LocalGrid(client_apps(), numbers=[number] * 4)
    with pytest.raises(FederationError, match="0 of 1 clients are connected"):
        FusionStrategy(wait_for=1).start(grid, initial_arrays(hybrid()), timeout=0.05)
    assert f"partition-id is {number!r}" in caplog.text


@pytest.mark.parametrize("keeps", [
    {"local_parameters": ["network.3.*"]}, {"optimizer_state": "keep"}, {"buffers": "local"},
])
def test_state_of_a_client_needs_a_folder(keeps):
    with pytest.raises(FederationError, match="state_folder"):
        client_app(hybrid(), BlobData(), **keeps)


def test_bad_settings_are_refused_at_once():
    with pytest.raises(FederationError, match="did you mean 'average'"):
        client_app(hybrid(), BlobData(), buffers="averaged")
    with pytest.raises(FederationError, match="local_epochs=0"):
        client_app(hybrid(), BlobData(), local_epochs=0)


def test_a_client_makes_its_data_from_its_node():
    seen = []

    def data(context):
        seen.append(context.node_config["partition-id"])
        return BlobData()

    strategy = FusionStrategy()
    run(LocalGrid([client_app(hybrid(), data, trainer={"accelerator": "cpu"})] * 2), strategy, rounds=1)
    assert seen == [0, 1]
    assert strategy.server.history[0]["valid_clients"] == 2


def test_state_of_a_refused_round_is_forgotten(tmp_path):
    def state(server_round, accepted, federation="a"):
        config = {"federation": federation, "server-round": server_round, "accepted": accepted}
        return StateFile(tmp_path, 7, config)

    first = {7: {"local": {"w": torch.ones(2)}, "optimizers": []}}
    second = {7: {"local": {"w": torch.zeros(2)}, "optimizers": []}}
    assert state(1, 0).before == {}
    state(1, 0).write(first)
    assert state(2, 0).before == {}  # round 1 was not admitted
    assert torch.equal(state(2, 1).before[7]["local"]["w"], torch.ones(2))
    state(2, 1).write(second)
    assert torch.equal(state(3, 1).before[7]["local"]["w"], torch.ones(2))
    assert torch.equal(state(3, 2).before[7]["local"]["w"], torch.zeros(2))
    assert state(3, 2, federation="b").before == {}
    assert [path.name for path in tmp_path.iterdir()] == ["client-7.pt"]


def test_privacy_clips_updates_and_draws_fresh_noise_in_every_run():
    def posterior(privacy):
        strategy = FusionStrategy("weighted_average", wait_for=4, weighting="equal")
        apps = client_apps(make=lambda: Plain(network()), privacy=privacy)
        result = run(LocalGrid(apps), strategy, rounds=1, make=lambda: Plain(network()))
        assert "train_loss" not in result.train_metrics_clientapp[1]
        return strategy.server.posterior.flatten()[0]

    start = fb.read_posterior(Plain(network())).flatten()[0]
    clipped = [posterior(fb.UpdatePrivacy(clip=0.01, noise_multiplier=0.0)) for _ in range(2)]
    torch.testing.assert_close(*clipped, rtol=0, atol=0)
    assert 0 < (clipped[0] - start).norm() <= 0.01 * (1 + 1e-5)
    noisy = [posterior(fb.UpdatePrivacy(clip=0.01, noise_multiplier=50.0)) for _ in range(2)]
    spread = torch.stack([each - start for each in noisy])
    assert not torch.equal(*noisy)
    assert spread.std().item() == pytest.approx(0.01 * 50 / 4**0.5, rel=0.2)  # of the average of four clients


def test_privacy_refuses_buffers_when_the_app_is_made():
    with pytest.raises(FederationError, match="buffers unprotected"):
        client_apps(privacy=fb.UpdatePrivacy())
