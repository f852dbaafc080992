"""The page of a run: what it shows, from each logger's folder, in one file; and runs of which there is no page."""

import csv
import math
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from xml.etree import ElementTree

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.cli import main
from lightning_fedbayes.cli.report import BOTTOM, HEIGHT, LEFT, PAGE, RIGHT, TOP, WIDTH, by_round, chart, page, ticks
from lightning_fedbayes.cli.results import read_curves
from lightning_fedbayes.core.run_file import FILE, RunRecord, read
from lightning_fedbayes.modules import mlp
from tests.cli.commands import ROOT, refusal

ROUNDS, CLIENTS = 20, 4
VOID = {"meta"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of a CSVLogger and of W&B, offline, of one federation of 20 rounds, validated in every second."""
    home = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        for name in ("CACHE", "DATA", "CONFIG"):
            patch.setenv(f"WANDB_{name}_DIR", str(home / name.lower()))
        digits = fb.DigitsDataModule()
        digits.setup()
        train, val = (TensorDataset(*(t[:200] for t in part.tensors)) for part in (digits.train, digits.validation))
        torch.manual_seed(0)
        wandb = WandbLogger(project="fedbayes", save_dir=str(home), offline=True)
        trainer = L.Trainer(
            max_epochs=ROUNDS,
            accelerator="cpu",
            logger=[wandb, CSVLogger(str(home), name="csv")],
            callbacks=[fb.FederatedBayes(fb.DirichletPartition(CLIENTS, alpha=0.5), fusion="reverse_kl_barycenter")],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            check_val_every_n_epoch=2,
            log_every_n_steps=1,
        )
        model = fb.HybridBayesianClassifier(mlp(64, 10, (12,)), bayesian_last=1, learning_rate=0.03)
        trainer.fit(model, DataLoader(train, 16), DataLoader(val, 100))
        wandb.experiment.finish()
    (offline,) = (home / "wandb").glob("offline-run-*")
    return home / "csv" / "version_0", offline


class Page(HTMLParser):
    """Checks that every element is closed, and keeps the cells of tables and the pictures."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tables = [], []
        self.feed(text)
        self.close()
        assert self.open == []
        self.charts = {
            figure.find("figcaption").text: figure.find("svg")
            for figure in map(ElementTree.fromstring, re.findall(r"<figure>.*?</figure>", text))
        }

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


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
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(runs[logger]), "--output", str(output)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert time.perf_counter() - start < 5
    assert (done.returncode, done.stdout.strip()) == (0, str(output)), done.stderr
    assert Page(output.read_text()).tables


def test_the_page_lies_in_the_folder_of_the_run(runs, capsys):
    for run in runs:
        assert main(["report", str(run)]) == 0
        assert capsys.readouterr().out.strip() == str(run / PAGE)
    first, second = ((run / PAGE).read_text().replace(run.name, "") for run in runs)
    assert first == second


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
    text = page(record, "a <run>")
    assert "a &lt;run&gt;" in text
    assert not re.search(r"http|src=|href=|url\(|@import|<script|<run>", text)


def test_the_page_has_the_curves_in_their_places(record, shown):
    assert {
        "accuracy",
        "NLL",
        "ECE",
        "train loss",
        "disagreement",
        "validation accuracy by confidence",
        "accuracy of each client",
        "megabytes in a round, all clients",
    } <= set(shown.charts)
    (line,) = places(shown.charts["NLL"])
    values = record.figures["val/nll"]
    assert len(line) == len(values) == ROUNDS / 2
    low, high = min(values.values()), max(values.values())
    for (x, y), (round, value) in zip(line, values.items()):
        assert x == pytest.approx(LEFT + (round - 2) / (ROUNDS - 2) * (WIDTH - LEFT - RIGHT), abs=0.06)
        assert y == pytest.approx(TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM), abs=0.06)
    assert len(places(shown.charts["accuracy of each client"])) == CLIENTS
    assert len(places(shown.charts["validation accuracy of the most certain, by"])) == 4


