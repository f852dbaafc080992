"""Clients of NVIDIA FLARE that fail or lie, what leaves a client, and arguments that cannot be used."""

import pytest

pytest.importorskip("nvflare")

import torch
from hypothesis import given
from hypothesis import strategies as st
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import ClientMismatch, FederationError, FusionError
from lightning_fedbayes.transport.messages import read_update, tensors_of
from lightning_fedbayes.transport.nvflare import FusionController
from lightning_fedbayes.transport.nvflare.wire import answer_of, message_in, question_in
from tests.federations import Plain
from tests.fuzz import many, only_own_errors
from tests.fuzz.doors import POOL, admitted, fuzzed, posterior
from tests.nvflare.local import carried, clients, prepared, run
from tests.refusals import refusals
from tests.transport.federation import hybrid

KEPT = {"buffers": "average", "local_parameters": (), "posterior": None, "checkpoint": None, "evaluate": False}
test_arguments_are_refused_with_errors_of_the_package = fuzzed(
    FusionController, module=hybrid(), num_rounds=1, timeout=1.0, calibration=(), wait_for=2, **KEPT
)


def of(key, value):
    def change(reply):
        getattr(reply, "params" if "/" in key else "meta")[key] = value
        return reply

    return change


def differences(reply):
    reply.params_type = ParamsType.DIFF
    return reply


LIES = {
    "no tensor": (of("mean/more", "text"), "a dense tensor is needed"),
    "no kind": (of("kind", ["update"]), "no message of this version"),
    "differences": (differences, "posteriors are sent whole"),
    "nothing": (lambda reply: None, "has sent nothing that FLARE takes within"),
}


@pytest.mark.parametrize(("change", "says"), LIES.values(), ids=LIES)
def test_a_reply_that_cannot_be_used_is_left_out(change, says, caplog):
    caplog.set_level("INFO")
    server = run(clients(), rounds=1, change={1: change}).server
    assert server.history[0]["valid_clients"] == 3
    assert all(bool(value.isfinite().all()) for value in server.posterior.mean.values())
    told = [each.message for each in caplog.records if "client 1 is left out" in each.message]
    assert len(told) == 1
    assert says in told[0]


def test_an_update_is_what_the_page_on_privacy_says(tmp_path, caplog):
    caplog.set_level("INFO")
    sent, options = [], {"privacy": fb.UpdatePrivacy(1.0, 1.0), "state_folder": tmp_path, "buffers": "local"}
    run(clients(make=Plain, **options), make=Plain, rounds=2, sent=sent, evaluate=True, buffers="local")
    updates = [each for each in sent if each.meta["kind"] == "update"]
    assert len(updates) == 8
    plain = []
    run(clients(make=Plain), make=Plain, rounds=1, sent=plain)
    for reply in (*updates, *plain):
        assert {name.partition("/")[0] for name in reply.params} == {"mean"}
        assert set(reply.meta) - {"initial_metrics", "client_name"} == {"kind", "client", "server-round", "version"}
        assert set(reply.metrics) == {"num-examples", "train_loss" if reply in plain else "privacy/epsilon"}
    assert {each.meta["error"] for each in sent if each.meta["kind"] == "failure"} == {"NotSent"}
    again = []
    run(clients(make=Plain, **options), make=Plain, rounds=1, sent=again, buffers="local")
    first = next(name for name in again[0].params if name.startswith("mean/"))
    assert torch.equal(again[0].params[first], updates[0].params[first]), "one update has one noise, and counts again"
    assert again[0].metrics["privacy/epsilon"] > max(each.metrics["privacy/epsilon"] for each in updates)


def test_a_run_that_is_stopped_does_not_count_the_round():
    class Stopped:
        triggered = True

    def stop(reply):
        controller.abort_signal = Stopped()
        return reply

    controller = prepared(clients(), change={1: stop})
    controller.run()
    assert controller.server.rounds == 0


def good():
    update = fb.core.messages.Message("update", 0, 1, 5, tensors_of(posterior(1.0), {"running": torch.ones(2)}))
    return answer_of(update)


PARTS = {"meta": [*good().meta, "error"], "metrics": [*good().metrics, "loss"], "params": [*good().params, "mean/", 7]}
PLACES = [(part, key) for part, keys in PARTS.items() for key in [None, *keys]]


@given(place=st.sampled_from(PLACES), value=st.sampled_from(POOL))
@many("wire")
def any_reply(place, value):
    (part, key), reply = place, good()
    if key is None:
        setattr(reply, part, value)
    else:
        getattr(reply, part)[key] = value
    with only_own_errors("FLARE"):
        admitted(read_update(message_in(reply, 0, "update", 1), {"w", "b"}))


def test_replies_are_used_or_refused_with_errors_of_the_package():
    any_reply()
    admitted(read_update(message_in(good(), 0, "update", 1), {"w", "b"}))


def test_what_is_sent_arrives_exactly():
    tensors = {
        "a": torch.tensor(3),
        "b": torch.ones(2, dtype=torch.bfloat16),
        "c": torch.zeros(0, 4),
        "d": torch.rand(3, 2, dtype=torch.float64).T,
        "e": torch.tensor([True]),
    }
    sent = fb.core.messages.Message("curvature", 4, 2, 9, tensors, {"epsilon": 0.5})
    came = message_in(carried(answer_of(sent)), 4, "curvature", 2)
    assert (came.kind, came.client, came.round, came.num_examples, came.figures) == ("curvature", 4, 2, 9, sent.figures)
    for name, value in tensors.items():
        assert came.tensors[name].dtype == value.dtype
        assert torch.equal(came.tensors[name], value)


def test_a_client_answers_a_controller_of_another_kind_by_a_failure():
    with pytest.raises(ClientMismatch, match="none of FusionController's"):
        question_in(FLModel(params={}))
    (client,) = clients(1)
    assert client.answer(FLModel(params={})).meta["error"] == "ClientMismatch"
    assert client.answer(FLModel(params={}, meta={"asked": "train", "client": 0})).meta["error"] == "ClientMismatch"
    with pytest.raises(FederationError, match=r"flare\.receive\(\)"):
        client.answer(None)


test_arguments_that_cannot_be_used = refusals(
    (FederationError, FusionError),
    ({"num_rounds": 0}, "num_rounds=0"),
    ({"checkpoint": "federation.pt"}, "give an absolute path"),
    ({"calibration": [1]}, "give a list of FederatedTemperature"),
    ({"fusion": "rlkb"}, "did you mean"),
    call=lambda options: FusionController(hybrid(), **{"num_rounds": 1, **options}),
)
