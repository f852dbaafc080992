"""Calibration over Flower: the same as in one process, and no client's mistake or secret is lost on the way."""

import itertools
import json
import math

import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.transport.calibration import TWICE, count_noise
from lightning_fedbayes.transport.flower import FusionStrategy, client_app, initial_arrays, load_checkpoint, server_app
from lightning_fedbayes.transport.messages import VERSION
from tests.federations import Plain, assert_close, blobs
from tests.flower.clients import client_apps, run
from tests.flower.grid import LocalGrid
from tests.flower.test_strategy import resend
from tests.test_likelihoods import OUTPUTS, Own, data_of
from tests.transport.federation import BlobData, assert_restored, assert_same_calibration, hybrid
from tests.transport.federation import calibrated as calibrated_alone

pytestmark = pytest.mark.filterwarnings("ignore:the temperature ends at its limit")
CLIENTS = 3


def own(size=30, start=0):
    return fb.ClientDatasets({f"c{k}": blobs(size + k, seed=start + k) for k in range(CLIENTS)})


class OwnData(BlobData):
    """Training and validation data of all clients, each with parts of its own."""

    def __init__(self):
        super().__init__(own())

    def val_dataloader(self):
        return DataLoader(own(40, start=50), batch_size=16)


def make():
    return hybrid(learning_rate=0.03)


def apps(folder=None, make=make, data=OwnData, **options):
    """A ClientApp for each client."""
    return [client_apps(1, make, data=data, partition=None, state_folder=folder, **options)[0] for _ in range(CLIENTS)]


def both(**options):
    return fb.FederatedTemperature(), fb.FederatedConformal(0.8, per_client=True, **options)


def calibrated(callbacks, grid=None, strategy=None, make=make, **options):
    strategy = strategy or FusionStrategy(wait_for=CLIENTS, seed=3)
    grid = grid or LocalGrid(apps(**options))
    result = run(grid, strategy, rounds=2, make=make)
    strategy.calibrate(grid, result.arrays, callbacks, timeout=1)
    return strategy, grid


ASKED = ("query.calibrate",)


def spoilt(change, after=0):
    """A grid in which a change takes hold of one client's answers to questions of calibration, but for some."""
    count = itertools.count()
    return LocalGrid(apps(), {1: lambda reply: change(reply) if next(count) >= after else reply}, kinds=ASKED)


def test_it_ends_where_a_pass_in_one_process_ends(tmp_path):
    over, alone = both(), both()
    calibrated(over, strategy=FusionStrategy(wait_for=CLIENTS, seed=3, checkpoint=tmp_path / "f.pt"))
    module = calibrated_alone(make, OwnData(), alone)
    assert_same_calibration(over, alone)
    assert over[1].temperature == over[0].temperature
    assert_restored(both(), over, load_checkpoint(module, tmp_path / "f.pt"))


