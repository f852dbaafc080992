"""Federations without rounds in a Trainer: equal to rounds without delays, resumed bit by bit, guarded as ever."""

import pytest
import torch

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import NotANumber, ScaledUpdate
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.methods import FedAsync, FedBuff
from tests.callbacks.test_resume import PERSONAL, Everything, everything, state
from tests.federations import Plain, assert_equal, bayesian, federate, loader, network, quiet_checkpoints, saving

SIZES = (30, 24, 16, 12, 8)
DELAYS = fb.Delays(slow={0: 10.0}, away=((3, 2.0, 5.0),))
SETTINGS = {
    "sites": {"fusion": "sites", "local_epochs": 2},
    "ivon": {"fusion": "sites"},
    "everything": {**PERSONAL, "fusion": "fedavg"},
    "adam": {"fusion": "fedadam", "keep": ["optimizer"]},
    "barycenter": {"fusion": "rklb"},
}
SAME = ("seconds", "schedule/")

pytestmark = quiet_checkpoints


def fit(setting, schedule, rounds=4, engine="vectorized", folder=None, ckpt_path=None, **options):
    module = Plain(network(batch_norm=True), optimizer=fb.IVON) if setting == "ivon" else Everything()
    federation = fb.FederatedBayes(
        fb.SizesPartition(SIZES), seed=3, engine=engine, schedule=schedule, **{**SETTINGS[setting], **options}
    )
    extra = {} if folder is None else saving(folder)
    made = federate(module, federation, rounds, loader(), loader(shuffle=False), ckpt_path, **extra)
    return module, federation, made


def figures(federation):
    return [{name: value for name, value in row.items() if not name.startswith(SAME)} for row in federation.history]


def untimed(fitted):
    return {name: value for name, value in state(*fitted).items() if "schedule/" not in name}


@pytest.mark.parametrize(("setting", "engine"), list(zip(SETTINGS, ["sequential", "vectorized"] * 3)))
def test_without_delays_a_buffer_of_all_is_the_federation_by_rounds(setting, engine):
    rounds = fit(setting, None, engine=engine)
    without = fit(setting, fb.Asynchronous(buffer=5, delays=fb.Delays(0.0)), engine=engine)
    assert_equal(untimed(rounds), untimed(without))
    assert figures(rounds[1]) == figures(without[1])


SCHEDULES = {
    "half": fb.Asynchronous(delays=DELAYS),
    "few": fb.Asynchronous(3, 1, DELAYS, max_staleness=2),
    "fedasync": fb.Asynchronous(buffer=1, delays=DELAYS, late=FedAsync()),
}


def fit_in(folder, setting, name, rounds=9, ckpt_path=None, disk=False, engine="vectorized"):
    keep = fb.Kept(["optimizer", "posterior"], folder / "clients" if disk else None)
    return fit(setting, SCHEDULES[name], rounds, engine, folder, ckpt_path, keep=keep)


@pytest.mark.parametrize(
    ("setting", "name", "engine", "disk"),
    [
        ("sites", "half", "sequential", True),
        ("everything", "few", "vectorized", True),
        ("ivon", "few", "vectorized", False),
        ("adam", "fedasync", "sequential", False),
    ],
)
def test_an_interrupted_federation_ends_as_one_that_was_not(tmp_path, setting, name, engine, disk):
    whole = fit_in(tmp_path / "whole", setting, name, engine=engine)
    fit_in(tmp_path / "parts", setting, name, 4, disk=disk, engine=engine)
    parts = fit_in(tmp_path / "parts", setting, name, ckpt_path="last", disk=disk, engine=engine)
    assert_equal(everything(*whole), everything(*parts))
    assert figures(whole[1]) == figures(parts[1])
    assert any(row["schedule/largest_staleness"] > 0 for row in whole[1].history)


def test_another_schedule_does_not_go_on(tmp_path):
    fit_in(tmp_path, "sites", "half", 2)
    with pytest.raises(FederationError, match="checkpoint is of another federation: schedule="):
        fit_in(tmp_path, "sites", "few", 3, ckpt_path="last")


