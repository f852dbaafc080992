"""Federations without rounds over Flower: their logs repeat them in one process to the last bit."""

from pkgutil import resolve_name

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.core.run_file import entry_of, line_of
from lightning_fedbayes.methods import Averaging, FedAsync, FedBuff, Quadratic
from lightning_fedbayes.methods.method import LocalProblem
from lightning_fedbayes.server.schedule import read_arrivals
from lightning_fedbayes.transport.flower import FusionStrategy, initial_arrays
from tests.federations import Crash
from tests.flower.clients import assert_same, client_apps
from tests.flower.grid import NODE, SlowGrid
from tests.flower.test_parity import Learned, Scheduled
from tests.flower.test_strategy import in_rounds, lost, nan
from tests.transport.federation import hybrid, in_process

BY_TWO = fb.Asynchronous(buffer=2)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    """Nobody is waited for: all that will ever come is there."""
    monkeypatch.setattr("lightning_fedbayes.transport.flower.roster.POLL_SECONDS", 0.005)


def federation(folder, fusion="sites", schedule=BY_TWO, **options):
    return FusionStrategy(
        fusion, **{"wait_for": 4, "schedule": schedule, "seed": 3, **options}, checkpoint=folder / "server.pt"
    )


def run(grid, strategy, rounds, make=hybrid, timeout=60.0):
    return strategy.start(grid, initial_arrays(make()), rounds, timeout=timeout)


def lines(folder):
    return [entry_of(line) for line in (folder / "server.jsonl").read_text().splitlines()]


def again(folder, late=None, **options):
    """The schedule that repeats what the folder's log says."""
    return fb.Asynchronous(replay=folder / "server.jsonl", late=late or FedBuff(), **options)


class Held(Averaging):
    """Clients are held to the global values, the fewer they are the closer."""

    def problem(self, shared, client):
        return LocalProblem(Quadratic(shared.share))


HELD = Held("linear_pool")
LATE = fb.Asynchronous(buffer=1, late=FedAsync(mixing=0.4))
CASES = {
    "sites": (hybrid, {"fusion": "sites"}, BY_TWO),
    "sites one by one": (hybrid, {"fusion": "sites", "local_epochs": 2}, fb.Asynchronous(buffer=1)),
    "sites of some": (Scheduled, {"fusion": "sites"}, fb.Asynchronous(concurrency=3, buffer=1)),
    "sites of IVON": (Learned, {"fusion": "sites"}, fb.Asynchronous()),
    "an average": (hybrid, {"fusion": "reverse_kl_barycenter"}, fb.Asynchronous(buffer=3)),
    "an average by FedAsync": (hybrid, {"fusion": "linear_pool"}, LATE),
    "a method that knows its share": (hybrid, {"fusion": HELD}, fb.Asynchronous(buffer=1)),
    "kept optimizers": (Scheduled, {"fusion": "weighted_average", "keep": ["optimizer"]}, fb.Asynchronous(buffer=1)),
}


@pytest.mark.parametrize(("make", "client", "schedule"), CASES.values(), ids=CASES)
def test_a_log_repeats_a_run_to_the_last_bit(make, client, schedule, tmp_path):
    """In one process; BatchNorm's buffers, too."""
    weighting = "equal" if client["fusion"] == "sites" else "train_size"
    first = federation(tmp_path, client["fusion"], schedule, weighting=weighting)
    grid = SlowGrid(client_apps(make=make, state_folder=tmp_path, **client), slow={2: 5})
    run(grid, first, 8, make=make)
    assert [client for line in lines(tmp_path) for client, _ in line["arrived"]] == grid.delivered
    late = [version < line["fusion"] - 1 for line in lines(tmp_path) for _, version in line["arrived"]]
    assert sum(late) >= 3
    alone = in_process(8, make, **client, weighting=weighting, schedule=again(tmp_path, schedule.late), seed=3)
    assert_same(first, alone)
    for name, value in first.server.buffers.items():
        assert torch.equal(value, alone.federation.server.buffers[name])


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["sites", HELD], ids=str)
@pytest.mark.parametrize("where", ["before the log", "before the checkpoint", "after it"])
def test_a_server_that_is_killed_goes_on_and_its_log_repeats_the_whole(where, fusion, tmp_path, monkeypatch):
    """What was under way is asked again from the version that it began with. One client of four is away."""
    apps = client_apps(state_folder=tmp_path, fusion=fusion)[:3]
    for stop in (2, 3, 5):
        strategy = federation(tmp_path, fusion, wait_for=3)
        with monkeypatch.context() as patch:
            kill_at(patch, where, stop, strategy)
            with pytest.raises(Crash):
                run(SlowGrid(apps, seed=stop, slow={2: 4}), strategy, 8)
    under_way = torch.load(tmp_path / "server.pt", weights_only=True)["under_way"]["clients"]
    strategy, grid = federation(tmp_path, fusion, wait_for=3), SlowGrid(apps, seed=9)
    asked = []
    strategy._ask, ask = lambda *args: asked.append((args[1], args[2] - 1)) or ask(*args), strategy._ask
    run(grid, strategy, 8)
    assert dict(asked[: len(under_way)]) == under_way
    assert any(version < strategy.server.rounds for version in under_way.values())
    assert [line["fusion"] for line in lines(tmp_path)] == list(range(1, 9))
    assert_same(strategy, in_process(8, fusion=fusion, schedule=again(tmp_path), seed=3))


