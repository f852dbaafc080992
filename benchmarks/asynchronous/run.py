"""Time to the pooled posterior with and without rounds, where two of ten clients are ten times slower.

    python -m benchmarks.asynchronous.run [--seeds 5] [--only logistic|digits|absences|liars]

"logistic": Bayesian logistic regression on three splits, whose problems are solved exactly. "digits": the federation of
``make demo``, and a plain network by averages. "absences": a client that is 100 times slower, one that is away for 50
arrivals, one that never answers. "liars": one of ten clients lies and is ten times as fast. Times are virtual: a
client's work takes a log-normal time (σ 0.5, median 1). Each finished cell is one line of results/cells.jsonl, and no
cell is run twice. The tables are written into README.md, the picture is times.png.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset, random_split

import lightning_fedbayes as fb
from benchmarks import cells as study
from benchmarks.page import include
from benchmarks.posterior import logistic
from benchmarks.untrusted.adversaries import Attacks, GaussianVector, ScaledUpdate, SignFlip, UpdateAttack
from lightning_fedbayes.core.plots import PALETTE, empty_figure
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.modules import mlp

HERE = Path(__file__).parent
FILE = HERE / "results" / "cells.jsonl"
CLIENTS, SLOW, FACTOR = 10, 2, 10.0
KL, ERROR, NLL = 0.02, 0.2, 0.16
"""Bars: KL per parameter and means' error in standard deviations of the pooled posterior; validation NLL of digits."""
MOST_POINTS = 60
"""Points of a curve that are kept."""
BUFFERS = {"by rounds": CLIENTS, "buffer of 5": 5, "one by one": 1}
SWEEPS = {"logistic": {"by rounds": 60, "buffer of 5": 120, "one by one": 120}, "digits": dict.fromkeys(BUFFERS, 40)}
"""Messages of a federation, in units of its clients."""
AVERAGES: dict[str, tuple[int, fb.Late]] = {
    "FedAvg by rounds": (CLIENTS, fb.methods.FedBuff()),
    "FedBuff, buffer of 5": (5, fb.methods.FedBuff()),
    "FedBuff, one by one": (1, fb.methods.FedBuff()),
    "FedAsync, one by one": (1, fb.methods.FedAsync()),
}
ABSENCES = {
    "100 times slower": fb.Delays(slow={0: 100.0}),
    "away for 50 arrivals": fb.Delays(away=((0, 2.0, 7.0),)),
    "never answers": fb.Delays(away=((0, 0.1, math.inf),)),
}
FEW, SOME = 2, 3
"""Seeds of rows that take long, and of liars."""
DATA = ("digits", "breast cancer")
RULES: dict[str, tuple[int, int, str, fb.Late]] = {
    "sites": (60, 5, "sites", fb.methods.FedBuff()),
    "FedBuff": (60, 5, "fedavg", fb.methods.FedBuff()),
    "FedAsync, one by one": (180, 1, "fedavg", fb.methods.FedAsync()),
}
"""Study "liars": rule → its number of fusions, buffer, method and late messages."""
LIES: dict[str, tuple[float | None, tuple[UpdateAttack, ...]]] = {
    "none, no bound": (None, ()),
    "none": (2.0, ()),
    "flipped × 10": (2.0, (SignFlip([0], scale=10.0),)),
    "noise, σ = 1": (2.0, (GaussianVector([0]),)),
    "update × 1000": (2.0, (ScaledUpdate([0], factor=1000.0),)),
    "flipped × 10, no bound": (None, (SignFlip([0], scale=10.0),)),
}
"""Lie of the fast client → ``max_influence``, and its attacks."""
LONG = 400
"""Sweeps of the study "absences": the slow client is heard several times."""


class Cell(NamedTuple):
    """One federation."""

    study: str
    split: str
    row: str
    seed: int


def cells_of(seeds: int) -> Iterator[Cell]:
    """Yield all cells."""
    *most, last = BUFFERS  # one by one takes the longest
    for rows, count in ((most, seeds), ([last], min(seeds, FEW))):
        for seed in range(count):
            yield from (Cell("digits", "sites", row, seed) for row in rows)
            yield from (Cell("logistic", split, row, seed) for split in logistic.SPLITS for row in rows)
    for seed in range(min(seeds, FEW)):
        yield from (Cell("absences", "IID", row, seed) for row in ABSENCES)
        yield from (Cell("digits", "plain", row, seed) for row in AVERAGES)
    for seed in range(min(seeds, SOME)):
        yield from (Cell("liars", f"{data}, {rule}", lie, seed) for lie in LIES for data in DATA for rule in RULES)


