"""Bad clients do not hurt a round, and a server that dies goes on where it was."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.transport.flower import FusionStrategy, load_checkpoint
from lightning_fedbayes.transport.flower.wire import records_of
from tests.federations import Crash, Plain, network
from tests.flower.clients import assert_same, client_apps, run
from tests.flower.grid import LocalGrid
from tests.refusals import refusals
from tests.transport.federation import hybrid, in_process

MEAN, VARIANCE = "mean/network.0.weight", "variance/network.3.weight"


def resend(reply, drop=(), **changes):
    """The reply with other contents: record → key → value, None to leave it out."""
    kinds, records = {"arrays": ArrayRecord, "metrics": MetricRecord, "config": ConfigRecord}, {}
    for name in kinds.keys() & reply.content.keys() - {*drop}:
        content = {**reply.content[name], **changes.get(name, {})}
        records[name] = kinds[name]({key: value for key, value in content.items() if value is not None})
    changed = Message(RecordDict(records), reply_to=reply)
    changed.metadata.__dict__.update(reply.metadata.__dict__)
    return changed


def with_mean(value):
    return lambda reply: resend(reply, arrays={MEAN: Array(value)})


def nan(reply):
    values = reply.content["arrays"][MEAN].numpy().copy()
    values[0, 0] = np.nan
    return resend(reply, arrays={MEAN: Array(values)})


BAD = {
    "NaN": (nan, "not finite at 1 of 30"),
    "extra key": (lambda r: resend(r, arrays={"mean/extra": Array(np.zeros(2, "f4"))}), "only client 1 has"),
    "key of no kind": (lambda r: resend(r, arrays={"extra": Array(np.zeros(2, "f4"))}), "is none of mean/"),
    "integers": (with_mean(np.zeros((5, 6), "i8")), "floating-point"),
    "text": (with_mean(np.full((5, 6), "x")), "cannot be read"),
    "no variance": (lambda r: resend(r, arrays={VARIANCE: None}), "must send the variances"),
    "buffer of another dtype": (
        lambda r: resend(r, arrays={"buffer/network.1.num_batches_tracked": Array(np.array(3.0))}),
        "dtypes",
    ),
    "an old round": (lambda r: resend(r, config={"server-round": 1}), "is of round 1, and this is round 2"),
    "no arrays": (lambda r: resend(r, drop=["arrays"]), "no arrays"),
    "death": (lambda r: None, "no reply within 1 s"),
}


def in_rounds(change, first, last=99):
    """``change`` in the rounds from ``first`` to ``last``."""
    return lambda reply: change(reply) if first <= int(reply.metadata.group_id) <= last else reply


def lost(reply):
    return None


@pytest.fixture(scope="module")
def without():
    """The federation in one process whose client 1 fails in the second of two rounds."""

    class Fails(fb.HybridBayesianClassifier):
        def on_client_start(self, client):
            super().on_client_start(client)
            if (client.number, client.round) == (1, 1):
                raise RuntimeError("out of order")

    def make():
        module = hybrid()
        module.__class__ = Fails
        return module

    return in_process(rounds=2, make=make)


@pytest.mark.parametrize(("change", "says"), BAD.values(), ids=BAD)
def test_a_bad_client_is_left_out_of_its_round(change, says, without, caplog):
    caplog.set_level("INFO")
    strategy = FusionStrategy(wait_for=4)
    run(LocalGrid(client_apps(), {1: in_rounds(change, 2)}), strategy, rounds=2)
    assert strategy.server.history[0]["valid_clients"] == 4
    assert strategy.server.history[1]["valid_clients"] == 3
    assert strategy.server.history[1]["failed_clients"] == 1
    assert strategy.server.accepted == {0: 2, 1: 1, 2: 2, 3: 2}
    assert says in caplog.text
    assert_same(strategy, without)


@pytest.mark.parametrize("shared", [True, False])
def test_a_client_that_raises_is_left_out_and_its_text_stays_with_it(shared, caplog):
    caplog.set_level("INFO")

    class Raises(Plain):
        def on_client_start(self, client):
            if client.number == 2:
                raise RuntimeError("cannot parse row 17: name=...")

    strategy = FusionStrategy("weighted_average", wait_for=4)
    run(LocalGrid(client_apps(make=Raises, share_errors=shared)), strategy, rounds=2, make=Raises)
    assert [figures["valid_clients"] for figures in strategy.server.history] == [3, 3]
    of_server = [each.message for each in caplog.records if not each.name.startswith("lightning_fedbayes")]
    assert any("client 2 failed in training: RuntimeError" in line for line in of_server)
    assert any("row 17" in line for line in of_server) == shared
    of_client = [each for each in caplog.records if each.name == "lightning_fedbayes.transport.client"]
    assert "row 17" in of_client[0].message
    assert of_client[0].exc_info is not None


def test_of_an_update_that_cannot_be_written_the_class_leaves_and_no_text(monkeypatch):
    def written(sent):
        if (sent.kind, sent.client) == ("update", 2):
            raise RuntimeError("cannot parse row 17: name=...")
        return records_of(sent)

    monkeypatch.setattr("lightning_fedbayes.transport.flower.apps.records_of", written)
    run(grid := LocalGrid(client_apps(make=Plain)), FusionStrategy(wait_for=4), rounds=1, make=Plain)
    assert not any(reply.has_error() for *_, reply in grid.seen)  # of whose reason Flower makes the text
    (reply,) = (reply for client, _, reply in grid.of("train") if client == 2)
    assert {"error": "RuntimeError", "stage": "training"}.items() <= dict(reply.content["config"]).items()
    assert "row 17" not in str(reply.content)


def test_too_many_failed_rounds_stop_the_run_and_keep_what_is_learnt(tmp_path):
    bad = dict.fromkeys(range(4), in_rounds(nan, 2))
    twice = fb.Safeguards(max_failed_rounds=2)
    strategy = FusionStrategy(wait_for=4, safeguards=twice, checkpoint=tmp_path / "server.pt")
    with pytest.raises(FederationError, match=r"2 rounds in a row.*: client 0: mean of .* is not finite"):
        run(LocalGrid(client_apps(), bad), strategy, rounds=9)
    one = FusionStrategy(wait_for=4)
    run(LocalGrid(client_apps()), one, rounds=1)
    kept = load_checkpoint(model := hybrid(), tmp_path / "server.pt")
    assert (kept.rounds, len(kept.history)) == (3, 3)
    assert torch.equal(model.network[0].weight, one.server.posterior.mean["network.0.weight"])
    assert torch.equal(model.network[1].running_mean, one.server.buffers["network.1.running_mean"])
    assert torch.equal(kept.posterior.mean["network.0.weight"], one.server.posterior.mean["network.0.weight"])


@pytest.mark.parametrize("fusion", ["reverse_kl_barycenter", "ivar_vb"])
def test_a_server_that_dies_inside_a_round_ends_where_another_does(tmp_path, fusion):
    def dies(reply):
        raise Crash

    whole = FusionStrategy(fusion, wait_for=4, fraction=0.75, seed=2)
    run(LocalGrid(client_apps()), whole, rounds=4)
    path = tmp_path / "folder" / "server.pt"
    dead = FusionStrategy(fusion, wait_for=4, fraction=0.75, seed=2, checkpoint=path)
    with pytest.raises(Crash):
        run(LocalGrid(client_apps(), dict.fromkeys(range(4), in_rounds(dies, 3))), dead, rounds=4)
    grid = LocalGrid(client_apps(shared=False))
    resumed = FusionStrategy(fusion, wait_for=4, fraction=0.75, seed=2, checkpoint=path)
    result = run(grid, resumed, rounds=4)
    assert [kind for kind, _ in grid.asked] == ["query", "train", "train"]
    assert set(result.train_metrics_clientapp) == {3, 4}
    assert [figures["round"] for figures in resumed.server.history] == [1, 2, 3, 4]
    assert [figures["round"] for figures in result.train_metrics_clientapp.values()] == [3, 4]
    assert_same(resumed, whole.server)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"seed": 1}, r"seed=1 \(was 0\)"), ({"make": lambda: Plain(network())}, "name different parameters")],
)
def test_a_checkpoint_of_another_federation_is_refused(change, says, tmp_path):
    path = tmp_path / "server.pt"
    run(LocalGrid(client_apps()), FusionStrategy(wait_for=4, checkpoint=path), rounds=1)
    make = change.pop("make", hybrid)
    with pytest.raises(FederationError, match=says):
        run(LocalGrid(client_apps(make=make)), FusionStrategy(wait_for=4, checkpoint=path, **change), make=make)


def test_a_number_belongs_to_the_first_node_that_claims_it(caplog):
    caplog.set_level("INFO")
    grid = LocalGrid(client_apps(), numbers=[0, 1, 1, None])  # nodes ask in the order of their ids: client 3 is first
    strategy = FusionStrategy(wait_for=2)
    run(grid, strategy, rounds=1)
    assert strategy.server.history[0]["valid_clients"] == 2
    assert "another node is client 1, too" in caplog.text
    assert "partition-id is None" in caplog.text


test_bad_arguments_are_refused_at_once = refusals(
    fb.FedBayesError,
    ({"fusion": "conflatoin"}, "did you mean 'conflation'"),
    ({"fraction": 0}, "fraction=0"),
    *[({"logger": wrong}, "give one of Lightning's loggers") for wrong in ("wandb", 3, [None])],
    ({"safeguards": fb.Safeguards(min_clients=3), "wait_for": 4, "fraction": 0.5}, "a round has only 2 of 4 clients"),
    call=lambda arguments: FusionStrategy(**arguments),
)
