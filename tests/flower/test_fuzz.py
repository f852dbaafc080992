"""Replies of a stranger: they count, or they are refused with an error of the package."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

import lightning_fedbayes as fb
from lightning_fedbayes import methods
from lightning_fedbayes.core.errors import FederationError, FusionError
from lightning_fedbayes.methods import get_method
from lightning_fedbayes.transport.checkpoint import ServerState
from lightning_fedbayes.transport.flower import FusionStrategy
from lightning_fedbayes.transport.flower.wire import message_in, to_arrays
from lightning_fedbayes.transport.messages import VERSION, read_update
from tests.fuzz import assert_all_ran, many, only_own_errors
from tests.fuzz.doors import begun, fuzzed, posterior
from tests.refusals import refusals

PROBABILISTIC = {"w", "b"}
ONES = [np.ones((1, 2), dtype) for dtype in (np.float16, np.float64, np.complex64, np.int64, bool)]
FILLED = [np.full((1, 2), value, np.float32) for value in (0, -1, np.nan, 1e-45)]
OTHERS = [np.asfortranarray(np.ones((2, 3))), np.zeros((0,), np.float32), np.array(1.0, np.float32), np.array(["x"])]
ARRAYS = st.sampled_from([*ONES, *FILLED, *OTHERS])
NUMBERS = st.sampled_from([0, 1, -1, 5, 2**31, 2**62, 1.5, float("nan"), float("inf")])


FIGURES = ("train_loss", "added_loss", "schedule/steps", "schedule/moves", "privacy/example_epsilon")
OWN = {"kind": "update", "client": 0, "server-round": 1, "version": VERSION}


def reply(arrays, metrics=None, config=None):
    content = {
        "arrays": arrays,
        "metrics": MetricRecord({"num-examples": 5} if metrics is None else metrics),
        "config": ConfigRecord({**OWN, **(config or {})}),
    }
    question = Message(RecordDict({}), dst_node_id=1, message_type=MessageType.TRAIN)
    return Message(RecordDict(content), reply_to=question)


def read(message, probabilistic=PROBABILISTIC):
    return read_update(message_in(message, 0, "update", 1), probabilistic)


def update(fusion="reverse_kl_barycenter", client=0):
    """What a client of a method sends."""
    method, one = get_method(fusion), methods.Participant(client, 5, {}, 0, 3, 0.1)
    shared = methods.Shared(posterior(), method.init(posterior()))
    method.problem(shared, one)
    trained = methods.Trained(posterior(1.0), {"w": torch.ones(1, 2), "b": torch.ones(1)}, {"w": torch.ones(1, 2)})
    return method.report(shared, one, trained).update(client, 5, {"running": torch.ones(2)})


def good(fusion="reverse_kl_barycenter"):
    sent = update(fusion)
    return to_arrays(sent.posterior, sent.buffers)


@st.composite
def replies(draw):
    """A method, and a good reply with an array, its bytes, a figure or the round replaced."""
    fusion = draw(st.sampled_from(["reverse_kl_barycenter", "scaffold", "fednova", "sites"]))
    arrays, metrics, config = dict(good(fusion)), {"num-examples": 5, **dict.fromkeys(FIGURES, 0.5)}, {}
    key = draw(st.sampled_from(sorted(arrays)))
    how = draw(st.sampled_from(["array", "bytes", "header", "missing", "key", "examples", "round", "metric", "kind"]))
    if how == "array":
        arrays[key] = Array(draw(ARRAYS))
    elif how == "bytes":
        cut = draw(st.integers(1, len(arrays[key].data)))
        data = arrays[key].data[:cut] + draw(st.binary(max_size=6))
        arrays[key] = Array(dtype="float32", shape=(1, 2), stype="numpy.ndarray", data=data)
    elif how == "header":
        arrays[key] = Array(
            dtype=draw(st.text(min_size=1, max_size=5)),
            shape=(draw(st.integers(-3, 9)),),
            stype=draw(st.text(min_size=1, max_size=5)),
            data=arrays[key].data,
        )
    elif how == "missing":
        del arrays[key]
    elif how == "key":
        arrays[draw(st.sampled_from(["mean/", "variance/b", "x", "mean/__class__", "buffer/new"]))] = arrays[key]
    elif how == "examples":
        metrics["num-examples"] = draw(NUMBERS)
    elif how == "round":
        config = {"server-round": draw(st.sampled_from([0, 2, True, 1.0, "1", b"1", [1]]))}
    elif how == "kind":
        config = {
            draw(st.sampled_from(["kind", "client"])): draw(
                st.sampled_from(["counts", "failure", "", -1, 7, 2**70, "update", [1], b"x", 0.5])
            )
        }
    else:
        metrics[draw(st.sampled_from(FIGURES))] = draw(NUMBERS)
    return fusion, reply(ArrayRecord(arrays), metrics, config)


WAYS = {"fraction": 1.0, "safeguards": fb.Safeguards(), "evaluate": False, "across": False, "seed": 0}
test_a_strategys_arguments_are_refused_with_errors_of_the_package = fuzzed(
    FusionStrategy, wait_for=2, checkpoint=None, **WAYS
)


@given(sent=replies())
@many("wire")
def any_reply(sent):
    fusion, message = sent
    server = begun(fusion=fusion)
    with only_own_errors("wire"):
        outcome = server.admit(read(message, set() if server.method.sends_means else PROBABILISTIC))
        server.admit(update(fusion, 1))
        server.finish()
        if outcome.error is not None:
            raise outcome.error


def test_replies_are_used_or_refused_with_errors_of_the_package():
    any_reply()
    assert_all_ran("wire")


test_figures_that_must_not_count_are_refused = refusals(
    FusionError,
    ({"num-examples": 0}, None, "num-examples=0.*at least 1"),
    ({"num-examples": 2**62}, None, "num-examples.*at most"),
    ({"num-examples": 1.0}, None, "num-examples=1.0.*whole number"),
    (None, {"server-round": True}, "of round True"),
    (None, {"client": 1}, "says that it is client 1"),
    (None, {"kind": "other"}, "says that it is 'other'"),
    (None, {"kind": "scores"}, "of kind 'scores', and it was asked for 'update'"),
    (None, {"version": "0.1"}, f"client 0: its message is of lightning_fedbayes '0.1', and {VERSION} runs here: in"),
    (None, {"kind": "failure", "error": "OSError", "stage": "training"}, "client 0 failed in training: OSError"),
    call=lambda metrics, config: read(reply(good(), metrics, config)),
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("federation", 3),
        ("seed", "x"),
        ("server", []),
        ("server", {}),
        ("calibration", 3),
        ("calibration", {"a": 1}),
        *(("server", {name: None}) for name in begun().state_dict()),
        ("another", 1),
    ],
)
def test_a_checkpoint_of_other_content_is_named(tmp_path, name, value):
    path = tmp_path / "server.pt"
    state = vars(ServerState("name", 0, begun().state_dict()))
    torch.save({**state, name: {**state[name], **value} if name == "server" and value else value}, path)
    with pytest.raises(FederationError, match=r"is no checkpoint of a server.*path of its own"):
        ServerState.load(path)
