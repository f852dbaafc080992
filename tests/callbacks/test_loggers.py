"""One federation logged to W&B, CSV and TensorBoard: every figure, picture and table, with the round beside it."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.modules import mlp
from tests import federations
from tests.callbacks.wandb_file import read_run

pytestmark = pytest.mark.slow

ROUNDS, CLIENTS = 3, 3
UNCERTAINTIES = ("entropy", "epistemic", "kwon_aleatoric", "kwon_epistemic")
SCORES = ("accuracy", "nll", "ece", "brier", "client_accuracy", "worst_client_accuracy", *UNCERTAINTIES)
VALIDATION = {f"val/{name}" for name in (*SCORES, *(f"retained_area_{each}" for each in UNCERTAINTIES))}
CONSTANT = {f"federation/{name}" for name in ("failed_clients", "failed_rounds", "excluded_clients")}
MEASURED = ("seconds", "megabytes_up", "megabytes_down", "posterior_variance", "disagreement", "train_loss")
FEDERATION = {f"federation/{name}" for name in (*MEASURED, "effective_clients")}
OF_CLIENTS = {f"client_{figure}/{client}" for figure in ("accuracy", "train_loss") for client in range(CLIENTS)}
TRAINING = {"train/nll", "train/kl", "train/kl_factor"}
SCALARS = VALIDATION | FEDERATION | TRAINING
STEP = "train/loss_of_a_step"
PICTURES = (f"{stage}/{kind}" for stage in ("val", "test") for kind in ("calibration", "accuracy_retained"))
IMAGES = {"federation/clients_by_class": 0, **dict.fromkeys(PICTURES, ROUNDS)}
SETTINGS = {
    "clients": CLIENTS,
    "fusion": fb.Sites().described,
    "weighting": "train_size",
    "seed": 7,
    "engine": "vectorized",
    "keep": [],
}
COLUMNS = [
    *("client", "examples", "rounds", "failures", "weight", "train_loss"),
    *("accuracy", "seconds", "megabytes_up", "last_failure"),
]
PNG = b"\x89PNG"


class Model(fb.HybridBayesianClassifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log(STEP, loss)
        return loss


def federate(loggers):
    """A small federation over the digits; returns its callback and the figures of each round."""
    torch.manual_seed(0)
    digits = fb.DigitsDataModule()
    digits.setup()
    parts = (digits.train, 150), (digits.validation, 100)
    train, val = (TensorDataset(*(t[:n] for t in part.tensors)) for part, n in parts)
    federation = fb.FederatedBayes(fb.DirichletPartition(clients=CLIENTS, alpha=0.5), seed=7)
    validations = []
    recorder = LambdaCallback(on_train_epoch_end=lambda made, _: validations.append(made.callback_metrics.copy()))
    model = Model(mlp(64, 10, (12,)), bayesian_last=1, learning_rate=0.01)
    trainer = federations.trainer(ROUNDS, [federation, recorder], logger=loggers, log_every_n_steps=1)
    trainer.fit(model, DataLoader(train, 16, shuffle=True), DataLoader(val, 64))
    trainer.test(model, DataLoader(val, 64), verbose=False)
    rounds = [
        {name: float(scores[name]) for name in VALIDATION & scores.keys()}
        | {f"federation/{name}": value for name, value in figures.items() if name != "round"}
        for scores, figures in zip(validations, federation.history, strict=True)
    ]
    return federation, rounds


@pytest.fixture(scope="module")
def logged(home):
    """Folder, callback and figures of one federation with all three loggers."""
    import wandb

    files = CSVLogger(str(home), name="csv"), TensorBoardLogger(str(home), name="tensorboard")
    federation, rounds = federate([WandbLogger(project="fedbayes", save_dir=str(home), offline=True), *files])
    wandb.finish()
    return home, federation, rounds


def same(values, expected):
    return values == pytest.approx(expected, rel=1e-5, nan_ok=True)


def test_the_rounds_have_the_figures_of_the_federation(logged):
    _, federation, rounds = logged
    assert [figures["round"] for figures in federation.history] == [1, 2, 3]
    assert len(rounds) == ROUNDS
    for figures in rounds:
        assert set(figures) >= VALIDATION | FEDERATION | CONSTANT
        assert figures["federation/failed_clients"] == 0
        assert figures["federation/seconds"] > 0
        assert figures["federation/posterior_variance"] > 0
        assert 1 <= figures["federation/effective_clients"] <= CLIENTS
        # once per client: up mean and gradient of each parameter, precision of each Gaussian one, and two numbers, all
        # float32; down mean and variance, and in float64 the sum of gradients, five numbers and two tensors' start
        gaussian = 12 * 10 + 10
        parameters = 64 * 12 + 12 + gaussian
        up, down = 4 * (2 * parameters + gaussian + 2), 4 * (parameters + gaussian) + 8 * (parameters + 5 + 2)
        assert figures["federation/megabytes_up"] == pytest.approx(CLIENTS * up / 1e6)
        assert figures["federation/megabytes_down"] == pytest.approx(CLIENTS * down / 1e6)


@pytest.fixture(scope="module")
def run(logged):
    (path,) = (logged[0] / "wandb").glob("offline-run-*/run-*.wandb")
    return path.parent, read_run(path)


def entries(history, name):
    """The rows of the history that have ``name``, a number."""
    return [row for row in history if isinstance(row.get(name), int | float)]


def test_wandb_config_has_the_settings_of_federation_and_model(run):
    _, recorded = run
    assert recorded.project == "fedbayes"
    settings = recorded.config["federation"]
    assert SETTINGS.items() <= settings.items()
    assert settings["partition"].startswith("DirichletPartition(clients=3, alpha=0.5")
    assert recorded.config["bayesian_last"] == 1
    assert recorded.config["estimator"] == "local_reparameterization"


def test_wandb_history_has_every_figure_beside_its_round(run, logged):
    for name in sorted(SCALARS | OF_CLIENTS):
        rows = entries(run[1].history, name)
        assert [row["round"] for row in rows] == [1, 2, 3]
        if name not in TRAINING | OF_CLIENTS:
            assert same([row[name] for row in rows], [figures[name] for figures in logged[2]])


@pytest.mark.parametrize("name", IMAGES)
def test_wandb_has_the_images(run, name):
    folder, recorded = run
    (row,) = (row for row in recorded.history if f"{name}/_type" in row)
    assert row[f"{name}/_type"] == "image-file"
    assert row["round"] == IMAGES[name]
    path = row[f"{name}/path"]
    assert path.startswith(f"media/images/{name}_")
    assert (folder / "files" / path).read_bytes().startswith(PNG)


def test_wandb_has_the_table_of_clients(run, logged):
    folder, recorded = run
    (row,) = (row for row in recorded.history if row.get("federation/clients/_type") == "table-file")
    assert row["round"] == ROUNDS
    table = json.loads((folder / "files" / row["federation/clients/path"]).read_text())
    assert table["columns"] == COLUMNS
    check_table(table["data"], logged)


def check_table(rows, logged):
    """One row per client, in the terms of the federation."""
    _, federation, rounds = logged
    columns = {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
    assert [str(name) for name in columns["client"]] == list(federation.clients.names)
    sizes = [int(n) for n in columns["examples"]]
    assert sizes == list(federation.clients.sizes)
    assert [int(n) for n in columns["rounds"]] == [ROUNDS] * CLIENTS
    assert [int(n) for n in columns["failures"]] == [0] * CLIENTS
    assert [float(w) for w in columns["weight"]] == pytest.approx([n / sum(sizes) for n in sizes])
    sent = math.fsum(float(megabytes) for megabytes in columns["megabytes_up"])
    assert sent == pytest.approx(rounds[-1]["federation/megabytes_up"])
    loss = math.fsum(n * float(loss) for n, loss in zip(sizes, columns["train_loss"], strict=True)) / sum(sizes)
    assert loss == pytest.approx(rounds[-1]["federation/train_loss"])
    mean = math.fsum(n * float(a) for n, a in zip(sizes, columns["accuracy"], strict=True)) / sum(sizes)
    assert mean == pytest.approx(rounds[-1]["val/client_accuracy"], rel=1e-5)
    worst = min(float(a) for a in columns["accuracy"])
    assert worst == pytest.approx(rounds[-1]["val/worst_client_accuracy"], rel=1e-5)
    assert list(columns["last_failure"]) == [""] * CLIENTS


@pytest.fixture(scope="module")
def csv_folder(logged):
    (folder,) = (logged[0] / "csv").iterdir()
    return folder


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_csv_has_every_figure_beside_its_round(csv_folder, logged):
    for name in sorted(SCALARS | CONSTANT):
        head, *lines = read_csv(csv_folder / "metrics.csv")
        rows = [dict(zip(head, line, strict=True)) for line in lines]
        rows = [row for row in rows if row[name]]
        assert [float(row["round"]) for row in rows] == [1, 2, 3]
        if name not in TRAINING:
            assert same([float(row[name]) for row in rows], [figures[name] for figures in logged[2]])


def test_csv_has_pictures_and_table_as_files_beside_it(csv_folder, logged):
    names = {path.name for path in csv_folder.iterdir()}
    pictures = {f"{name.replace('/', '_')}.png" for name in IMAGES}
    assert names == {"metrics.csv", "hparams.yaml", "federation_clients.csv", "federation.jsonl"} | pictures
    for name in pictures:
        assert (csv_folder / name).read_bytes().startswith(PNG)
    head, *rows = read_csv(csv_folder / "federation_clients.csv")
    assert head == COLUMNS
    check_table(rows, logged)


def test_csv_hyperparameters_have_the_settings_of_federation_and_model(csv_folder):
    recorded = yaml.safe_load((csv_folder / "hparams.yaml").read_text())
    assert SETTINGS.items() <= recorded["federation"].items()
    assert recorded["bayesian_last"] == 1


@pytest.fixture(scope="module")
def events(logged):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (logged[0] / "tensorboard").iterdir()
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    return accumulator.Reload()


def test_tensorboard_has_every_figure_at_the_step_of_its_round(events, logged):
    for name in sorted(SCALARS):
        rounds = {event.step: event.value for event in events.Scalars("round")}
        assert [rounds[event.step] for event in events.Scalars(name)] == [1, 2, 3]
        values = [event.value for event in events.Scalars(name)]
        if name not in TRAINING:
            assert same(values, [figures[name] for figures in logged[2]])


@pytest.mark.parametrize("name", IMAGES)
def test_tensorboard_has_the_images(events, name):
    (image,) = events.Images(name)
    assert image.step == IMAGES[name]
    assert image.encoded_image_string.startswith(PNG)


def test_without_a_logger_nothing_is_written(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, rounds = federate(loggers=False)
    assert len(rounds) == ROUNDS
    assert list(tmp_path.rglob("*")) == []


SCRIPT = """
import os
from lightning.pytorch.loggers import WandbLogger
from torch.utils.data import DataLoader
import lightning_fedbayes as fb
from tests.federations import bayesian, blobs, federate

federate(bayesian(), fb.FederatedBayes(fb.IIDPartition(2)), 2, val=DataLoader(blobs(), 40), logger=WandbLogger())
assert "WANDB_MODE" not in os.environ
"""


def test_without_an_account_wandb_logs_offline_and_asks_nothing(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "NETRC"))}
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    environment |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(Path(__file__).parents[2])}
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 120, "check": False}
    finished = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path / "work", env=environment, **options)
    assert finished.returncode == 0, finished.stderr
    assert "wandb sync" in finished.stdout + finished.stderr  # says how to upload it later
    assert "anonymous" not in finished.stdout + finished.stderr  # which Lightning sets, not the user
    (path,) = (tmp_path / "work").rglob("offline-run-*/run-*.wandb")
    recorded = read_run(path)
    assert [row["round"] for row in entries(recorded.history, "val/accuracy")] == [1, 2]
