"""A federation does not depend on how many processes share its clients."""

import os
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

import lightning_fedbayes as fb
from lightning_fedbayes.callbacks.trainer import check_trainer, checks
from lightning_fedbayes.clients.settings import FederationSettings
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.fusion.auto import CANDIDATES
from lightning_fedbayes.modules import mlp

from .scenarios import SCENARIOS, SIZES, incomes, run

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("scenarios.py")
OF_TWO = {
    *("laplace", "own_method", "on_disk", "bounded"),
    *(f"{name}_stacked" for name in ("ivon", "laplace", "swag", "scaffold", "ditto", "on_disk")),
}
"""Scenarios that differ from another one in what each process does by itself, not in what it exchanges."""
CASES = [
    (devices, name)
    for devices in (2, 3)
    for name in SCENARIOS
    if name not in ("split", "stopped") and (devices == 2 or name not in OF_TWO)
]
OF_ONE_PROCESS = ("seconds", "megabytes_between_processes")
"""Figures that differ between processes, or that one process does not have."""


def command(devices, folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    return [sys.executable, str(SCRIPT), str(devices), str(folder), *names]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Number of processes → the folder with what came of each scenario in each of them."""
    known = {}

    def folder(devices):
        if devices not in known:
            known[devices] = tmp_path_factory.mktemp(f"devices{devices}")
            names = [name for name in SCENARIOS if devices == 2 or name not in OF_TWO]
            done = subprocess.run(
                command(devices, known[devices], *names), capture_output=True, text=True, timeout=280, check=False
            )
            assert done.returncode == 0, done.stderr
        return known[devices]

    return folder


@pytest.fixture(params=[2, 3])
def several(request, trained):
    """A function that returns what came of a scenario in each of several processes."""
    folder, ranks = trained(request.param), range(request.param)
    return lambda name: [torch.load(folder / f"{name}.{rank}.pt", weights_only=False) for rank in ranks]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Result of a scenario in one process."""
    known = {}

    def result(name):
        if name not in known:
            known[name] = run(1, str(tmp_path_factory.mktemp(name)), **SCENARIOS[name])
        return known[name]

    return result


def figures(history):
    return [{name: value for name, value in row.items() if name not in OF_ONE_PROCESS} for row in history]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("several", "name"), CASES, indirect=["several"])
