"""NLL and accuracy by exchange and by byte where a tenth of the clients takes part in each round.

    python -m benchmarks.foundation.features --data DIR --out FOLDER
    python -m benchmarks.foundation.curves --features FOLDER [--seeds 3] [--images 200 1000 5000 50000]

CIFAR-10's features. Rates are chosen on seed 0 by the examples that set temperatures, for each number of images. Each
finished cell is one line of results/curves.jsonl, and no cell is run twice. The table is written into CURVES.md, the
picture is curves.png.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import lightning_fedbayes as fb
from benchmarks import cells as study
from benchmarks.foundation import run as heads
from benchmarks.foundation.features import kept
from benchmarks.page import include
from lightning_fedbayes.core.plots import PALETTE, empty_figure
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table

HERE = Path(__file__).parent
FILE = HERE / "results" / "curves.jsonl"
SIZES, IN_PICTURE, EPOCHS, FRACTION = (200, 1000, 5000, 50_000), 1000, 2, 0.1
SCORED = (1, 2, 4, 8, 15, 30)
"""Rounds after which the global head is scored."""
HELD_OUT, TESTED = 1000, 2000
"""Examples that set temperatures, and that score."""
SPLITS: dict[str, Any] = {
    "100 clients, Dirichlet(0.5)": fb.DirichletPartition(100, alpha=0.5),
    "100 clients, Dirichlet(0.01)": fb.DirichletPartition(100, alpha=0.01, per="client"),
    "100 clients, one class each": fb.ClassPartition(100, 1),
    "10 clients, Dirichlet(0.5)": fb.DirichletPartition(10, alpha=0.5),
    "10 clients, Dirichlet(0.01)": fb.DirichletPartition(10, alpha=0.01, per="client"),
    "10 clients, one class each": fb.ClassPartition(10, 1),
}
CLIENTS = {split: int(split.split()[0]) for split in SPLITS}
EXACT, ALL = heads.ONE_HOT, f"{heads.SOFTMAX}, all clients in each round"
RATES = {
    EXACT: (0.0,),
    ALL: (0.0,),
    "FedAvg": (1e-2, 1e-1, 1.0),
    "FedProx": (1e-2, 1e-1, 1.0),
    "SCAFFOLD": (1e-2, 1e-1, 1.0),
    "sites on the head": (1e-3, 1e-2, 1e-1),
}
"""Rates of SGD, of sites of Adam."""


class Cell(NamedTuple):
    """One head of one split of so many images."""

    split: str
    method: str
    rate: float
    seed: int
    images: int = 1000


class Point(NamedTuple):
    """Scores after some rounds: test NLL, with a temperature, and accuracy; megabytes that all clients have sent."""

    rounds: int
    megabytes: float
    nll: float
    scaled_nll: float
    accuracy: float
    calibration_nll: float


def task_of(found: Mapping[str, Tensor], cell: Cell) -> heads.Task:
    """Return data, dealt out."""
    task = heads.cifar(found, heads.Cell("CIFAR-10", cell.images, "any", "", 0.0, cell.seed))
    for number, part in enumerate(SPLITS[cell.split].split(task.train[1], seed=cell.seed).indices):
        task.clients[part] = number
    calibration, test = ((x[:size], y[:size]) for (x, y), size in ((task.calibration, HELD_OUT), (task.test, TESTED)))
    return task._replace(calibration=calibration, test=test)


def point(task: heads.Task, logs_of: Callable[[Tensor], Tensor], rounds: int, megabytes: float) -> Point:
    """Return scores; ``logs_of`` gives log-probabilities of features."""
    held, test = logs_of(task.calibration[0]), logs_of(task.test[0])
    heat = heads.temperature(held, task.calibration[1])
    nlls = [float(F.cross_entropy(logs, task.test[1])) for logs in (test, test / heat)]
    right = float((test.argmax(-1) == task.test[1]).float().mean())
    return Point(rounds, megabytes, nlls[0], nlls[1], right, float(F.cross_entropy(held / heat, task.calibration[1])))


class Scores(L.Callback):
    """Scores the global head after some rounds."""

    def __init__(self, task: heads.Task, cell: Cell, federation: fb.FederatedBayes) -> None:
        self.task, self.cell, self.federation = task, cell, federation
        self.points: list[Point] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the round."""
        if (rounds := trainer.current_epoch + 1) in SCORED:
            sent = sum(each["megabytes_up"] for each in self.federation.history)
            with torch.no_grad():
                self.points.append(point(self.task, lambda x: self.logs(pl_module, x), rounds, sent))

    def logs(self, module: L.LightningModule, x: Tensor) -> Tensor:
        """Return the log-probabilities by the global posterior."""
        if isinstance(module, fb.HeadModule):
            return heads.head_logs(module.fitted, x)
        if self.cell.method != "sites on the head":
            return module(x).log_softmax(-1)
        posterior = self.federation.posterior
        generator = torch.Generator().manual_seed(0)
        drawn = [posterior.sample(generator=generator) for _ in range(32)]
        layers = [[each[f"layer.0.{name}"] for name in ("weight", "bias")] for each in drawn]
        logs = torch.stack([F.linear(x, *each) for each in layers]).log_softmax(-1)
        return logs.logsumexp(0) - math.log(len(logs))


