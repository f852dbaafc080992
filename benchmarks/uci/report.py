"""Scores in a file, and what is made from them: tables beside the published values, settings, a figure by round."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.page import include
from benchmarks.uci.methods import ROWS, TITLES
from benchmarks.uci.plans import LOCAL_EPOCHS, study
from benchmarks.uci.scores import SCORES, Published, published
from lightning_fedbayes.core.plots import GRID, PALETTE
from lightning_fedbayes.core.tables import markdown_table

HERE = Path(__file__).parent
Entry = dict[str, Any]
"""Row of one data set: its scores per split, and the settings of its run."""
Entries = Mapping[str, Mapping[str, Entry]]
"""Data set → row → entry."""

LINEAR = (("published linear", "fedag_linear", True), ("FedAG linear", "fedag_linear", False))
NETWORK = (("published network", "fedag", True), ("FedAG network", "fedag", False))
REPEATED = (
    *LINEAR,
    *NETWORK,
    ("+ residual noise", "fedag_noise", False),
    ("mean-variance clients", "mean_variance", False),
)
POOLED = (
    ("published VI", "vi", True),
    ("VI, pooled", "vi", False),
    ("published deep ensemble", "deep_ensemble", True),
    ("deep ensemble, pooled", "deep_ensemble", False),
)
SITES = (("sites", "sites", False), ("IVON + sites", "ivon_sites", False), ("population", "population", False))
"""Head of a column of the README, its row in the tables, and whether it shows the published value."""
CURVES = {"fedag": PALETTE[0], "fedag_noise": PALETTE[1], "vi": PALETTE[2], "deep_ensemble": PALETTE[3]}
"""Row in the figure → colour."""


class Store:
    """Entries of this run and of earlier ones, data set → row → entry, in a file that is rewritten at every change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "scores.json"
        self.entries: dict[str, dict[str, Entry]] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def put(self, dataset: str, row: str, entry: Entry) -> None:
        """Add an entry, in place of an earlier one of that row."""
        self.entries.setdefault(dataset, {})[row] = entry
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".new")
        unfinished.write_text(json.dumps(self.entries, separators=(",", ":")) + "\n")
        unfinished.replace(self.file)

    def holds(self, dataset: str, row: str, wanted: Mapping[str, Any]) -> bool:
        """Return True if there is an entry with these settings; a score per split says how many there are."""
        entry = self.entries.get(dataset, {}).get(row)
        return entry is not None and {"splits": len(entry["scores"]["nll"]), **entry}.items() >= wanted.items()

    def add_rates(self, command: str, text: str) -> None:
        """Add the choice of a learning rate to the page of rates, and print it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "rates.md").open("a") as page:
            page.write(f"\n`{command}`\n\n{text}\n")
        print(f"\n{text}")


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean over splits and its standard error, s/√n; NaN for one split."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def cell(values: Sequence[float]) -> str:
    """Mean ± standard error as text."""
    mean, error = mean_and_error(values)
    digits = 2 if abs(mean) >= 0.1 else 4
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def departure(dataset: str, entry: Entry) -> str:
    """Return a note behind the scores of a row of fewer local epochs or splits than the published ones."""
    splits, usual = len(entry["scores"]["nll"]), 5 if dataset.startswith("protein") else 20
    notes = [f"E = {entry['local_epochs']}"] * (entry["local_epochs"] not in (0, LOCAL_EPOCHS))
    notes += [f"{splits} splits"] * (splits != usual)
    return f" ({', '.join(notes)})" if notes else ""


def verdict(mean: float, other: Published) -> str:
    """Compare a score (lower is better) with the published one: better, within two of its errors, or worse.

    A published error of 0.00 counts as 0.005, its rounding error.
    """
    if mean < other.mean:
        return "better"
    if other.error is None:
        return f"+{mean - other.mean:.2f}"
    apart = (mean - other.mean) / max(other.error, 0.005)
    return "within 2 s.e." if apart <= 2 else f"**{apart:.1f} s.e. worse**"


def overview(score: str, entries: Entries, columns: Sequence[tuple[str, str, bool]]) -> str:
    """Return a table with one row per data set, and ours beside the published scores."""
    lines = []
    for dataset, each in entries.items():
        line = [dataset]
        for _, row, is_published in columns:
            if is_published:
                other = published(score, dataset, row)
                line.append("" if other is None else str(other))
            else:
                line.append(cell(each[row]["scores"][score]) + departure(dataset, each[row]) if row in each else "")
        if any(line[1:]):
            lines.append(line)
    return markdown_table(["data set", *(head for head, *_ in columns)], lines)


def everything(entries: Entries) -> str:
    """Return a table of all scores of all rows, each beside the published one where there is one."""
    lines = []
    for dataset, each in entries.items():
        for row, title in TITLES.items():
            others = {score: published(score, dataset, row) for score in SCORES}
            if row not in each and others["nll"] is None:
                continue
            line = [dataset, title + (departure(dataset, each[row]) if row in each else "")]
            for score in SCORES:
                values, other = each[row]["scores"][score] if row in each else None, others[score]
                line.append("" if values is None else cell(values))
                if score in ("nll", "rmse", "sharpness"):
                    line.append("" if other is None else str(other))
                if score in ("nll", "rmse"):
                    line.append("" if values is None or other is None else verdict(statistics.fmean(values), other))
            lines.append(line)
    heads = [
        "data set",
        "method",
        "NLL",
        "published",
        "",
        "RMSE",
        "published",
        "",
        "determinant sharpness DS",
        "published",
        "CRPS",
        "coverage of the 90 % interval",
    ]
    return markdown_table(heads, lines)


def wins(entries: Entries) -> str:
    """Count the data sets on which each row has a lower NLL than the published FedAG network; add its cost."""
    lines = []
    for row, title in TITLES.items():
        pairs = [
            (statistics.fmean(each[row]["scores"]["nll"]), published("nll", dataset, "fedag"), each[row])
            for dataset, each in entries.items()
            if row in each
        ]
        known = [(mean, other) for mean, other, _ in pairs if other is not None]
        if pairs:
            better, sent = sum(mean < other.mean for mean, other in known), [entry["upload"] for *_, entry in pairs]
            seconds = sum(entry["seconds"] for *_, entry in pairs)
            lines.append([title, f"{better} of {len(known)}", f"{min(sent):,} to {max(sent):,}", f"{seconds:.0f}"])
    heads = ["method", "NLL below published FedAG network", "bytes a client sends per round", "seconds, all data sets"]
    return f"## Against the published FedAG network\n\n{markdown_table(heads, lines)}"


def one_network(rmse: float, sharpness: float) -> float:
    r"""RMSE, at least, of the networks alone whose mean has this RMSE, and whose spread is the variance.

    .. math:: \tfrac1K \sum_k (y - f_k)^2 = (y - \bar f)^2 + \tfrac1K \sum_k (f_k - \bar f)^2

    The mean variance is at least the square of the mean standard deviation, which is the determinant sharpness.

    Source: Krogh and Vedelsby 1995, eq. (6).
    """
    return math.hypot(rmse, sharpness)


def widths(entries: Entries) -> str:
    """Return a table of what the published widths say of the clients' networks, were they their disagreement alone."""
    lines = []
    for dataset, each in entries.items():
        rmse, sharpness = published("rmse", dataset, "fedag"), published("sharpness", dataset, "fedag")
        if rmse is not None and sharpness is not None:
            ours = [
                cell(each[row]["scores"][score]) if row in each else ""
                for row, score in (
                    ("blr", "rmse"),
                    ("fedag", "rmse"),
                    ("fedag", "sharpness"),
                    ("fedag_noise", "sharpness"),
                )
            ]
            alone = f"{one_network(rmse.mean, sharpness.mean):.2f}"
            lines.append([dataset, str(rmse), str(sharpness), alone, *ours])
    heads = [
        "data set",
        "published RMSE",
        "published DS",
        "then RMSE of one network, at least",
        "BLR, RMSE",
        "FedAG network, RMSE",
        "its DS",
        "its DS with residual noise",
    ]
    return markdown_table(heads, lines)