def stragglers(seed: int) -> fb.Delays:
    """Return delays in which two clients, drawn from the seed, are ten times slower."""
    order = torch.randperm(CLIENTS, generator=torch.Generator().manual_seed(100 + seed))
    return fb.Delays(slow=dict.fromkeys(order[:SLOW].tolist(), FACTOR))


# -- federations -------------------------------------------------------------------------------------------------------


def run(cell: Cell, data: TensorDataset, pooled: fb.GaussianPosterior) -> dict[str, Any]:
    """Return the time to the bar, and the curve: (time, KL or NLL) of some of the fusions."""
    if cell.study == "absences":
        return absences(cell, data, pooled)
    if cell.study == "liars":
        return liars(cell, data)
    if cell.study == "digits":
        return digits(cell)
    schedule = fb.Asynchronous(buffer=BUFFERS[cell.row], delays=stragglers(cell.seed))
    turns = SWEEPS["logistic"][cell.row] * CLIENTS // BUFFERS[cell.row]
    federation, distances = exact(cell, data, pooled, schedule, turns)
    times = [each["schedule/time"] for each in federation.history]
    met = [time for time, each in zip(times, distances) if each.kl <= KL and each.mean_error <= ERROR]
    return {"time": met[0] if met else math.inf, "curve": thinned(times, [each.kl for each in distances])}


def exact(
    cell: Cell, data: TensorDataset, pooled: fb.GaussianPosterior, schedule: fb.Asynchronous, turns: int
) -> tuple[fb.FederatedBayes, list[logistic.Distance]]:
    """Run a logistic regression by sites; return its federation, and the distance after every fusion."""
    L.seed_everything(cell.seed, verbose=False)
    module = logistic.LogisticRegression(data.tensors[0].shape[1], len(data), pooled)
    federation = fb.FederatedBayes(
        logistic.SPLITS[cell.split], engine="sequential", fusion="sites", schedule=schedule, seed=cell.seed
    )
    logistic.fit(module, data, turns, [federation])
    return federation, module.distances