def run(cell: Cell, found: Mapping[str, Tensor]) -> list[Point]:
    """Return the curve of a cell."""
    task = task_of(found, cell)
    parts = {
        str(k): TensorDataset(*(each[task.clients == k] for each in task.train)) for k in task.clients.unique().tolist()
    }
    if cell.method == ALL:
        return together(task, [each.tensors for each in parts.values()])
    L.seed_everything(cell.seed, verbose=False)
    width, options = task.train[0].shape[1], {"fraction": FRACTION, "seed": cell.seed}
    if cell.method == EXACT:
        module: L.LightningModule = fb.HeadModule(nn.Identity(), fb.BayesianHead(10, "one_hot"), width)
        federation = fb.FederatedBayes(**options)
    else:
        module = heads.Head(width, 10, cell.rate, cell.method)
        module = fb.with_kl(module) if cell.method == "sites on the head" else module
        federation = fb.FederatedBayes(fusion=heads.TUNED[cell.method], local_epochs=EPOCHS, **options)
    scores = Scores(task, cell, federation)
    trainer = L.Trainer(
        max_epochs=SCORED[-1],
        accelerator="cpu",
        logger=False,
        callbacks=[federation, scores],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(fb.ClientDatasets(parts), batch_size=heads.BATCH))
    return scores.points


def together(task: heads.Task, clients: Sequence[Sequence[Tensor]]) -> list[Point]:
    """Return the curve of the softmax head, whose exchanges are of all clients."""
    head = fb.BayesianHead(10, inference="laplace")
    fit = head.fit([head.sums(x, y) for x, y in clients])
    columns, points = task.train[0].shape[1] + 1, []
    sent, rounds = 8e-6 * len(clients) * (columns**2 / 2 + columns * 10), 1
    each = 8e-6 * len(clients) * (columns + 10) * 10
    while True:
        if rounds in SCORED or fit.is_done:
            points.append(point(task, lambda x, fit=fit: heads.head_logs(fit, x), rounds, sent))
        if fit.is_done:
            return points
        fit = head.step(fit, [head.slopes(fit, x, y) for x, y in clients])
        sent, rounds = sent + each, rounds + 1


def of_another_split(cell: Cell, done: Curves) -> list[Point]:
    """Return the curve of the softmax head of another split of the same images: the same, but for bytes of clients."""
    if cell.method != ALL:
        return []
    count = CLIENTS[cell.split]
    for other, points in done.items():
        if other[1:] == cell[1:]:
            return [point._replace(megabytes=point.megabytes * count / CLIENTS[other.split]) for point in points]
    return []


# -- cells, table and picture ------------------------------------------------------------------------------------------

Curves = Mapping[Cell, Sequence[Point]]


def chosen(done: Curves, split: str, method: str, images: int) -> float:
    """Return the rate of the least NLL on the examples that set temperatures, after the last round of seed 0."""
    tried = [Cell(split, method, rate, 0, images) for rate in RATES[method]]
    return min((c for c in tried if c in done), key=lambda c: done[c][-1].calibration_nll, default=tried[0]).rate


