"""Scores in a file, and their tables: mean ± standard error, the published value, and a comparison."""

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

from benchmarks.uci.methods import TITLES
from benchmarks.uci.scores import SCORES, Published, published
from lightning_fedbayes.core.tables import markdown_table

Entry = dict[str, Any]
"""Row of one data set: its scores per split, and the settings of its run."""

FILE = "scores.json"


class Store:
    """Entries of this run and of earlier ones, data set → row → entry, in a file that is rewritten at every change."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        self.entries: dict[str, dict[str, Entry]] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def put(self, dataset: str, row: str, entry: Entry) -> None:
        """Add an entry, in place of an earlier one of that row."""
        self.entries.setdefault(dataset, {})[row] = entry
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.entries, separators=(",", ":")) + "\n")


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean over splits and its standard error, s/√n; NaN for one split."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def cell(values: Sequence[float]) -> str:
    """Mean ± standard error as text."""
    mean, error = mean_and_error(values)
    digits = 2 if abs(mean) >= 0.1 else 4
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def departure(entry: Entry) -> str:
    """Return a note behind the scores of a row that was not trained for the published 40 local epochs."""
    usual = entry["local_epochs"] == 40 or entry["engine"] == "closed form"
    return "" if usual else f" (E = {entry['local_epochs']})"


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


def table(score: str, entries: Mapping[str, Mapping[str, Entry]]) -> str:
    """Return a table with one row per data set: our scores, the published ones, and the comparison."""
    rows = [row for row in TITLES if any(row in each for each in entries.values())]
    compared = [row for row in rows if any(published(score, dataset, row) for dataset in entries)]
    heads = ["data set"]
    for row in rows:
        heads += [TITLES[row], *(["published", ""] if row in compared else [])]
    lines = []
    for dataset, each in entries.items():
        line = [dataset]
        for row in rows:
            values = each[row]["scores"][score] if row in each else None
            line.append("" if values is None else cell(values) + departure(each[row]))
            if row in compared:
                other = published(score, dataset, row)
                line.append("" if other is None else str(other))
                comparable = values is not None and other is not None and score != "sharpness"
                line.append(verdict(statistics.fmean(values), other) if comparable else "")  # type: ignore[arg-type]
        lines.append(line)
    return f"## {SCORES[score]}\n\n{markdown_table(heads, lines)}"


def wins(entries: Mapping[str, Mapping[str, Entry]]) -> str:
    """Count the data sets on which each row has a lower NLL than the published FedAG network; add its cost."""
    lines = []
    for row, title in TITLES.items():
        pairs = [(statistics.fmean(each[row]["scores"]["nll"]), published("nll", dataset, "fedag"), each[row])
                 for dataset, each in entries.items() if row in each]
        known = [(mean, other) for mean, other, _ in pairs if other is not None]
        if pairs:
            better, sent = sum(mean < other.mean for mean, other in known), [entry["upload"] for *_, entry in pairs]
            seconds = sum(entry["seconds"] for *_, entry in pairs)
            lines.append([title, f"{better} of {len(known)}", f"{min(sent):,} to {max(sent):,}", f"{seconds:.0f}"])
    heads = ["method", "NLL below published FedAG network", "bytes a client sends per round", "seconds, all data sets"]
    return f"## Against the published FedAG network\n\n{markdown_table(heads, lines)}"


def settings(entries: Mapping[str, Mapping[str, Entry]]) -> str:
    """Return a table of the settings of every entry."""
    lines = [
        [dataset, TITLES[row], str(len(e["scores"]["nll"])),
         *(str(e[name]) for name in ("examples", "rounds", "local_epochs", "rate", "hidden", "seed", "engine")),
         f"{e['seconds']:.1f}", f"`{e['command']}`", e["machine"]]
        for dataset, each in entries.items() for row, e in each.items()
    ]
    heads = ["data set", "row", "splits", "training examples", "rounds", "local epochs", "rate", "hidden units",
             "seed", "engine", "seconds", "command", "machine"]
    return f"# How every row was run\n\n{markdown_table(heads, lines)}"


def machine() -> str:
    """Return processor, threads and versions."""
    names = ("torch", "lightning", "lightning-fedbayes")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return (f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
            f"Python {platform.python_version()}, {versions}")


def write(store: Store) -> str:
    """Write the tables and the settings beside the scores, and return the tables."""
    entries = dict(sorted(store.entries.items()))
    intro = (
        "Mean ± standard error over the published splits, in original units. \"better\": our mean is lower than the "
        "published one; \"within 2 s.e.\": above it by at most two published standard errors (0.00 counts as 0.005). "
        "(E = 8) marks rows of fewer local epochs than the published 40."
    )
    text = "\n\n".join([intro, *(table(score, entries) for score in SCORES), wins(entries)])
    (store.file.parent / "tables.md").write_text(f"# Tables\n\n{text}\n")
    (store.file.parent / "settings.md").write_text(f"{settings(entries)}\n")
    return text