def missing(entries: Entries) -> str:
    """Name the cells of the study that have not been run."""
    found: dict[str, list[str]] = {}
    for dataset, method in study(list(entries), None):
        for row in ROWS.get(method, (method,)):
            if row not in entries[dataset]:
                found.setdefault(TITLES[row], []).append(dataset)
    named = "; ".join(f"{title}: {', '.join(datasets)}" for title, datasets in found.items())
    return f"Not run yet: {named}." if found else "Every cell of the study has been run."


def settings(entries: Entries) -> str:
    """Return a table of the settings of every entry."""
    lines = [
        [
            dataset,
            TITLES[row],
            str(len(e["scores"]["nll"])),
            *(str(e[name]) for name in ("examples", "rounds", "local_epochs", "rate", "hidden", "seed", "engine")),
            f"{e['seconds']:.1f}",
            f"`{e['command']}`",
            e["machine"],
        ]
        for dataset, each in entries.items()
        for row, e in each.items()
    ]
    heads = [
        "data set",
        "row",
        "splits",
        "training examples",
        "rounds",
        "local epochs",
        "rate",
        "hidden units",
        "seed",
        "engine",
        "seconds",
        "command",
        "machine",
    ]
    return f"# How every row was run\n\n{markdown_table(heads, lines)}"


