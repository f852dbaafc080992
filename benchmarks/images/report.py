"""Markdown report of a study: settings, machine, and tables of mean ± standard error beside published values."""

from __future__ import annotations

import math
import platform
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from benchmarks.images.settings import Settings
from lightning_fedbayes.core.tables import markdown_table


class Metric(NamedTuple):
    """Title, scale and decimal digits of a score in a table."""

    title: str
    scale: float = 1.0
    digits: int = 3


METRICS = {
    "accuracy": Metric("accuracy, %", 100, 2),
    "ece": Metric("ECE (15 bins), %", 100, 2),
    "ece100": Metric("ECE (100 bins), %", 100, 2),
    "overconfidence": Metric("confidence − accuracy, %", 100, 2),
    "nll": Metric("NLL"),
    "brier": Metric("Brier"),
    "epistemic": Metric("epistemic", 1, 4),
    "kwon_epistemic": Metric("Kwon's trace", 1, 4),
    "client_accuracy": Metric("Acc_avg, %", 100, 2),
    "worst_client_accuracy": Metric("worst 10 %, %", 100, 2),
    "retained_area_entropy": Metric("retained area, entropy"),
    "retained_area_kwon_aleatoric": Metric("retained area, Kwon's aleatoric"),
    "retained_area_kwon_epistemic": Metric("retained area, Kwon's epistemic"),
    "seconds_per_round": Metric("s per round", 1, 2),
    "megabytes": Metric("MB up per round", 1, 2),
}

Finished = Mapping[Settings, Mapping[str, Any]]
"""Finished cells in the order of the study, and their results."""


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds and its standard error s/√n, which is NaN for one seed."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def rows_of(finished: Finished) -> dict[Settings, list[Mapping[str, Any]]]:
    """Group results by cell without its seed, which is set to 0."""
    rows: dict[Settings, list[Mapping[str, Any]]] = {}
    for cell, result in finished.items():
        rows.setdefault(cell.but(seed=0), []).append(result)
    return rows


def table(
    finished: Finished, factors: Sequence[str], metrics: Sequence[str], published: Sequence[Mapping[str, Any]]
) -> str:
    """Return a Markdown table with one row per cell.

    Args:
        finished: cells of one data set.
        factors: settings in the first columns.
        metrics: keys of :data:`METRICS`.
        published: rows of the paper; the scores of the first whose settings agree with the cell stand beside it.
    """
    rows = rows_of(finished)
    beside = {cell: _published(cell, published) for cell in rows}
    compared = [metric for metric in metrics if any(metric in each for each in beside.values())]
    heads = list(factors)
    for metric in metrics:
        heads += [METRICS[metric].title, *(["published"] if metric in compared else [])]
    lines = []
    for cell, results in rows.items():
        line = [str(getattr(cell, factor)) for factor in factors]
        good = [result["scores"] for result in results if "scores" in result]
        for metric in metrics:
            line.append(_cell([each[metric] for each in good if metric in each], METRICS[metric]))
            if metric in compared:
                line.append(str(beside[cell].get(metric, "")))
        lines.append(line)
    return markdown_table(heads, lines)


def choices(finished: Finished) -> str:
    """Return how often ``fusion: auto`` chose each rule, one line per seed; empty without such cells."""
    lines = []
    for cell, result in finished.items():
        if chosen := result.get("choices"):
            counts = ", ".join(f"{name} {count}" for name, count in Counter(sorted(chosen)).most_common())
            lines.append(f"* auto, {cell.dataset}, seed {cell.seed}: {counts}")
    return "\n".join(lines)


def failures(finished: Finished, factors: Sequence[str]) -> str:
    """List the cells that could not be trained, with the reason, and those with rounds that could not be fused."""
    lines = []
    for cell, result in finished.items():
        reason = result.get("error")
        if failed := result.get("failed_rounds", 0):
            reason = f"{failed} of {cell.rounds} rounds could not be fused and left the posterior as it was"
        if reason:
            named = ", ".join(f"{name}={getattr(cell, name)}" for name in (*factors, "seed"))
            lines.append(f"* {named}: {reason}")
    return "\n".join(lines)


def common_settings(cells: Iterable[Settings], factors: Sequence[str]) -> str:
    """Return the settings that are no factors in one line; of those that depend on the grid, every value."""
    shown: dict[str, dict[str, None]] = {}
    for cell in cells:
        for name, value in cell.as_dict().items():
            text = "all" if name == "examples" and value is None else str(value)
            shown.setdefault(name, {})[text] = None
    return ", ".join(f"{name} {' or '.join(texts)}" for name, texts in shown.items() if name not in (*factors, "seed"))


def machine() -> str:
    """Return processor or GPU, threads and versions."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return (
        f"{device}, {torch.get_num_threads()} threads, Python {platform.python_version()}, torch {torch.__version__}, "
        f"lightning {version('lightning')}, lightning-fedbayes {version('lightning-fedbayes')}"
    )


def _published(cell: Settings, published: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the paper's row for a cell, or an empty one."""
    settings = cell.as_dict()
    for row in published:
        if all(settings[key] == value for key, value in row.items() if key not in METRICS):
            return row
    return {}


def _cell(values: Sequence[float], metric: Metric) -> str:
    """Return mean ± standard error as text; empty without values."""
    if not values:
        return ""
    mean, error = (metric.scale * each for each in mean_and_error(values))
    return f"{mean:.{metric.digits}f}" + ("" if math.isnan(error) else f" ± {error:.{metric.digits}f}")
