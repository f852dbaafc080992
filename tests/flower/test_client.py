"""A client over Flower: its checks, its state and its refusals."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from flwr.app import ConfigRecord

import lightning_fedbayes as fb
from lightning_fedbayes.clients.privacy.accountant import epsilon_spent
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.transport.checkpoint import StateFile
from lightning_fedbayes.transport.flower import FusionStrategy, client_app, initial_arrays, personal_posterior
from lightning_fedbayes.transport.flower.wire import from_arrays
from tests.federations import Plain, network
from tests.flower.clients import client_apps, run
from tests.flower.grid import LocalGrid
from tests.flower.test_wire import frozen
from tests.refusals import refusals
from tests.transport.federation import BlobData, hybrid


class Plateau(Plain):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/nll"}}


NAMES = "the global model and this client's network name different"
FEW = "this is client 3, but the data are those of 2 clients"
FROZEN = "frozen parameters of this client's module are not the server's"
METRIC = "ReduceLROnPlateau follows a validation metric"
REFUSALS = {
    "another network": (lambda: client_apps(make=lambda: Plain(torch.nn.Linear(6, 9))), NAMES),
    "too few parts": (lambda: [*client_apps(3), *client_apps(1, partition=fb.IIDPartition(2))], FEW),
    "a schedule of a metric": (lambda: client_apps(make=Plateau), METRIC),
    "other frozen weights": (lambda: client_apps(make=partial(frozen, seed=1)), FROZEN),
    "weights trained here": (lambda: client_apps(make=partial(frozen, layers=())), "net.0.weight"),
    "a Trainer that cuts rounds": (lambda: client_apps(trainer={"max_steps": 1}), "max_steps=1 stops inside a round"),
}


@pytest.mark.parametrize(("apps", "says"), REFUSALS.values(), ids=REFUSALS)
def test_clients_that_cannot_train_say_why_and_are_left_out_at_the_server(apps, says, caplog):
    caplog.set_level("INFO")
    strategy = FusionStrategy(wait_for=4)
    servers = {METRIC: Plain, FROZEN: frozen, "net.0.weight": frozen}
    run(LocalGrid(apps()), strategy, rounds=1, make=servers.get(says, hybrid))
    assert says in caplog.text
    assert strategy.server.history[0]["failed_clients"] >= 1


@pytest.mark.parametrize("number", [None, -1, "0", 1.5, True])
def test_a_node_needs_a_number(number, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr("lightning_fedbayes.transport.flower.roster.POLL_SECONDS", 0.01)
    grid = LocalGrid(client_apps(), numbers=[number] * 4)
    with pytest.raises(FederationError, match="0 of 1 clients have answered"):
        FusionStrategy(wait_for=1).start(grid, initial_arrays(hybrid()), timeout=0.05)
    assert f"partition-id is {number!r}" in caplog.text


test_apps_that_cannot_be_are_refused = refusals(
    FederationError,
    ({"local_parameters": ["network.3.*"]}, "state_folder"),
    ({"keep": ["optimizer"]}, "state_folder"),
    ({"buffers": "local"}, "state_folder"),
    ({"privacy": fb.UpdatePrivacy()}, "state_folder"),
    ({"privacy": fb.UpdatePrivacy(), "state_folder": "/nowhere"}, "buffers unprotected"),
    call=lambda options: client_app(hybrid(), BlobData(), **options),
)


def state(folder, server_round, accepted, federation="a", client=7):
    return StateFile(folder, client, {"federation": federation, "server-round": server_round, "accepted": accepted})


def test_state_of_a_refused_round_is_forgotten(tmp_path):
    first = {7: {"local": {"w": torch.ones(2)}, "optimizers": []}}
    second = {7: {"local": {"w": torch.zeros(2)}, "optimizers": []}}
    assert state(tmp_path, 1, 0).before == {}
    state(tmp_path, 1, 0).write(first)
    assert state(tmp_path, 2, 0).before == {}  # round 1 was not admitted
    assert torch.equal(state(tmp_path, 2, 1).before[7]["local"]["w"], torch.ones(2))
    state(tmp_path, 2, 1).write(second)
    assert torch.equal(state(tmp_path, 3, 1).before[7]["local"]["w"], torch.ones(2))
    assert torch.equal(state(tmp_path, 3, 2).before[7]["local"]["w"], torch.zeros(2))
    assert state(tmp_path, 3, 2, federation="b").before == {}
    assert [path.name for path in tmp_path.iterdir()] == ["client-7.pt"]


@pytest.mark.parametrize("share", [None, 0.0, 0.5, 0.99])
def test_a_client_whose_state_is_torn_or_gone_counts_the_rounds_before_and_says_so(tmp_path, share):
    for server_round in (1, 2, 3):
        state(tmp_path, server_round, server_round - 1).write({7: {"local": {"w": torch.ones(2)}, "optimizers": []}})
    path, privacy = tmp_path / "client-7.pt", fb.UpdatePrivacy()
    whole, says = path.read_bytes(), r"client-7\.pt is damaged .*: client 7 starts anew"
    path.unlink()
    if share is None:
        says = "no account of the private messages that the server has had"
        assert state(tmp_path, 4, 0).count(privacy) == privacy.figures(1)["privacy/epsilon"], "its first message"
    else:
        path.write_bytes(whole[: int(share * len(whole))])

    def counted():
        torn = state(tmp_path, 4, 3)
        return torn, torn.count(privacy)

    with pytest.warns(UserWarning, match=says):
        torn, spent = counted()
    assert torn.before == {}
    assert spent == privacy.figures(4)["privacy/epsilon"], "with the rounds before"
    torn.write({})
    assert state(tmp_path, 5, 4).messages == {1.0: 4}


STATE = {
    **{"client": 7, "federation": "a", "round": 3, "secret": "s"},
    **{"steps": {}, "messages": {}, "before": {}, "after": {}},
}
WRONG_STATES = {
    "nothing": {},
    "a list": [],
    "a pickle of other classes": hybrid(),
    "another file": {"state_dict": {"w": torch.zeros(2)}},
    "no federation": {name: value for name, value in STATE.items() if name != "federation"},
    "another client": {**STATE, "client": 3, "messages": {1.0: 1}},
    "no secret": {**STATE, "secret": 3},
    "no messages": {**STATE, "messages": None},
    "a word for a count": {**STATE, "messages": {1.0: "x"}},
    "another round": {**STATE, "round": None},
    "another state": {**STATE, "after": {7: {"weights": 1}}},
    "no tensors": {**STATE, "after": {7: {"local": {"w": 1}}}},
    "no client": {**STATE, "after": {"x": {}}},
    "half a posterior": {**STATE, "after": {7: {"own": {"mean": {}}}}},
}


@pytest.mark.parametrize("wrong", WRONG_STATES)
def test_a_file_that_is_no_state_of_a_client_is_named(tmp_path, wrong):
    torch.save(WRONG_STATES[wrong], tmp_path / "client-7.pt")
    with pytest.warns(UserWarning, match=r"(?s)client-7\.pt is no state of a client .*: client 7 starts anew"):
        anew = state(tmp_path, 4, 3)
    assert anew.before == anew.messages == {}
    privacy = fb.UpdatePrivacy()
    assert anew.count(privacy) == privacy.figures(4)["privacy/epsilon"], "with the rounds before"
    with pytest.raises(FederationError, match=r"client-7\.pt is no state of a client"):
        personal_posterior(hybrid(), tmp_path, 7, fb.read_posterior(hybrid()))


@pytest.mark.parametrize("entries", [3, 10**6])
def test_a_full_disk_is_named_and_leaves_the_state_before(tmp_path, entries):
    state(tmp_path, 1, 0).write({7: {"local": {"w": torch.ones(2)}, "optimizers": []}})
    (tmp_path / "client-7.pt.new").symlink_to("/dev/full")
    kept = state(tmp_path, 2, 1)
    with pytest.raises(FederationError, match=r"client-7\.pt cannot be written: .*disk full.*is whole; make room"):
        kept.write({7: {"local": {"w": torch.zeros(entries)}}})
    assert torch.equal(state(tmp_path, 2, 1).before[7]["local"]["w"], torch.ones(2))
    assert [path.name for path in tmp_path.iterdir()] == ["client-7.pt"]


def test_messages_of_several_noises_are_of_one_account(tmp_path):
    kept, kinds = state(tmp_path, 1, 0), (1.0, 4.0, 4.0)
    spent = [kept.count(fb.UpdatePrivacy(noise_multiplier=noise)) for noise in kinds][-1]
    assert spent == epsilon_spent([(1.0, 1.0, 1), (4.0, 1.0, 2)], 1e-5)
    assert kept.secret != state(tmp_path, 1, 0, client=8).secret


def test_every_private_message_is_counted_and_the_server_reports_the_largest_epsilon(tmp_path):
    """A round that is asked for again counts again, and has the old noise only where the client has learnt the same."""
    privacy = fb.UpdatePrivacy(clip=0.1, noise_multiplier=2.0)
    settings = {"make": lambda: Plain(network()), "privacy": privacy, "state_folder": tmp_path}
    strategy = FusionStrategy("weighted_average", wait_for=4, checkpoint=tmp_path / "server.pt")
    grid = LocalGrid(client_apps(**settings, shared=False))
    run(grid, strategy, rounds=2, make=settings["make"])
    spent = [row["privacy/epsilon"] for row in strategy.server.history]
    assert spent == pytest.approx([privacy.figures(1)["privacy/epsilon"], privacy.figures(2)["privacy/epsilon"]])
    questions = list(strategy.configure_train(3, initial_arrays(settings["make"]()), ConfigRecord(), grid))
    first, second = (grid.send_and_receive(questions[:1])[0] for _ in range(2))
    assert [reply.content["metrics"]["privacy/epsilon"] for reply in (first, second)] == pytest.approx(
        [privacy.figures(count)["privacy/epsilon"] for count in (3, 4)]
    )
    assert state(tmp_path, 1, 0, "another", client=0).messages == {2.0: 4}, "no server resets it"
    sent = [from_arrays(reply.content["arrays"], "client")[0].flatten()[0] for reply in (first, second)]
    assert torch.equal(*sent)
    other = strategy.configure_train(3, initial_arrays(Plain(network(seed=1))), ConfigRecord(), grid)
    third = grid.send_and_receive(list(other)[:1])[0].content["arrays"]
    assert not torch.equal(sent[0], from_arrays(third, "client")[0].flatten()[0])


@pytest.mark.parametrize(
    ("fusion", "make", "other"), [("sites", hybrid, None), ("sites", hybrid, "client-3.pt"), ("scaffold", Plain, None)]
)
def test_a_client_without_its_own_site_is_left_out_until_the_server_has_told_it(tmp_path, fusion, make, other):
    """Its data are in the posterior: it would count them twice. The server knows what it has counted."""
    apps = {"fusion": fusion, "state_folder": tmp_path, "make": make}
    strategy = FusionStrategy(fusion, wait_for=4, checkpoint=tmp_path / "server.pt")
    run(LocalGrid(client_apps(**apps)), strategy, rounds=1, make=make)
    (tmp_path / "client-2.pt").unlink()
    if other is not None:
        (tmp_path / other).rename(tmp_path / "client-2.pt")
    options = {"wait_for": 4, "checkpoint": tmp_path / "server.pt", "safeguards": fb.Safeguards(min_clients=2)}
    with pytest.warns(UserWarning, match="is of client 3") if other else nullcontext():
        for rounds in (2, 3):  # the second server goes on from the first one's checkpoint
            strategy = FusionStrategy(fusion, **options)
            run(LocalGrid(client_apps(**apps)), strategy, rounds=rounds, make=make)
    assert [row["valid_clients"] for row in strategy.server.history] == [4, 3 if other is None else 2, 4]
    for client in range(4):
        kept = torch.load(tmp_path / f"client-{client}.pt", weights_only=True)["after"][client]["kept"]
        for name, value in strategy.server.sites[client].items():
            assert torch.equal(kept[name], value)
