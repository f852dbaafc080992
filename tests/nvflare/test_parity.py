"""A federation over NVIDIA FLARE ends at the very posterior of the same federation in one process."""

import pytest

pytest.importorskip("nvflare")

import torch

import lightning_fedbayes as fb
from lightning_fedbayes.transport.nvflare import load_checkpoint, personal_posterior
from tests.federations import assert_close, federate
from tests.flower.test_calibration import OwnData, both
from tests.flower.test_calibration import make as confident
from tests.flower.test_parity import CASES as OVER_FLOWER
from tests.flower.test_scale import PARTITION, data, make
from tests.flower.test_schedules import Estimated
from tests.nvflare.local import clients, run
from tests.nvflare.simulated import plain
from tests.transport.federation import (
    BlobData,
    assert_restored,
    assert_same_calibration,
    calibrated,
    hybrid,
    in_process,
)

CHOSEN = ("sites of cohorts", "IVON that keeps", "SCAFFOLD of cohorts", "Ditto of cohorts", "frozen buffers")
CASES = {name: OVER_FLOWER[name] for name in CHOSEN} | {
    "a plain network": (plain, {"fusion": "weighted_average"}, {}),
    "rates of every step": (Estimated, {"fraction": 0.5}, {"local_epochs": 2}),
}


@pytest.mark.parametrize(("make", "server", "client"), CASES.values(), ids=CASES)
def test_same_posterior_as_in_one_process(make, server, client, tmp_path):
    kept = {name: client[name] for name in ("buffers", "local_parameters", "posterior") if name in client}
    controller = run(clients(make=make, state_folder=tmp_path, **client), make=make, seed=3, **server, **kept)
    assert_close(controller.server.posterior, in_process(make=make, **{**server, **client}, seed=3).posterior)


@pytest.mark.parametrize(("fusion", "make"), [("sites", hybrid), ("scaffold", plain)])
def test_a_federation_that_is_begun_anew_after_each_round_ends_at_the_same_posterior(fusion, make, tmp_path):
    """New objects at both ends, as after a kill."""
    options = {"fusion": fusion, "weighting": "equal", "fraction": 0.5, "seed": 3}
    path, sent = tmp_path / "server.pt", []
    for rounds in (1, 2, 3, 4, 4):
        sent.clear()
        answering = clients(fusion=fusion, make=make, state_folder=tmp_path)
        controller = run(answering, rounds=rounds, make=make, checkpoint=path, sent=sent, **options)
        assert controller.server.rounds == rounds
    assert not sent  # all rounds were done
    assert_close(controller.server.posterior, in_process(rounds=4, make=make, **options).posterior)
    module = make()
    state = load_checkpoint(module, path)
    assert state.numbers == {f"site-{number + 1}": number for number in range(4)}
    assert_close(state.posterior, controller.server.posterior)


@pytest.mark.slow
def test_what_a_site_has_lost_comes_back_from_the_server(tmp_path):
    options = {"fusion": "sites", "weighting": "equal", "seed": 3, "checkpoint": tmp_path / "server.pt"}
    run(clients(fusion="sites", state_folder=tmp_path / "a"), rounds=2, **options)
    (tmp_path / "a" / "client-1.pt").unlink()
    history = run(clients(fusion="sites", state_folder=tmp_path / "a"), rounds=4, **options).server.history
    assert [row["valid_clients"] for row in history] == [4, 4, 3, 4]


def test_clients_calibrate_as_in_one_process(tmp_path):
    over, alone, path = both(), both(), tmp_path / "server.pt"
    answering = clients(3, confident, OwnData, partition=None)
    run(answering, make=confident, rounds=2, seed=3, calibration=over, checkpoint=path)
    module = calibrated(confident, OwnData(), alone)
    assert_same_calibration(over, alone)
    assert_restored(both(), over, load_checkpoint(module, path))


@pytest.mark.slow
def test_clients_score_and_keep_their_own_posterior_as_in_one_process(tmp_path):
    options = {"weighting": "equal", "seed": 3}
    controller = run(clients(keep=["posterior"], state_folder=tmp_path), evaluate=True, **options)
    alone = in_process(keep=["posterior"], **options)
    assert_close(personal_posterior(hybrid(), tmp_path, 2, controller.server.posterior), alone.posterior_of(2, 1.0))
    scores = controller.client_scores
    assert scores.names == ("0", "1", "2", "3")
    assert {"val/nll", "personal/val/nll"} <= set(scores.values)


@pytest.mark.slow
def test_the_scale_of_the_data_is_that_of_one_process_and_stays_at_the_server():
    def own():
        return BlobData(data())

    sent, alone = [], make()
    made = clients(make=make, data=own, partition=PARTITION, fusion="weighted_average")
    controller = run(made, "weighted_average", make=make, rounds=2, seed=3, sent=sent)
    federation = fb.FederatedBayes(PARTITION, fusion="weighted_average", engine="sequential", seed=3)
    federate(alone, federation, 2, own().train_dataloader())
    assert torch.equal(controller.server.buffers["scale/target_units"], alone.scaler.target_units)
    assert_close(controller.server.posterior, federation.posterior)
    assert [each.meta["kind"] for each in sent] == ["scale"] * 4 + ["update"] * 8
