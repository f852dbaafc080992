"""Figures of the studies: scores against a setting, learning curves, accuracy against examples retained."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.images.federation import FRACTIONS
from benchmarks.images.report import METRICS, Finished, mean_and_error, rows_of
from benchmarks.images.settings import Settings
from lightning_fedbayes.callbacks.uncertainty import MEASURES
from lightning_fedbayes.core.plots import DPI, GRID, PALETTE

DASHES = ("-", "--", ":")
SPREAD = 0.05
"""Horizontal distance of the points of two series, so that they do not cover each other."""


def draw(spec: Mapping[str, Any], finished: Finished) -> Figure | None:
    """Draw the figure that ``spec`` describes; return None if no cell belongs to it.

    Args:
        spec: ``kind``: "lines" (``metrics`` against the setting ``x``), "curves" (validation accuracy by round) or
            "retained" (accuracy against examples retained, by measure of uncertainty); ``series``: the setting that
            gives a line each; ``panels``: the setting that gives a panel each; ``where``: setting → values of the
            cells that are drawn. The figure averages over all other settings and the seeds.
        finished: cells of one data set, with scores.
    """
    where = spec.get("where", {})
    rows = {
        cell: results
        for cell, results in rows_of(finished).items()
        if all(getattr(cell, key) in values for key, values in where.items())
    }
    if spec["kind"] == "curves":  # there are none without held-out images
        rows = {cell: results for cell, results in rows.items() if any(result["by_round"] for result in results)}
    return {"lines": _lines, "curves": _curves, "retained": _retained}[spec["kind"]](spec, rows) if rows else None


def save(figure: Figure, file: Path) -> None:
    """Write a PNG of 256 colours, a third of the size of full colour; with fewer, two lines may share a colour."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=80)
    Image.open(picture).convert("RGB").quantize(256).save(file, optimize=True)


Rows = Mapping[Settings, Sequence[Mapping[str, Any]]]


def _lines(spec: Mapping[str, Any], rows: Rows) -> Figure:
    """Draw one panel per metric: mean ± standard error against a setting."""
    metrics, places = spec["metrics"], _values(rows, spec["x"])
    series, numbers = _values(rows, spec["series"]), all(isinstance(place, int | float) for place in places)
    figure, grid = _panels(1, len(metrics))
    for metric, axes in zip(metrics, grid[0]):
        title, scale, _ = METRICS[metric]
        for number, name in enumerate(series):
            points = {}
            for place, value in enumerate(places):
                scores = [
                    result["scores"][metric]
                    for cell, results in rows.items()
                    for result in results
                    if getattr(cell, spec["x"]) == value
                    and getattr(cell, spec["series"]) == name
                    and metric in result["scores"]
                ]
                if scores:
                    points[place + SPREAD * (number - (len(series) - 1) / 2)] = mean_and_error(scores)
            axes.errorbar(
                list(points),
                [scale * mean for mean, _ in points.values()],
                [scale * np.nan_to_num(error) for _, error in points.values()],
                label=str(name),
                marker="os"[number // len(PALETTE) % 2],
                markersize=4,
                capsize=2,
                **{**_style(number), **({} if numbers else {"linestyle": "none"})},
            )
        axes.set(title=title, xlabel=spec["x"])
        axes.set_xticks(range(len(places)), [str(place) for place in places])
        if any(len(str(place)) > 8 for place in places):
            axes.tick_params(axis="x", rotation=60, labelsize=7)
    return _finish(figure, grid)


def _curves(spec: Mapping[str, Any], rows: Rows) -> Figure:
    """Draw one panel per value of a setting: validation accuracy by round."""
    panels = _values(rows, spec["panels"])
    figure, grid = _panels(1, len(panels))
    for panel, axes in zip(panels, grid[0]):
        for number, name in enumerate(_values(rows, spec["series"])):
            curves = [result["by_round"] for result in _results(rows, spec, panel, name) if result["by_round"]]
            if curves:
                mean = np.mean(curves, 0)
                axes.plot(range(1, len(mean) + 1), mean, label=str(name), **_style(number))
        axes.set(title=str(panel), xlabel="round")
    grid[0][0].set_ylabel("validation accuracy")
    return _finish(figure, grid)


def _retained(spec: Mapping[str, Any], rows: Rows) -> Figure:
    """Draw accuracy against examples retained: a row per value of a setting, a column per measure of uncertainty.

    Cells may be older than a measure: those that not all of them have are left out.
    """
    panels = _values(rows, spec["panels"])
    measures = [
        measure
        for measure in MEASURES
        if all(measure in result["retained"] for results in rows.values() for result in results)
    ]
    figure, grid = _panels(len(panels), len(measures))
    for panel, line in zip(panels, grid):
        for measure, axes in zip(measures, line):
            for number, name in enumerate(_values(rows, spec["series"])):
                curves = [result["retained"][measure] for result in _results(rows, spec, panel, name)]
                if curves:
                    axes.plot(FRACTIONS, np.mean(curves, 0), label=str(name), **_style(number))
            axes.set(title=f"{panel}\n{measure}", xlabel="examples retained")
        line[0].set_ylabel("accuracy")
    return _finish(figure, grid)


def _results(rows: Rows, spec: Mapping[str, Any], panel: Any, name: Any) -> list[Mapping[str, Any]]:
    """Return the results of all cells of a panel and a line."""
    return [
        result
        for cell, results in rows.items()
        for result in results
        if getattr(cell, spec["panels"]) == panel and getattr(cell, spec["series"]) == name
    ]


def _values(rows: Iterable[Settings], setting: str) -> list[Any]:
    """Return the values of a setting, ascending if they are numbers, else in the order of the study."""
    values = list(dict.fromkeys(getattr(cell, setting) for cell in rows))
    return sorted(values) if all(isinstance(value, int | float) for value in values) else values


def _panels(rows: int, columns: int) -> tuple[Figure, Any]:
    """Return an empty figure and its axes, shape (rows, columns)."""
    figure = Figure(figsize=(max(3.1 * columns, 6.2), 2.9 * rows + 0.6), dpi=DPI, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.grid(color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def _finish(figure: Figure, grid: Any) -> Figure:
    """Add one legend for all panels."""
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        assert isinstance(axes, Axes)
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=2 if max(map(len, handles)) > 24 else min(3, len(handles)),
        frameon=False,
        fontsize=8,
    )
    return figure


def _style(number: int) -> dict[str, Any]:
    """Return colour, dashes and width of a line."""
    return {
        "color": PALETTE[number % len(PALETTE)],
        "linestyle": DASHES[number // len(PALETTE) % len(DASHES)],
        "linewidth": 1.5,
    }