def machine() -> str:
    """Return processor, threads and versions."""
    names = ("torch", "lightning", "lightning-fedbayes")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, {versions}"
    )


def by_round(entries: Entries) -> Figure:
    """Draw the NLL after every round, a panel per data set; the published value of round 5 is a dashed line."""
    shown = {
        dataset: {row: each[row]["by_round"]["nll"] for row in CURVES if "by_round" in each.get(row, {})}
        for dataset, each in entries.items()
    }
    shown = {dataset: curves for dataset, curves in shown.items() if curves}
    columns, rows = min(3, len(shown)) or 1, math.ceil(len(shown) / 3) or 1
    figure = Figure(figsize=(3.2 * columns, 2.2 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(shown) :]:
        axes.remove()
    for axes, (dataset, curves) in zip(panels, shown.items()):
        axes.grid(color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
        for row, values in curves.items():
            rounds = range(1, len(values) + 1)
            axes.plot(rounds, values, marker=".", color=CURVES[row], label=TITLES[row])
            axes.set_xticks(rounds)
        other = published("nll", dataset, "fedag")
        if other is not None:
            text = "FedAG network, published"
            axes.axhline(other.mean, color=CURVES["fedag"], linestyle="--", linewidth=1, label=text)
        axes.set_title(dataset, fontsize=8)
        axes.set_xlabel("round", fontsize=7)
    panels[0].set_ylabel("NLL", fontsize=7)
    handles = {text: line for axes in panels[: len(shown)] for line, text in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=7)
    return figure


def write(store: Store) -> str:
    """Write tables, settings and figure beside the scores, and the tables of the README into it; return those."""
    entries, folder = dict(sorted(store.entries.items())), store.folder
    intro = (
        'Mean ± standard error over the published splits, in original units. "better": our mean is lower than the '
        'published one; "within 2 s.e.": above it by at most two published standard errors (0.00 counts as 0.005). '
        "(E = 2) marks rows of fewer local epochs than the published 40, (5 splits) rows of fewer splits."
    )
    (folder / "tables.md").write_text(f"# Tables\n\n{intro}\n\n{everything(entries)}\n\n{wins(entries)}\n")
    (folder / "settings.md").write_text(f"{settings(entries)}\n")
    by_round(entries).savefig(folder / "rounds.png", dpi=75)
    parts = []
    for score, columns in (
        ("nll", REPEATED),
        ("nll", (*POOLED, *SITES)),
        ("rmse", REPEATED),
        ("rmse", (*POOLED, *SITES)),
    ):
        columns = tuple(each for each in columns if score == "nll" or each[1] != "fedag_noise")
        parts.append(f"{SCORES[score]}:\n\n{overview(score, entries, columns)}")
    text = "\n\n".join([*parts, f"Widths:\n\n{widths(entries)}", missing(entries)])
    if folder == HERE / "results":
        include(HERE / "README.md", text)
    return text
