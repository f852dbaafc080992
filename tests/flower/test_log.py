"""The run that a server logs has the keys and the values of the same federation in one process."""

import importlib.util
import re

import pytest
from lightning.pytorch.loggers import CSVLogger, WandbLogger

import lightning_fedbayes as fb
from lightning_fedbayes.core.run_file import FILE, read
from lightning_fedbayes.transport.flower import FusionStrategy
from tests.callbacks.wandb_file import go_offline, read_run
from tests.federations import federate
from tests.flower.clients import run
from tests.flower.grid import LocalGrid
from tests.flower.test_calibration import OwnData, apps, make

pytestmark = pytest.mark.slow

NOT_HERE = ("train/", "val/retained", "val/calibration", "val/accuracy_retained", "federation/clients", "val/clients")
"""Keys of pictures, tables and curves, for which a server has no predictions, and of the module's training."""


def alone(loggers):
    federation, data = fb.FederatedBayes(engine="sequential", fusion="rklb", seed=3), OwnData()
    federate(make(), federation, 2, data.train_dataloader(), data.val_dataloader(), logger=loggers)


def over_flower(loggers):
    run(LocalGrid(apps()), FusionStrategy("rklb", wait_for=3, evaluate=True, seed=3, logger=loggers), 2, make)


def over_flare(loggers):
    from tests.nvflare import local

    answering = local.clients(3, make, OwnData, partition=None)
    local.run(answering, "rklb", make=make, rounds=2, evaluate=True, seed=3, logger=loggers)


@pytest.fixture
def logged(tmp_path, monkeypatch):
    go_offline(monkeypatch, tmp_path)

    def log(train):
        wandb = WandbLogger(project="fedbayes", save_dir=str(tmp_path), id=train.__name__.replace("_", "-"))
        train([wandb, CSVLogger(str(tmp_path), train.__name__)])
        wandb.experiment.finish()
        (path,) = (tmp_path / "wandb").glob(f"offline-run-*-{wandb.version}/run-*.wandb")
        recorded = read_run(path)
        for each in (*recorded.history, recorded.defined):  # clients go by numbers, or by the names of sites
            for key in list(each):
                each[re.sub(r"/(c|site-)(\d)$", lambda f: f"/{int(f[2]) - (f[1] != 'c')}", key)] = each.pop(key)
        return recorded, read(tmp_path / train.__name__ / "version_0" / FILE)

    return log


OVER = [over_flower, *([over_flare] if importlib.util.find_spec("nvflare") else [])]


@pytest.mark.parametrize("over", OVER)
def test_a_server_logs_the_keys_and_values_of_one_process(over, logged):
    theirs, _ = logged(alone)
    ours, file = logged(over)
    figures = {key for key in theirs.keys if not key.startswith(NOT_HERE) or key.startswith("val/clients/")}
    assert ours.keys == figures
    exact, drawn = (
        ("federation/posterior_variance", "federation/train_loss"),
        ("client_nll/0", "val/nll", "val/clients/nll"),
    )
    for key in (*exact, *drawn):
        values = [{row["round"]: row[key] for row in each.history if key in row} for each in (ours, theirs)]
        assert values[0].keys() == {1, 2}, key
        assert values[0] == pytest.approx(values[1], rel=1e-4 if key in exact else 0.1), key
    assert ours.defined["val/nll"] == {"min", "last"}
    assert set(ours.defined) - {"trainer/global_step"} <= ours.keys
    assert ours.config["federation"]["fusion"] == theirs.config["federation"]["fusion"]
    assert len(file.figures["client_accuracy/0" if over is over_flower else "client_accuracy/site-1"]) == 2