def kill_at(patch, where, stop, strategy):
    """Let the server die at fusion ``stop``."""
    place = "flower.asynchronous.Course.end" if where == "before the log" else "checkpoint.ServerState.save"
    path = f"lightning_fedbayes.transport.{place}"
    inner = resolve_name(path)

    def dies(*arguments):
        if strategy.server.rounds < stop:
            return inner(*arguments)
        if where == "after it":
            inner(*arguments)
        raise Crash

    patch.setattr(path, dies)


class Once(dict):
    """What is asked for is gone afterwards."""

    get = dict.pop


@pytest.mark.slow
def test_a_client_that_is_too_stale_is_refused_and_keeps_what_it_had(tmp_path, caplog):
    caplog.set_level("INFO")
    strategy = federation(tmp_path, schedule=fb.Asynchronous(buffer=2, max_staleness=1))
    run(SlowGrid(client_apps(state_folder=tmp_path, fusion="sites"), slow=Once({2: 9})), strategy, 10)
    assert "client 2: its message comes" in caplog.text
    assert "more than max_staleness allows" in caplog.text
    assert any(2 in line["refused"] for line in lines(tmp_path))
    assert all(line["fusion"] - 1 - version <= 1 for line in lines(tmp_path) for _, version in line["arrived"])
    assert 2 in strategy.server.accepted  # and counts when it is in time
    assert_same(strategy, in_process(10, fusion="sites", schedule=again(tmp_path), seed=3))


def from_elsewhere(reply):
    """Another node says that it answers for this one."""
    reply.metadata.__dict__["_src_node_id"] = NODE
    return reply


@pytest.mark.slow
def test_a_client_that_does_not_answer_in_time_is_given_up_and_asked_again(tmp_path, caplog):
    caplog.set_level("INFO")
    strategy = federation(tmp_path, schedule=fb.Asynchronous(buffer=3))
    change = {1: in_rounds(lost, 1, 1), 2: in_rounds(from_elsewhere, 1, 1)}
    grid = SlowGrid(client_apps(state_folder=tmp_path, fusion="sites"), change)
    run(grid, strategy, 4, timeout=2.0)
    assert "client 1: no reply within 2 s" in caplog.text
    assert lines(tmp_path)[0]["refused"] == [1, 2]
    assert {1, 2} <= set(lines(tmp_path)[1]["began"])
    assert [row["failed_clients"] for row in strategy.server.history] == [2, 0, 0, 0]
    assert_same(strategy, in_process(4, fusion="sites", schedule=again(tmp_path), seed=3))


def test_a_client_that_sends_rubbish_does_not_fill_the_buffer(tmp_path):
    strategy = federation(tmp_path, "linear_pool", fb.Asynchronous(buffer=3))
    run(SlowGrid(client_apps(), {1: nan}), strategy, 5)
    assert all(row["valid_clients"] == 3 for row in strategy.server.history)
    assert 1 not in strategy.server.accepted
    assert sum(row["failed_clients"] for row in strategy.server.history) > 2
    assert_same(strategy, in_process(5, fusion="linear_pool", schedule=again(tmp_path), seed=3))


class AtOnce(SlowGrid):
    """All replies come together, the last asked first."""

    def pull_messages(self, message_ids):
        return [self.waiting.pop(each)[2] for each in reversed(list(message_ids)) if each in self.waiting]


def test_without_delays_it_is_a_federation_by_rounds(tmp_path):
    strategy = federation(tmp_path, "sites", fb.Asynchronous(buffer=4))
    run(AtOnce(client_apps(state_folder=tmp_path, fusion="sites")), strategy, 3)
    assert [line["arrived"] for line in lines(tmp_path)] == [[[k, r] for k in (0, 1, 2, 3)] for r in range(3)]
    assert_same(strategy, in_process(3, fusion="sites", seed=3))


REFUSED = {
    "delays of a simulation": ({"schedule": fb.Asynchronous(delays=fb.Delays(2.0))}, "over a network the real ones"),
    "a log": ({"schedule": fb.Asynchronous(replay="x.jsonl")}, "replay= repeats a log in one process"),
    "a small buffer": ({"schedule": BY_TWO, "safeguards": fb.Safeguards(min_clients=3)}, "every fusion would have too"),
    "a fraction": ({"schedule": BY_TWO, "fraction": 0.5}, r"say how many clients train at once by concurrency="),
    "nothing scored": ({"schedule": None, "monitor": "val/nll"}, "nothing is scored; give evaluate=True"),
    "patience for nothing": ({"schedule": None, "patience": 3}, "say which figure"),
}


@pytest.mark.parametrize(("options", "says"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_do_not_go_together_are_refused(options, says, tmp_path):
    with pytest.raises(FederationError, match=says):
        federation(tmp_path, **options)


GOOD = {"fusion": 1, "clients": 2, "began": [0], "arrived": [[0, 0]], "refused": []}
SECOND = {**GOOD, "fusion": 2}
BROKEN = {
    "another number": [SECOND],
    "of the future": [{**GOOD, "arrived": [[0, 1]]}],
    "no order": [{"fusion": 1}],
    "a client at once": [{**GOOD, "arrived": [[0, 0], [0, 0]]}],
    "begun too early": [GOOD, SECOND],
    "no line": ["x"],
}


@pytest.mark.parametrize("lines", BROKEN.values(), ids=BROKEN)
def test_files_that_are_no_log_are_refused(lines, tmp_path):
    (tmp_path / "log").write_text("".join(map(line_of, lines)))
    with pytest.raises(FederationError, match="is no log of arrivals"):
        read_arrivals(tmp_path / "log")
