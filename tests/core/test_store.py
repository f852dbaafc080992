"""States of clients on disk: whole rounds, whatever happens to the process; one run in a folder."""

import math
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_fedbayes.core.errors import FedBayesError, FederationError
from lightning_fedbayes.core.run_file import FILE, append, line_of, read
from lightning_fedbayes.core.store import Store

TENSORS = [
    torch.tensor(3.0),
    torch.arange(6.0, dtype=torch.float64).view(2, 3).T,
    torch.empty(0),
    torch.ones(2, 0, 3),
    torch.tensor([1, -(2**60)]),
    torch.tensor([True, False]),
    torch.tensor([1.5], dtype=torch.bfloat16),
    torch.tensor([[float("nan"), float("inf")], [-0.0, 1e-45]]),
    torch.tensor([1 + 2j]),
    torch.nn.Parameter(torch.ones(3)).detach()[1:],
]


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "clients")
    made.begin()
    yield made
    made.close()


def numbers(store):
    return {client: store.get(client)["number"] for client in store.clients()}


def finish(store, success=True, **states):
    for client, number in states.items():
        store.put(int(client[1:]), {"number": number})
    store.finish(success=success)


def test_tensors_come_back_bit_by_bit(store):
    store.put(7, {"tensors": TENSORS, "nested": [{"a": (1, None, "text")}]})
    store.finish(success=True)
    found = store.get(7)
    assert found["nested"] == [{"a": (1, None, "text")}]
    for one, other in zip(found["tensors"], TENSORS, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
        one.zero_()  # of its own memory, and may be written to
    assert store.get(8) is None


def test_a_run_goes_on_from_its_last_two_checkpoints(store):
    rounds = {}
    for number in range(1, 7):
        finish(store, **{f"c{number % 3}": number})
        rounds[number] = numbers(store)
        if number != 5:
            store.mark()
    run = store.run
    for back in (6, 4):
        store.resume(run, back)
        assert numbers(store) == rounds[back]
    with pytest.raises(FederationError, match=r"after rounds 4 to 4.*written after round 3.*last two checkpoints"):
        store.resume(run, 3)
    with pytest.raises(FederationError, match="does not hold the clients of the checkpoint"):
        store.resume("another", 4)


STEPS = st.tuples(st.sampled_from(["put", "forget", "fail", "end", "mark", "crash"]), st.integers(0, 3))
PUT, END = [("put", 0), ("put", 1)], ("end", 0)


@pytest.mark.slow
@given(st.lists(STEPS, max_size=40))
@example([*PUT, END, *PUT, ("put", 2), ("fail", 0), *PUT, ("forget", 1), END])
@example([*PUT, END, ("mark", 0), ("put", 2), END, ("put", 3), END, ("crash", 0), ("put", 0), END, ("put", 0), END])
@settings(deadline=None, max_examples=60)
def test_any_run_holds_what_a_dictionary_holds(tmp_path_factory, steps):
    """Whatever is put, forgotten, refused, marked, and killed and resumed from the last checkpoint."""
    folder = tmp_path_factory.mktemp("store")
    store = Store(folder)
    store.begin()
    kept, new, saved = {}, {}, None
    for number, (step, client) in enumerate(steps):
        if step == "put":
            store.put(client, {"number": number})
            new[client] = number
        elif step == "forget":
            store.forget(client)
            new.pop(client, None)
        elif step in ("fail", "end"):
            store.finish(success=step == "end")
            kept, new = ({**kept, **new} if step == "end" else kept), {}
        elif step == "mark":
            store.mark()
            saved = (store.run, store.rounds, dict(kept))
        elif saved is not None:
            store.close()
            store = Store(folder)
            store.resume(*saved[:2])
            kept, new = dict(saved[2]), {}
        assert numbers(store) == kept
    store.close()


def test_two_runs_do_not_share_a_folder(store, tmp_path):
    with pytest.raises(FederationError, match=r"clients is in use by another run: give each run a folder of its own"):
        Store(tmp_path / "clients")
    finish(store, c0=1)
    store.mark()
    store.close()
    other = Store(tmp_path / "clients")
    with pytest.raises(FederationError, match=r"holds the clients of another run, of 1 rounds: go on with it"):
        other.begin()
    other.close()


def test_a_folder_that_is_brought_back_after_damage_is_free(store, tmp_path):
    store.close()
    file = tmp_path / "clients" / "clients.sqlite"
    whole = file.read_bytes()
    file.write_bytes(whole[:100] + bytes(64) + whole[164:])
    with pytest.raises(FederationError, match="is damaged") as held:
        Store(tmp_path / "clients")
    file.write_bytes(whole)
    Store(tmp_path / "clients").close()
    del held  # what holds a traceback holds no folder


def test_a_full_disk_is_named_and_loses_nothing(store):
    finish(store, c0=1)
    pages = store._open.execute("PRAGMA page_count").fetchone()[0]
    store._open.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(FederationError, match=r"cannot keep their states in .*clients: .*full.*make room there"):
        finish(store, c1=torch.zeros(100_000))
    store.finish(success=False)
    assert numbers(store) == {0: 1}


@pytest.mark.parametrize("size", [1, 2**19])
def test_states_that_wait_to_be_written_are_dropped_and_kept_like_others(store, size):
    """Whatever their size: of several small ones all wait until the round ends, of large ones two are written."""
    finish(store, **{f"c{client}": 1 for client in range(4)})
    for success in (False, True):
        for client in range(3):
            store.put(client, {"number": 2, "much": bytes(size)})
        store.forget(0)
        store.forget(2)
        assert numbers(store) == dict.fromkeys(range(4), 1)  # until the round ends
        store.finish(success=success)
    assert numbers(store) == {0: 1, 1: 2, 2: 1, 3: 1}


def test_another_process_reads_what_one_has_written(store, tmp_path):
    reader = Store(tmp_path / "clients", writes=False)
    reader.begin()
    assert reader.get(0) is None
    finish(store, c0=1)
    reader.finish(success=True)
    assert numbers(reader) == {0: 1}
    found = []
    thread = threading.Thread(target=lambda: found.append(reader.get(0)))
    thread.start()
    thread.join()
    assert found == [{"number": 1}]
    assert Store.state_in(store.reference, 0) == {"number": 1}
    assert Store.state_in({0: {"number": 5}}, 0) == {"number": 5}
    reader.close()


ROUND = {"round": 1, "figures": {"val/nll": 0.5, "val/ece": math.nan}}


def test_what_is_written_comes_back(tmp_path):
    curve = {"curve": "val/retained_curve", "columns": ["x", "y"], "rows": [[0.5, 1.0]]}
    table = {"table": "federation/clients", "columns": ["client"], "rows": [["Zürich <1>"]]}
    for entry in (
        {"round": 0, "settings": {"fusion": "sites", "path": Path("a/b")}},
        ROUND,
        {"round": 2, **curve},
        {"round": 1, **table, "rows": []},
        {"round": 2, **table},
        {"round": 2, "figures": {"val/nll": 0.25}},
    ):
        append(tmp_path / "run", entry)
    record = read(tmp_path / "run" / FILE)
    assert record.settings == {"fusion": "sites", "path": "a/b"}
    assert record.figures["val/nll"] == {1: 0.5, 2: 0.25}
    assert math.isnan(record.figures["val/ece"][1])
    assert record.curves["val/retained_curve"][2]["rows"] == [[0.5, 1.0]]
    assert record.tables["federation/clients"]["rows"] == [["Zürich <1>"]]
    assert not record.torn


def test_a_run_that_goes_on_replaces_its_rounds_and_a_new_one_everything(tmp_path):
    for entry in (
        {"round": 0, "settings": {"seed": 1}},
        ROUND,
        {"round": 2, "figures": {"val/nll": 9.0}},
        {"round": 1, "settings": {"seed": 1}},
        {"round": 2, "figures": {"val/nll": 0.1}},
    ):
        append(tmp_path, entry)
    assert read(tmp_path / FILE).figures["val/nll"] == {1: 0.5, 2: 0.1}
    append(tmp_path, {"round": 0, "settings": {"seed": 2}})
    append(tmp_path, {"round": 1, "figures": {"val/nll": 7.0}})
    record = read(tmp_path / FILE)
    assert (record.settings, record.figures) == ({"seed": 2}, {"val/nll": {1: 7.0}})


@pytest.mark.parametrize(
    "damaged", ["{", "[]", "3", "{}", line_of({"round": 1, "figures": {"a": "b"}})[:-1], line_of({"a": 1})[:-1], "\x00"]
)
def test_a_damaged_line_is_named(tmp_path, damaged):
    (tmp_path / FILE).write_text(f"{line_of(ROUND)}{damaged}\n{line_of(ROUND)}")
    with pytest.raises(FedBayesError, match=r"federation.jsonl: line 2 of 3 is damaged .*remove it"):
        read(tmp_path / FILE)
