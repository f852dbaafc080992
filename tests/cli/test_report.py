"""The page of a run: what it shows, from each logger's folder, in one file; and runs of which there is no page."""

import math
import re
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.cli import main
from lightning_fedbayes.cli.report import BOTTOM, HEIGHT, LEFT, PAGE, RIGHT, TOP, WIDTH, page
from lightning_fedbayes.cli.results import read_curves
from lightning_fedbayes.core.run_file import FILE, read
from lightning_fedbayes.modules import mlp
from tests import federations
from tests.cli.commands import ROOT, refusal

pytestmark = pytest.mark.slow

ROUNDS, CLIENTS = 20, 4


@pytest.fixture(scope="module")
def runs(home):
    """Folders of a CSVLogger and of W&B, offline, of one federation of 20 rounds, validated in every second."""
    digits = fb.DigitsDataModule()
    digits.setup()
    train, val = (TensorDataset(*(t[:200] for t in part.tensors)) for part in (digits.train, digits.validation))
    torch.manual_seed(0)
    wandb = WandbLogger(project="fedbayes", save_dir=str(home), offline=True)
    partition, loggers = fb.DirichletPartition(CLIENTS, alpha=0.5), [wandb, CSVLogger(str(home), name="csv")]
    callbacks = [fb.FederatedBayes(partition, fusion="reverse_kl_barycenter")]
    options = {"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2, "log_every_n_steps": 1}
    trainer = federations.trainer(ROUNDS, callbacks, logger=loggers, **options)
    model = fb.HybridBayesianClassifier(mlp(64, 10, (12,)), bayesian_last=1, learning_rate=0.03)
    trainer.fit(model, DataLoader(train, 16), DataLoader(val, 100))
    wandb.experiment.finish()
    (offline,) = (home / "wandb").glob("offline-run-*")
    return home / "csv" / "version_0", offline


class Page(HTMLParser):
    """Checks that every element is closed, and keeps the pictures."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.feed(text)
        self.close()
        assert self.open == []
        figures = map(ElementTree.fromstring, re.findall(r"<figure>.*?</figure>", text))
        self.charts = {figure.find("figcaption").text: figure.find("svg") for figure in figures}

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def places(svg):
    """The points of every line of a chart, in its own units."""
    return [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in svg.findall("polyline")
    ]


@pytest.fixture(scope="module")
def record(runs):
    return read(runs[0] / FILE)


@pytest.fixture(scope="module")
def shown(record):
    return Page(page(record, "a <run>"))


@pytest.mark.parametrize("logger", [0, 1], ids=["csv", "wandb"])
def test_a_page_is_made_from_the_folder_of_each_logger_in_less_than_five_seconds(runs, logger, tmp_path):
    output = tmp_path / "new" / "page.html"
    code = "import sys; from lightning_fedbayes.cli import main; sys.exit(main())"
    start = time.perf_counter()
    command = [sys.executable, "-c", code, "report", str(runs[logger]), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert time.perf_counter() - start < 5
    assert (done.returncode, done.stdout.strip()) == (0, str(output)), done.stderr
    assert Page(output.read_text()).charts


def test_the_file_of_a_run_has_what_a_csv_logger_gets(runs, record):
    """In the rounds in which it gets it: a validation in every second."""
    curves = read_curves(runs[0] / "metrics.csv")
    assert set(record.figures) == set(curves)
    for name, values in curves.items():
        known = {round: value for round, value in enumerate(values, start=1) if not math.isnan(value)}
        assert record.figures[name] == pytest.approx(known, rel=1e-5), name
    assert list(record.figures["val/nll"]) == list(range(2, ROUNDS + 1, 2))
    assert len(record.figures["federation/seconds"]) == ROUNDS


def test_the_page_is_one_file(record):
    wrong = dict.fromkeys(record.settings, "<run>")  # a file may say anything
    text = page(replace(record, settings={**wrong, "network": None}), "a <run>")
    assert "a &lt;run&gt;" in text
    assert "<h1>&lt;run&gt; clients by &lt;run&gt;</h1>" in text
    assert not re.search(r"http|src=|href=|url\(|@import|<script|<run>", text)


def test_the_page_has_the_curves_in_their_places(record, shown):
    assert {"accuracy", "NLL", "train loss", "validation accuracy by confidence"} <= set(shown.charts)
    (line,) = places(shown.charts["NLL"])
    values = record.figures["val/nll"]
    assert len(line) == len(values) == ROUNDS / 2
    low, high = min(values.values()), max(values.values())
    for (x, y), (round, value) in zip(line, values.items()):
        assert x == pytest.approx(LEFT + (round - 2) / (ROUNDS - 2) * (WIDTH - LEFT - RIGHT), abs=0.06)
        assert y == pytest.approx(TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM), abs=0.06)
    assert len(places(shown.charts["accuracy of each client"])) == CLIENTS
    assert len(places(shown.charts["validation accuracy of the most certain, by"])) == 4


def test_a_run_that_was_killed_has_a_page(runs, tmp_path, capsys):
    whole = (runs[0] / FILE).read_bytes()
    lines = whole.split(b"\n")
    (tmp_path / FILE).write_bytes(b"\n".join(lines[:12]) + b"\n" + lines[12][:20])
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / PAGE).read_text()
    assert "cut short and left out" in text
    assert "table of clients is written at the end of a run" in text


def test_runs_without_a_page_are_refused(runs, tmp_path, capsys):
    assert "did you mean" in refusal(capsys, "report", str(runs[0].parent))
    assert "nowhere is not the folder of a federation's run" in refusal(capsys, "report", "nowhere")
    (tmp_path / FILE).write_text("")
    assert "holds no round" in refusal(capsys, "report", str(tmp_path))
    (tmp_path / FILE).write_text("{\n")
    assert "line 1 of 1 is damaged" in refusal(capsys, "report", str(tmp_path))
    assert "did you mean '--output'" in refusal(capsys, "report", str(runs[0]), "--outptu=x")
    assert not (tmp_path / PAGE).exists()