def test_any_number_of_processes_gives_the_posterior_of_one(several, alone, name):
    expected = alone(name)
    for result in several(name):
        torch.testing.assert_close(result["posterior"], expected["posterior"], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(result["buffers"], expected["buffers"], rtol=1e-6, atol=1e-9)
        for row, other in zip(figures(result["history"]), figures(expected["history"]), strict=True):
            assert row == pytest.approx(other, rel=1e-5, abs=1e-9)
        shown = {key: value for key, value in expected["metrics"].items() if "seconds" not in key}
        assert {key: result["metrics"][key] for key in shown} == pytest.approx(shown, rel=1e-5)
        # moments of gradients are sums that cancel: their error is that of their terms in float32, about 1e-2, and of a
        # site's gradient about 1
        torch.testing.assert_close(result["states"], expected["states"], rtol=4e-6, atol=1e-8)
        if SCENARIOS[name]["engine"] == "sequential":  # a stack of fewer clients takes more steps
            assert (result["steps"], result["best"]) == (expected["steps"], expected["best"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["scaled", "scaled_stacked"])
def test_the_scale_of_the_targets_is_that_of_one_process_to_the_bit(several, alone, name):
    """Each process adds up some of the clients, and all of them have all sums, and the table of clients."""
    expected, scale = alone(name), "scaler.target_units"
    targets = torch.cat([incomes(size, k).tensors[1] for k, size in enumerate(SIZES)]).double()
    wanted = torch.stack([targets.mean(), targets.std(correction=0)])
    torch.testing.assert_close(expected["buffers"][scale].flatten(), wanted, rtol=1e-12, atol=0)
    columns, rows = expected["statistics"]
    assert (columns[:2], len(rows)) == (["client", "examples"], len(SIZES) + 1)
    for result in several(name):
        assert torch.equal(result["buffers"][scale], expected["buffers"][scale])
        assert result["statistics"] == expected["statistics"]


@pytest.mark.filterwarnings("ignore")
def test_ddp_splits_the_batches_of_each_client(several, alone):
    expected, results = alone("split"), several("split")
    assert [result["examples"] for result in results] == [expected["examples"] / len(results)] * len(results)
    for result in results:
        torch.testing.assert_close(result["posterior"], expected["posterior"], rtol=1e-4, atol=1e-6)
        assert result["steps"] == expected["steps"]
        assert not [text for text in result["warnings"] if "'round'" in text]  # which the callback logs


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_one_process_stops_inside_a_round_ends_after_it(several, alone):
    whole, results = alone("stopped"), several("stopped")  # in one process there is no second one
    for result in results:
        assert figures(result["history"]) == [pytest.approx(row, rel=1e-5) for row in figures(whole["history"])[:2]]
        torch.testing.assert_close(result["posterior"], results[0]["posterior"], rtol=0, atol=0)


CALLS = {
    "bayesian": 4,  # reports; sums there and back; who wants to stop
    "stacked": 4,  # facts for weights that compare clients travel with the reports
    "idle": 4,  # averages of buffers go with the sums
    "failing": 6,  # reports; shards there, medians back; disagreement there and back; who wants to stop
    "idle_stacked": 8,  # as before, and for the Gram matrix the middle and the products; buffers with the disagreement
    "buffers": 5,  # reports; all clients; disagreement and buffers there and back; who wants to stop
    "none_valid": 2,  # reports; who wants to stop
    "chosen": 3 + 2 * len(CANDIDATES),  # reports; sums there and back of each candidate; scores; who wants to stop
}
"""Collective calls in a round, whatever the number of processes."""


@pytest.mark.parametrize("name", CALLS)
def test_a_round_takes_few_collective_calls(several, name):
    for result in several(name):
        assert result["calls"] == [CALLS[name]] * 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("victim", "others"), [(0, 3), (1, 1)])
def test_one_killed_process_ends_the_others_and_another_number_trains_the_rest(alone, tmp_path, victim, others):
    begun = time.monotonic()
    killed = subprocess.Popen(
        command(2, tmp_path, f"bayesian:killed{victim}"), stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert killed.wait(120) != 0
    while alive(killed.pid):
        assert time.monotonic() - begun < 60
        time.sleep(0.2)
    assert not (tmp_path / "bayesian.0.pt").exists()
    if others == 1:
        last = str(tmp_path / "bayesian" / "last.ckpt")
        result = run(1, str(tmp_path / "bayesian"), resume=last, **SCENARIOS["bayesian"])
    else:
        resumed = subprocess.run(
            command(others, tmp_path, "bayesian:resumed"), capture_output=True, text=True, timeout=120, check=False
        )
        assert resumed.returncode == 0, resumed.stderr
        result = torch.load(tmp_path / "bayesian.0.pt", weights_only=False)
    expected = alone("bayesian")
    assert len(result["history"]) == 3
    torch.testing.assert_close(result["posterior"], expected["posterior"], rtol=1e-6, atol=1e-9)
    assert result["steps"] == expected["steps"]


def alive(group):
    """Return True if a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_time": {"hours": 1}}, "interval='epoch'"),
        ({"callbacks": [ModelCheckpoint(every_n_train_steps=3)]}, "use every_n_epochs="),
        ({}, "ClientParallelStrategy: it splits the network"),
    ],
)
def test_what_several_processes_cannot_use_is_refused_before_training(options, message, monkeypatch):
    saves = {"enable_checkpointing": "callbacks" in options}
    made = L.Trainer(accelerator="cpu", strategy="fedbayes", devices=2, max_epochs=1, logger=False, **saves, **options)
    if not options:
        monkeypatch.setattr(checks, "ClientParallelStrategy", DDPStrategy)  # one that it is not
    with pytest.raises(FederationError, match=message):
        check_trainer(made, fb.HybridBayesianClassifier(mlp(64, 10)), FederationSettings())