class Outputs(BlobData):
    """Training and validation data of two clients, of a kind of output."""

    def __init__(self, output):
        super().__init__(data_of(output))
        self.output = output

    def val_dataloader(self):
        return DataLoader(data_of(self.output, (40, 44), 1), 16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the temperature")  # targets are noise
@pytest.mark.parametrize("output", ["segmentation", "labels", "mean and variance", "pixels"])
def test_an_output_is_calibrated_as_in_one_process(output):
    kind = "lac" if OUTPUTS[output][2].of_classes else "interval"

    def make():
        torch.manual_seed(7)
        return Own(output, "layers")

    over, alone = ((fb.FederatedTemperature(), fb.FederatedConformal(kind=kind)) for _ in range(2))
    grid = LocalGrid(client_apps(2, make, data=lambda: Outputs(output), partition=None))
    calibrated(over, grid, FusionStrategy("weighted_average", wait_for=2, seed=3), make)
    calibrated_alone(make, Outputs(output), alone, "weighted_average")
    assert over[0].temperature == pytest.approx(alone[0].temperature, rel=1e-6)
    assert over[1].threshold == pytest.approx(alone[1].threshold, rel=1e-5)


class Numbers(OwnData):
    """One number in place of a class, of which a network with one output may mean two things."""

    def val_dataloader(self):
        x, y = torch.randn(9, 6), torch.randint(0, 2, (9,))
        return DataLoader(fb.ClientDatasets({f"c{k}": TensorDataset(x, y) for k in range(CLIENTS)}), 4)


PRIVATE, UNCLEAR = {"conformal_epsilon": 1.0}, {"make": lambda: Plain(torch.nn.Linear(6, 1)), "data": Numbers}
CANNOT = {
    "private": (PRIVATE, [fb.FederatedConformal()], "NotSent"),
    "another noise": (PRIVATE, [fb.FederatedConformal(epsilon=0.5)], "NotSent"),
    "temperature alone": (PRIVATE, [*both(epsilon=1.0)], "NotSent"),
    "two answers": (UNCLEAR, [fb.FederatedTemperature()], "FedBayesError"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("options", "callbacks", "error"), CANNOT.values(), ids=CANNOT)
def test_what_no_client_can_answer_ends_the_run_before_the_first_round(options, callbacks, error, tmp_path):
    grid = LocalGrid(apps(tmp_path, **options))
    module = options.get("make", make)()
    app = server_app(module, FusionStrategy(wait_for=CLIENTS), rounds=2, timeout=1, calibration=callbacks)
    with pytest.raises(FederationError, match=rf"no client's answer can be used: .*{error}"):
        app(grid, Context(0, 0, {}, RecordDict(), {}))
    assert "train" not in {kind for kind, _ in grid.asked}


@pytest.mark.slow
def test_a_client_that_cannot_answer_is_told_and_others_go_on(tmp_path, caplog):
    """What they are tried with is spent of no account, and changes nothing."""
    caplog.set_level("INFO")
    built = apps(tmp_path, conformal_epsilon=2.0)
    built[1] = apps()[1]
    alone, over = fb.FederatedConformal(0.8, epsilon=2.0), fb.FederatedConformal(0.8, epsilon=2.0)
    grid, strategy = LocalGrid(built), FusionStrategy(wait_for=CLIENTS, seed=3)
    strategy.start(grid, initial_arrays(make()), 2, timeout=1, calibration=[over])
    assert grid.asked[1][0] == "query.calibrate"
    header = {"kind": "introduction", "server-round": 1, "version": VERSION}
    until = next(k for k, (_, message, _) in enumerate(grid.seen) if message.metadata.message_type == "train")
    asked = [each for each in grid.seen[:until] if each[1].metadata.message_type == "query.calibrate"]
    sent = [{name: dict(record) for name, record in reply.content.items()} for _, _, reply in asked]
    assert [each for each in sent if each["config"]["kind"] == "introduction"] == [
        {"config": {**header, "client": client}} for client in (0, 2)
    ]
    assert [set(each) for each in sent] == [{"config"}] * CLIENTS
    first = next(each.message for each in caplog.records if "left out" in each.message)
    assert "client 1" in first.lower()
    assert "NotSent" in first
    assert [json.loads(path.read_text())["epsilon"] for path in sorted(tmp_path.glob("*-counts.json"))] == [2.0, 2.0]
    other, _ = calibrated([alone], folder=tmp_path, conformal_epsilon=2.0)
    assert_close(strategy.server.posterior, other.server.posterior)


BAD = {
    "death": lambda reply: None,
    "no sums": lambda reply: resend(reply, metrics={"gradient": None, "curvature": None}),
    "not finite": lambda reply: resend(reply, metrics={"gradient": math.nan}),
    "no examples": lambda reply: resend(reply, metrics={"num-examples": 0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("after", [0, 2])
def test_a_client_without_a_usable_answer_is_left_out_of_the_temperature(name, after):
    scaling, without = fb.FederatedTemperature(), fb.FederatedTemperature()
    calibrated([scaling], spoilt(BAD[name], after))
    calibrated([without], spoilt(lambda reply: None))
    assert scaling.temperature == pytest.approx(without.temperature, abs=1e-6)


@pytest.mark.filterwarnings("ignore:the temperature has not converged")  # noise from a secret may spoil the network
def test_a_private_client_sends_no_exact_figures(tmp_path):
    private = {"privacy": fb.UpdatePrivacy(1.0, 1.0), "folder": tmp_path, "buffers": "frozen"}
    strategy = FusionStrategy(wait_for=CLIENTS)
    grid = LocalGrid(apps(**private))
    result = run(grid, strategy, 1, make, buffers="frozen")
    for callback in (fb.FederatedTemperature(), fb.FederatedConformal()):
        with pytest.raises(FederationError, match=r"client 0 failed in calibration: NotSent .The client's"):
            strategy.calibrate(grid, result.arrays, [callback], timeout=1)
    strategy.evaluate = True
    replies = grid.send_and_receive(strategy.configure_evaluate(1, result.arrays, ConfigRecord(), grid))
    assert strategy.aggregate_evaluate(1, replies) is None
    assert not strategy.client_scores.names
    allowing = LocalGrid(apps(**private, exact=["temperature", "counts", "scores"]))
    strategy.calibrate(allowing, result.arrays, [fb.FederatedTemperature(), fb.FederatedConformal()], timeout=1)
    assert "val/nll" in strategy.aggregate_evaluate(
        1, allowing.send_and_receive(strategy.configure_evaluate(1, result.arrays, ConfigRecord(), allowing))
    )


def test_noisy_counts_are_the_clients_own_and_are_added_up(tmp_path, caplog):
    grid, strategy = LocalGrid(apps(tmp_path, conformal_epsilon=1.5)), FusionStrategy(wait_for=CLIENTS, seed=3)
    result = run(grid, strategy, rounds=1, make=make)
    found = []
    for _ in range(4):
        conformal = fb.FederatedConformal(0.5, bins=4096, epsilon=1.5)  # fine, or noise may leave the cell as it is
        strategy.calibrate(grid, result.arrays, [conformal], timeout=1)
        found.append(conformal.threshold)
    assert len(set(found)) > 1  # fresh noise, which no seed of the server's repeats
    for client in range(CLIENTS):
        assert json.loads((tmp_path / f"client-{client}-counts.json").read_text()) == dict.fromkeys(TWICE, 6.0)
    for exact in (fb.FederatedConformal(0.5), fb.FederatedTemperature()):
        with pytest.raises(FederationError, match="NotSent"):
            strategy.calibrate(grid, result.arrays, [exact], timeout=1)
    assert "epsilon=None, and this client's is 1.5" in caplog.text
    assert "sums over its examples, for a temperature, exactly" in caplog.text
    for wrong in (*(f'{{"epsilon": {each}, "epsilon_again": {each}}}' for each in ("-5", "NaN", '"1"')), "[]", "{"):
        (tmp_path / "client-1-counts.json").write_text(wrong)
        with pytest.raises(FederationError, match="account of noisy counts, is damaged"):
            count_noise(tmp_path, 1, 1.5)
    conformal = fb.FederatedConformal(0.5, per_client=True, epsilon=1.5)
    strategy.calibrate(grid, result.arrays, [conformal], timeout=1)
    assert list(conformal.thresholds) == ["0", "2"]
    with pytest.raises(FederationError, match="pass state_folder"):
        client_app(make(), OwnData(), conformal_epsilon=1.0)
    (tmp_path / "client-2-counts.json.new").symlink_to("/dev/full")
    with pytest.raises(FederationError, match=r"client-2-counts\.json cannot be written"):
        count_noise(tmp_path, 2, 1.5)
    assert json.loads((tmp_path / "client-2-counts.json").read_text()) == dict.fromkeys(TWICE, 7.5)