def cells_of(seeds: int, done: Curves, sizes: Sequence[int]) -> Iterator[Cell]:
    """Yield cells, those of seed 0 first."""
    for seed, images, split, method in itertools.product(range(seeds), sizes, SPLITS, RATES):
        if method == "FedProx" and images != IN_PICTURE:
            continue  # with 1,000 images it is FedAvg, within 0.005 of NLL
        own = RATES[method] if seed == 0 else [chosen(done, split, method, images)]
        yield from (Cell(split, method, rate, seed, images) for rate in own)


def best(done: Curves, split: str, method: str, images: int) -> list[Sequence[Point]]:
    """Return the curves of a method's chosen rate, one for each seed."""
    wanted = split, method, chosen(done, split, method, images)
    return [curve for cell, curve in done.items() if cell[:3] == wanted and cell.images == images]


def table(done: Curves, images: int, rounds: Sequence[int] = (1, 8, 30)) -> str:
    """Return the scores after some rounds, means over the seeds; a head that is done stays as it is."""
    rows = []
    for split in SPLITS:
        for method in RATES:
            curves = best(done, split, method, images)
            if not curves:
                continue
            rate = f"{chosen(done, split, method, images):g}" if len(RATES[method]) > 1 else ""
            row: list[Any] = [split, method, rate]
            for number in rounds:
                points = [max((p for p in curve if p.rounds <= number), key=lambda p: p.rounds) for curve in curves]
                nll, right = (statistics.fmean(p[i] for p in points) for i in (3, 4))
                row.append(f"{right:.3f} / {nll:.3f}")
            sent = statistics.fmean(curve[-1].megabytes for curve in curves)
            rows.append([*row, f"{sent:.1f}", len(curves)])
    last = [f"round {number}: accuracy / NLL, temperature" for number in rounds]
    return markdown_table(["split", "method", "rate", *last, "MB up, all clients, all rounds", "seeds"], rows)


def picture(done: Curves) -> Any:
    """Return a picture: a row for each split, NLL and accuracy by round, and NLL by megabytes; bands are all seeds."""
    figure = empty_figure(11, 2.6 * len(SPLITS))
    columns = (
        ("round", "rounds", "scaled_nll"),
        ("round", "rounds", "accuracy"),
        ("MB up, all clients", "megabytes", "scaled_nll"),
    )
    axes = figure.subplots(len(SPLITS), len(columns), squeeze=False)
    for row, split in zip(axes, SPLITS):
        for axis, (label, across, up) in zip(row, columns):
            for method, colour in zip(RATES, PALETTE):
                curves = best(done, split, method, IN_PICTURE)
                size = min(len(curve) for curve in curves)
                xs = [statistics.fmean(getattr(c[i], across) for c in curves) for i in range(size)]
                ys = [[getattr(c[i], up) for c in curves] for i in range(size)]
                axis.plot(xs, [statistics.fmean(each) for each in ys], color=colour, label=method, marker=".")
                axis.fill_between(xs, [*map(min, ys)], [*map(max, ys)], color=colour, alpha=0.15, linewidth=0)
            axis.set(xscale="log", xlabel=label, ylabel={"accuracy": "accuracy"}.get(up, "NLL, temperature"))
        row[1].set_title(split, fontsize="medium")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, nargs="+", default=SIZES, help="numbers of training images")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {**kept(arguments.features, "cifar", dict), **kept(arguments.features, "outside", dict)}
    done = {cell: [Point(*each) for each in line["points"]] for cell, line in study.read(FILE, Cell).items()}
    for cell in tqdm(cells_of(arguments.seeds, done, arguments.images)):
        if cell in done:
            continue
        with quietly():
            done[cell] = of_another_split(cell, done) or run(cell, found)
        gc.collect()  # a Trainer is a cycle, and what its clients keep of the one-hot head is a gigabyte
        study.keep(FILE, cell, {"points": done[cell]})
    parts = [(f"## {images:,} training images", table(done, images)) for images in SIZES]
    include(HERE / "CURVES.md", "\n\n".join(text for part in parts if "\n" in part[1] for text in part))
    picture(done).savefig(HERE / "curves.png", dpi=70)


if __name__ == "__main__":
    main()