def test_calibration_is_drawn_in_three_rounds_the_last_one_by_share(record, shown):
    svg = shown.charts["validation accuracy by confidence"]
    bins = record.curves["val/calibration_curve"]
    assert list(bins) == list(range(2, ROUNDS + 1, 2))
    assert [len(line) for line in places(svg)] == [len(bins[round]["rows"]) for round in (2, 12, 20)]
    discs = [(float(disc.get("cx")), float(disc.get("cy")), float(disc.get("r"))) for disc in svg.findall("circle")]
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    expected = [
        (LEFT + x * across, HEIGHT - BOTTOM - y * up, 1.5 + 12 * math.sqrt(share))
        for x, y, _, share in bins[20]["rows"]
    ]
    assert sum(discs, ()) == pytest.approx(sum(expected, ()), abs=0.06)
    gap = sum(share * abs(x - y) for x, y, _, share in bins[20]["rows"])
    assert gap == pytest.approx(record.figures["val/ece"][20], abs=1e-5)


def test_retained_curves_end_at_the_accuracy_and_have_their_areas(record):
    for round, table in record.curves["val/retained_curve"].items():
        shares, *curves = zip(*table["rows"])
        assert shares == pytest.approx([point / 50 for point in range(1, 51)])
        for name, curve in zip(table["columns"][1:], curves, strict=True):
            assert curve[-1] == pytest.approx(record.figures["val/accuracy"][round])
            area = record.figures[f"val/retained_area_{name}"][round]
            assert sum(curve) / len(curve) == pytest.approx(area, abs=0.02)


def test_the_least_accurate_clients_come_first(record, shown):
    table = next(table for table in shown.tables if table[0][0] == "client")
    assert table[0] == ["client", "examples", "accuracy", "train loss", "failures"]
    accuracies = [float(row[2]) for row in table[1:]]
    assert len(accuracies) == CLIENTS
    assert accuracies == sorted(accuracies)
    assert sum(int(row[1]) for row in table[1:]) == 200


def test_the_traffic_adds_up(record, shown):
    up = record.figures["federation/megabytes_up"]
    lines = places(shown.charts["megabytes so far, all clients"])
    assert len(lines) == 2
    assert f"up, {sum(up.values()):.4g} in all<" in page(record, "run")
    first, last = lines[0][0], lines[0][-1]
    assert (first[1], last[1]) == (HEIGHT - BOTTOM, TOP)
    assert lines[0][ROUNDS // 2 - 1][1] == pytest.approx(  # half of the rounds, half of the way
        HEIGHT - BOTTOM - (ROUNDS / 2 - 1) / (ROUNDS - 1) * (HEIGHT - TOP - BOTTOM), abs=0.1
    )


def test_the_settings_and_the_network_are_told(record, shown):
    text = page(record, "run")
    parameters = 64 * 12 + 12 + 12 * 10 + 10
    assert f"Sequential of {parameters} parameters, {parameters} trained, 130 Gaussian" in text
    settings = dict(next(table for table in shown.tables if table[0] == ["setting", "value"]))
    assert settings["fusion"] == "reverse_kl_barycenter"
    assert settings["client sizes"] == str(record.settings["client_sizes"])
    assert "network" not in settings