@pytest.mark.slow
@pytest.mark.parametrize("bound", [2.0, None])
def test_every_site_counts_once(bound):
    schedule = fb.Asynchronous(buffer=2, delays=DELAYS)
    _, federation, _ = fit("sites", schedule, 12, safeguards=fb.Safeguards(max_influence=bound))
    server, states = federation.federation.server, federation.federation.engine.states
    random = server.posterior.flatten()[1] > 0
    kept = [states.of(client).kept for client in range(5) if states.of(client).kept]
    assert len(kept) >= 4
    for name in fb.Sites.sent:
        total = sum(each[name] for each in kept)
        torch.testing.assert_close(server.buffers[f"method/{name}"], total, rtol=0, atol=1e-12)
    sizes = [value.numel() for value in server.posterior.variance.values() if bool((value > 0).any())]
    start = server.buffers["method/start"].repeat_interleave(torch.tensor(sizes))
    precision = 1 + server.buffers["method/precision"].clamp_min(0) * 5 / len(kept) + start
    torch.testing.assert_close(server.posterior.flatten()[1][random], 1 / precision, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_only_what_is_under_way_is_remembered():
    _, federation, _ = fit("sites", fb.Asynchronous(buffer=1, delays=DELAYS, max_staleness=8), 20)
    server, sent = federation.federation.server, federation.federation.in_flight.sent.values()
    assert server.versions.begun.keys() == {each.started for each in sent if each.started >= 20 - 8}
    refused = [row["failed_clients"] for row in federation.history]
    assert sum(refused) >= 1
    assert "versions of the global posterior late, more than max" in str(federation._report.records.last_failure)


def test_a_client_that_fails_while_it_is_under_way_is_left_out_when_it_arrives():
    schedule = fb.Asynchronous(buffer=1, delays=fb.Delays(spread=0.0, slow={1: 0.5}))
    _, federation, _ = fit(
        "barycenter", schedule, 4, adversaries=NotANumber(clients=[2]), safeguards=fb.Safeguards(max_failed_rounds=9)
    )
    failed = [row["failed_clients"] for row in federation.history]
    assert sum(failed) == 1
    assert failed[0] == 0.0


def test_privacy_counts_messages_that_have_arrived():
    privacy = fb.UpdatePrivacy(1.0, 4.0)
    module = Plain(lr=0.05)
    options = {"fusion": "fedavg", "privacy": privacy, "weighting": "equal"}
    schedule = fb.Asynchronous(buffer=1, delays=DELAYS)
    federation = fb.FederatedBayes(fb.SizesPartition(SIZES), schedule=schedule, **options)
    made = federate(module, federation, 9)
    most = max(federation._report.records.rounds)
    assert most < 9
    assert float(made.callback_metrics["privacy/epsilon"]) == pytest.approx(privacy.figures(most)["privacy/epsilon"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(("fusion", "late"), [("sites", FedBuff()), ("linear_pool", FedBuff()), ("rklb", FedAsync())])
def test_attackers_are_bounded_as_they_are_in_rounds(fusion, late, engine):
    """A liar that is ten times as fast as the others, one of ten."""
    found = []
    for attack in (None, ScaledUpdate(clients=[4], factor=50.0)):
        schedule = fb.Asynchronous(buffer=1, delays=fb.Delays(slow={4: 0.1}), late=late)
        options = {"schedule": schedule, "adversaries": attack, "engine": engine}
        federation = fb.FederatedBayes(fb.IIDPartition(10), fusion=fusion, **options)
        federate(bayesian(learning_rate=0.01), federation, 24)
        found.append(float(federation.posterior.flatten()[0].square().mean().sqrt()))
    assert found[1] < 2 * found[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0.5}, r"fraction=0\.5 with schedule=: say how many clients train at once by concurrency="),
        ({"safeguards": fb.Safeguards(min_clients=3)}, "min_clients=3 with a buffer of 2"),
        ({"schedule": "fedbuff"}, r"give fb\.Asynchronous"),
        ({"schedule": fb.Asynchronous(9)}, "concurrency=9, but there are 5 clients"),
    ],
)
def test_what_cannot_be_without_rounds_is_refused_before_training(options, message):
    given = {"fusion": "sites", "schedule": fb.Asynchronous(), **options}
    with pytest.raises(FederationError, match=message):
        federate(Plain(), fb.FederatedBayes(fb.SizesPartition(SIZES), **given))