def absences(cell: Cell, data: TensorDataset, pooled: fb.GaussianPosterior) -> dict[str, Any]:
    """Return how far the end is from the posterior of those that were heard, and how often client 0 was."""
    schedule = fb.Asynchronous(buffer=5, delays=ABSENCES[cell.row])
    federation, distances = exact(cell, data, pooled, schedule, LONG * CLIENTS // 5)
    end = distances[-1]
    heard = federation.federation.server.accepted
    if 0 not in heard:  # the truth is the posterior of the others
        others = ConcatDataset([each for number, each in enumerate(federation.clients.datasets) if number in heard])
        inputs, labels = (torch.stack(each) for each in zip(*others))
        end = logistic.distance(federation.posterior, logistic.pooled_posterior(TensorDataset(inputs, labels)))
    return {"kl": end.kl, "mean_error": end.mean_error, "variance_ratio": end.variance_ratio, "heard": 0 in heard}


class Curve(L.Callback):
    """Keeps virtual time and validation NLL."""

    def __init__(self, federation: fb.FederatedBayes) -> None:
        self.federation = federation
        self.points: list[tuple[float, float, float]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        nll, accuracy = (float(trainer.callback_metrics[f"val/{name}"]) for name in ("nll", "accuracy"))
        self.points.append((self.federation.history[-1]["schedule/time"], nll, accuracy))


def digits(cell: Cell) -> dict[str, Any]:
    """Run the demo's federation by sites, or its network without Bayesian layers by averages."""
    L.seed_everything(cell.seed, verbose=False)
    by_sites = cell.split == "sites"
    buffer, late = (BUFFERS[cell.row], fb.methods.FedBuff()) if by_sites else AVERAGES[cell.row]
    module = fb.HybridBayesianClassifier(
        mlp(64, 10), bayesian_last=2 if by_sites else 0, estimator="flipout", learning_rate=0.01, kl_weight=0.05
    )
    federation = fb.FederatedBayes(
        fb.DirichletPartition(CLIENTS, alpha=0.5),
        local_epochs=2,
        fusion="sites" if by_sites else "fedavg",
        schedule=fb.Asynchronous(buffer=buffer, delays=stragglers(cell.seed), late=late),
        seed=cell.seed,
    )
    curve = Curve(federation)
    trainer = trainer_of(SWEEPS["digits"]["by rounds"] * CLIENTS // buffer, [federation, curve])
    trainer.fit(module, datamodule=fb.DigitsDataModule())
    met = [time for time, nll, _ in curve.points if nll <= NLL]
    last = curve.points[-len(curve.points) // 10 :]
    times, nlls, _ = zip(*curve.points)
    return {
        "time": met[0] if met else math.inf,
        "curve": thinned(times, nlls),
        "nll": statistics.fmean(each[1] for each in last),
        "accuracy": statistics.fmean(each[2] for each in last),
        "sigma": float(federation.posterior.flatten()[1].sqrt().median()),
    }


def liars(cell: Cell, cancer: TensorDataset) -> dict[str, Any]:
    """Return validation accuracy and NLL of a federation whose client 0 is ten times as fast, and lies."""
    L.seed_everything(cell.seed, verbose=False)
    data, rule = cell.split.split(", ", 1)
    (fusions, buffer, fusion, late), (bound, attacks) = RULES[rule], LIES[cell.row]
    bayesian = 2 if fusion == "sites" else 0
    if data == "digits":
        digits, sizes = fb.DigitsDataModule(), (64, 10)
        digits.prepare_data()
        digits.setup("fit")
        train, validation = digits.train_dataloader(), digits.val_dataloader()
    else:
        examples, sizes = TensorDataset(cancer.tensors[0].float(), cancer.tensors[1]), (31, 2)
        parts = random_split(examples, [419, 150], torch.Generator().manual_seed(0))
        train, validation = (DataLoader(part, 32, shuffle=part is parts[0]) for part in parts)
    module = fb.HybridBayesianClassifier(
        mlp(*sizes), bayesian_last=bayesian, estimator="flipout", learning_rate=0.01, kl_weight=0.05
    )
    federation = fb.FederatedBayes(
        fb.IIDPartition(CLIENTS),
        local_epochs=2,
        fusion=fusion,
        schedule=fb.Asynchronous(buffer=buffer, delays=fb.Delays(slow={0: 1 / FACTOR}), late=late),
        safeguards=fb.Safeguards(max_influence=bound),
        adversaries=Attacks(attacks),
        seed=cell.seed,
    )
    trainer = trainer_of(fusions, [federation], check_val_every_n_epoch=fusions)
    trainer.fit(module, train, validation)
    return {name: float(trainer.callback_metrics[f"val/{name}"]) for name in ("accuracy", "nll")}


def trainer_of(fusions: int, callbacks: list[L.Callback], **options: Any) -> L.Trainer:
    """Return a quiet Trainer."""
    return L.Trainer(
        max_epochs=fusions,
        accelerator="cpu",
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


def thinned(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Return some points of a curve, the last one among them."""
    every = max(1, len(times) // MOST_POINTS)
    return [(float(f"{t:.4g}"), float(f"{v:.4g}")) for t, v in list(zip(times, values))[::-1][::every][::-1]]


# -- tables and picture ------------------------------------------------------------------------------------------------

Done = Mapping[Cell, Mapping[str, Any]]


def of_row(done: Done, study: str, split: str, row: str) -> dict[int, Mapping[str, Any]]:
    """Return the results of a row by seed."""
    return {cell.seed: found for cell, found in done.items() if cell[:3] == (study, split, row)}


def mean(values: Sequence[float], digits: int = 1) -> str:
    """Return mean and standard error."""
    if not values:
        return "–"
    if not all(map(math.isfinite, values)):
        return f"not in {sum(map(math.isinf, values))} of {len(values)}"
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {error:.{digits}f}"


def until(found: Mapping[str, Any]) -> float:
    """Return the time to the bar; if it is not met, the last time, which is too little."""
    return min(found["time"], found["curve"][-1][0])


def times_table(done: Done, study: str, splits: Sequence[str]) -> str:
    """Return virtual times to the bar, and their parts of the synchronous ones, seed by seed."""
    rows = []
    for split in splits:
        reference = of_row(done, study, split, "by rounds")
        for row in BUFFERS:
            found = of_row(done, study, split, row)
            parts = [found[seed]["time"] / until(reference[seed]) for seed in found if seed in reference]
            worst = max(parts, default=math.nan)
            last = mean([each["curve"][-1][1] for each in found.values()], 4)
            rows.append(
                [
                    split,
                    row,
                    mean([e["time"] for e in found.values()]),
                    mean(parts, 2),
                    f"{worst:.2f}",
                    last,
                    len(found),
                ]
            )
    value = "KL at the end" if study == "logistic" else "NLL at the end"
    return markdown_table(["split", "schedule", "time", "part of that by rounds", "largest", value, "seeds"], rows)


def ends_table(done: Done) -> str:
    """Return where digits end: means over the last tenth of the fusions."""
    rows = []
    for split, names in (("sites", BUFFERS), ("plain", AVERAGES)):
        for row in names:
            found = list(of_row(done, "digits", split, row).values())
            columns = [mean([each[name] for each in found], 3) for name in ("accuracy", "nll", "sigma")]
            times = [mean([first(each["curve"], bar) for each in found]) for bar in (0.5, 0.3, 0.2)]
            rows.append([split, row, *times, *columns, len(found)])
    heads = ["network", "schedule", "time to NLL 0.5", "0.3", "0.2", "accuracy", "NLL", "median σ", "seeds"]
    return markdown_table(heads, rows)


def first(curve: Sequence[tuple[float, float]], bar: float) -> float:
    """Return the time of the first of a curve's kept points that is at or below a bar."""
    return next((time for time, value in curve if value <= bar), math.inf)


def absences_table(done: Done) -> str:
    """Return the distances at the end."""
    rows = []
    for row in ABSENCES:
        found = list(of_row(done, "absences", "IID", row).values())
        whose = "all" if found and found[0]["heard"] else "the other nine"
        rows.append(
            [
                row,
                whose,
                *(mean([each[name] for each in found], 4) for name in ("kl", "mean_error", "variance_ratio")),
                len(found),
            ]
        )
    figures = ["KL per parameter", "error of means, sd", "variance over true"]
    return markdown_table(["client 0", "beside the posterior of", *figures, "seeds"], rows)


def liars_table(done: Done) -> str:
    """Return accuracies where client 0 is ten times as fast, and lies."""
    rows = []
    for data, rule in itertools.product(DATA, RULES):
        found = [of_row(done, "liars", f"{data}, {rule}", lie).values() for lie in LIES]
        rows.append([data, rule, *(mean([each["accuracy"] for each in cells], 3) for cells in found), len(found[0])])
    return markdown_table(["data", "rule", *LIES, "seeds"], rows)


def picture(done: Done) -> Any:
    """Return a picture of all seeds: KL or NLL by virtual time."""
    panels = [("logistic", split, "KL per parameter", KL) for split in logistic.SPLITS]
    panels.append(("digits", "sites", "validation NLL", NLL))
    figure = empty_figure(12, 3.2)
    axes = figure.subplots(1, len(panels))
    for axis, (kind, split, label, bar) in zip(axes, panels):
        for row, colour in zip(BUFFERS, PALETTE):
            for number, found in enumerate(of_row(done, kind, split, row).values()):
                axis.plot(*zip(*found["curve"]), color=colour, linewidth=1, label=None if number else row)
        axis.axhline(bar, color="gray", linewidth=0.8, linestyle="--")
        axis.set(xscale="log", yscale="log", xlabel="virtual time", ylabel=label)
        axis.set_title(split if kind == "logistic" else "digits, sites", fontsize="medium")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def tables(done: Done) -> str:
    """Return all tables as Markdown."""
    parts = [
        "## Logistic regression",
        times_table(done, "logistic", list(logistic.SPLITS)),
        "## Digits by sites",
        times_table(done, "digits", ["sites"]),
        "## Digits by sites and by averages",
        ends_table(done),
        "## Absences",
        absences_table(done),
        "## One of ten clients lies, ten times as fast: accuracy",
        liars_table(done),
    ]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=("logistic", "digits", "absences", "liars"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    done = study.read(FILE, Cell)
    with quietly():
        data = logistic.breast_cancer()
        pooled = logistic.pooled_posterior(data)
    left = [cell for cell in cells_of(arguments.seeds) if cell not in done and arguments.only in (None, cell.study)]

    def result_of(cell: Cell) -> dict[str, Any]:
        with quietly():
            done[cell] = run(cell, data, pooled)
        return done[cell]

    study.run(FILE, left, result_of)
    include(HERE / "README.md", tables(done))
    picture(done).savefig(HERE / "times.png", dpi=80)


if __name__ == "__main__":
    main()