class Filled(nn.Module):
    """Zeros in the place of missing values."""

    def forward(self, x):
        return x.nan_to_num()


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_table_of_the_clients_data_is_on_the_page_with_what_is_missing(engine, tmp_path):
    torch.manual_seed(0)
    clients = {name: TensorDataset(torch.randn(20, 2), 10 * k + torch.randn(20)) for k, name in enumerate("abc")}
    clients["b"].tensors[0][:3, 1] = math.nan
    model = fb.HybridBayesianRegressor(nn.Sequential(Filled(), mlp(2, 1, (4,))), bayesian_last=1)
    L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=CSVLogger(str(tmp_path), name="csv"),
        log_every_n_steps=1,
        callbacks=[fb.FederatedBayes(engine=engine)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, DataLoader(fb.ClientDatasets(clients), 10))
    run = tmp_path / "csv" / "version_0"
    assert main(["report", str(run)]) == 0
    text = (run / PAGE).read_text()
    assert "<summary>federation/statistics</summary>" in text
    head, *rows = next(table for table in Page(text).tables if "missing" in table[0])
    found = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert {name: (each["examples"], each["missing"]) for name, each in found.items()} == {
        "all": ("60", "3"),
        "a": ("20", "0"),
        "b": ("20", "3"),
        "c": ("20", "0"),
    }
    known = clients["b"].tensors[0][3:, 1]
    assert float(found["b"]["inputs 1 mean"]) == pytest.approx(float(known.mean()), rel=1e-3)
    assert float(found["b"]["inputs 1 std"]) == pytest.approx(float(known.std(correction=0)), rel=1e-3)
    assert float(found["c"]["targets 0 mean"]) == pytest.approx(float(clients["c"].tensors[1].mean()), rel=1e-3)
    assert found["all"]["targets shift"] == "0"
    with (run / "federation_statistics.csv").open() as file:
        assert [row[:3] for row in csv.reader(file)] == [row[:3] for row in (head, *rows)]


def test_clients_that_failed_and_names_of_any_kind_are_told():
    record = RunRecord()
    columns = ["client", "examples", "rounds", "failures", "weight", "train_loss", "accuracy", "last_failure"]
    nan = math.nan
    record.add({"round": 2, "figures": {"test/nll": 0.25, "client_accuracy/<b>": 1.0, "val/nll": nan}})
    record.add(
        {
            "round": 2,
            "table": "federation/clients",
            "columns": columns,
            "rows": [
                ["none", 3, 1, 0, 0.5, nan, nan, ""],
                ["<b>", 4, 2, 1, 0.5, 0.1, 0.9, "ValueError: a & b"],
                ["worst", 1, 1, 0, 0.1, 2.0, 0.1, ""],
            ],
        }
    )
    shown = page(record, "run")
    table = next(table for table in Page(shown).tables if table[0][0] == "client")
    assert [row[0] for row in table[1:]] == ["worst", "<b>", "none"]
    assert "&lt;b&gt; was left out, last for ValueError: a &amp; b" in shown
    assert "test NLL<b>0.25</b>" in shown


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


@pytest.mark.parametrize(
    "values",
    [
        {},
        {1: 0.5},
        {1: math.nan},
        {1: 0.0, 2: 0.0},
        {1: 1e-20, 2: 1.0},
        {1: -1.0, 2: 1e200},
        {1: math.inf, 2: 3.0},
        {1: 1e-300, 2: 3e-300},
        {100_000: 1.0, 1: 0.999999},
        {1: -5e149, 2: 5e149},
    ],
)
def test_any_curve_can_be_drawn(values):
    svg = ElementTree.fromstring(by_round("a & b", {"<i>": values})).find("svg")
    (line,) = svg.findall("polyline")
    drawn = [point for point in values.values() if abs(point) < 1e150]
    assert line.get("points").count(",") == len(drawn)
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in places(svg)[0])
    assert len(svg.findall("circle")) == (len(drawn) == 1)
    assert len(svg.findall("text")) <= 20


def test_a_chart_of_many_orders_of_magnitude_is_logarithmic():
    svg = ElementTree.fromstring(chart("x", {"": [(0.0, 1e-6), (1.0, 1e-3), (2.0, 1.0)]}, "x")).find("svg")
    middle = (HEIGHT - BOTTOM + TOP) / 2
    assert [y for _, y in places(svg)[0]] == pytest.approx([HEIGHT - BOTTOM, middle, TOP], abs=0.06)
    assert "1e-4" in "".join(svg.itertext())


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.2, 0.23), (-3, 1000), (1e-9, 2e-9), (1, 20), (0, 7)])
def test_marks_of_an_axis_are_few_round_and_inside(low, high):
    for whole in (False, True):
        found = ticks(low, high, whole)
        assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
        assert len(found) <= 6
        assert whole or len(found) >= 2
        assert not whole or all(tick == int(tick) for tick in found)
