"""Matplotlib figures from tensors, for metrics, partitions and callbacks.

Figures are made without pyplot: they need no display and are freed with their last reference. A notebook shows a figure
that is the value of a cell.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from lightning_fedbayes.core.tables import MOST_ROWS, sample

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
INK, GRID = "#333333", "#E3E3E3"
SEQUENTIAL = LinearSegmentedColormap.from_list("white_to_blue", ["#FFFFFF", "#9CC8E3", "#0072B2", "#00324F"])
DPI = 120


def empty_figure(width: float, height: float) -> Figure:
    """Return a figure of ``width`` × ``height`` inches that a notebook shows although pyplot has not been imported."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    vars(figure)["_repr_png_"] = partial(_png, figure)  # W&B knows no subclasses of Matplotlib's figure
    return figure


def _png(figure: Figure) -> bytes:
    """Return a figure as a PNG file. IPython asks for it only where Matplotlib's own display is not active."""
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def calibration_diagram(confidence: Tensor, accuracy: Tensor, counts: Tensor, ece: Tensor | float) -> Figure:
    """Calibration diagram (also called reliability diagram): accuracy against confidence, above the number of examples.

    Bars below the diagonal mean overconfidence. The gap to the diagonal is drawn at the bin's mean confidence. The
    fields are those of :class:`~lightning_fedbayes.metrics.functional.CalibrationBins`.
    """
    at, height, number = (np.atleast_1d(_array(values)) for values in (confidence, accuracy, counts))
    width, full = 1 / len(number), number > 0
    left = np.arange(len(number)) * width
    figure = empty_figure(5.0, 5.0)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _style(axes)
    _style(below)
    edge = {"align": "edge", "edgecolor": "white", "linewidth": 0.6 if len(number) <= 30 else 0.0}
    axes.bar(left[full], height[full], width, color=PALETTE[0], label="accuracy", **edge)
    linewidth = 2 if len(number) <= 30 else 0.8
    axes.vlines(at[full], height[full], at[full], color=PALETTE[1], linewidth=linewidth, label="gap")
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle="--", label="perfect calibration")
    axes.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy", title=f"Calibration (ECE {float(ece):.2%})")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    below.bar(left, number / max(number.sum(), 1), width, color=PALETTE[5], **edge)
    below.set(xlabel="confidence", ylabel="examples")
    below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure


def accuracy_retained(curves: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """Accuracy against the fraction of examples retained when the most uncertain are discarded.

    ``curves`` are label → (fractions retained, accuracies). Fractions below 1 %, which are noise, are not drawn.
    """
    figure, axes = _figure()
    for (label, (fraction, accuracy)), style in zip(curves.items(), _line_styles(len(curves))):
        x, y = np.atleast_1d(_array(fraction)), np.atleast_1d(_array(accuracy))
        drawn = x >= 0.01
        axes.plot(x[drawn], y[drawn], label=label, marker="o" if drawn.sum() == 1 else None, **style)
    title = "Accuracy when the most uncertain are discarded"
    axes.set(xlim=(0, 1.01), xlabel="examples retained", ylabel="accuracy", title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=None))
    _legend(axes, len(curves))
    return figure


def client_heatmap(counts: Tensor, classes: Sequence[object], names: Sequence[object] | None = None) -> Figure:
    """Heat map of ``counts``, (clients, classes). Of more than 100 clients, or classes, it shows every n-th.

    ``names`` are of the clients. None: their numbers.
    """
    clients, shown = map(sample, counts.shape)
    table = _array(counts)[np.ix_(clients, shown)]
    rows, columns = table.shape
    figure, axes, image = _heatmap(table, 0.55 * columns + 1.9, 0.34 * rows + 1.3, vmin=0)
    _ticks(axes, [str(classes[c]) for c in shown], [str(k if names is None else names[k]) for k in clients])
    part = _part((rows, len(counts), "clients"), (columns, len(classes), "classes"))
    axes.set(xlabel="class", ylabel="client", title=f"Examples per client and class{part}")
    if rows <= 20 and columns <= 12:
        dark = table > 0.45 * max(table.max(), 1)
        for (k, c), value in np.ndenumerate(table):
            axes.text(c, k, str(value), ha="center", va="center", fontsize=8, color="white" if dark[k, c] else INK)
    else:
        _colorbar(figure, axes, image, "examples")
    return figure


def cross_heatmap(values: Tensor, names: Sequence[str], figure: str, *, higher_is_better: bool = False) -> Figure:
    """Heat map of each client's model (rows) on every client's data (columns), the darker the worse.

    Of more than 100 clients it shows every n-th. What is not finite is grey. ``figure`` names the values.
    """
    shown = sample(len(names))
    table = np.ma.masked_invalid(_array(values)[np.ix_(shown, shown)])
    side = 0.55 * len(shown)
    colors = SEQUENTIAL.reversed() if higher_is_better else SEQUENTIAL
    height = max(0.62 * side + 1.6, 3.0)
    figure_, axes, image = _heatmap(table, side + 2.4, height, cmap=colors, interpolation="nearest")
    labels = [str(names[client]) for client in shown]
    _ticks(axes, labels, labels)
    axes.tick_params(axis="x", rotation=45 if max(map(len, labels)) > 4 else 0)
    part = _part((len(shown), len(names), "clients"))
    title = f"{figure} of each model on each client's data{part}"
    axes.set(xlabel="data of client", ylabel="model of client", title=title)
    if len(shown) <= 12:
        luminance = image.to_rgba(table)[..., :3].mean(-1)
        for (i, j), value in np.ndenumerate(table.data):
            dark = luminance[i, j] < 0.6 and np.isfinite(value)
            axes.text(j, i, f"{value:.3g}", ha="center", va="center", fontsize=8, color="white" if dark else INK)
    _colorbar(figure_, axes, image, figure)
    return figure_


def client_reliability(shares: Tensor, names: Sequence[str]) -> Figure:
    """Heat map of each client's inferred share of the fusion (rows) in each round (columns).

    Of more than 100 clients it shows a sample, from the lowest mean share to the highest. NaN is absence.
    """
    order = np.arange(len(shares))
    if len(order) > MOST_ROWS:
        order = _array(shares.nanmean(1).nan_to_num(nan=torch.inf).argsort())[sample(len(shares))]
    table = _array(shares)[order]
    rows, columns = table.shape
    extent = (0.5, columns + 0.5, rows - 0.5, -0.5)
    size = 0.12 * columns + 2.9, 0.34 * rows + 1.3
    figure, axes, image = _heatmap(table, *size, vmin=0, extent=extent, interpolation="nearest")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    step = -(-rows // 40)
    axes.set_yticks(range(0, rows, step), [str(names[client]) for client in order[::step]])
    part = _part((rows, len(shares), "clients, by their mean"))
    axes.set(xlabel="round", ylabel="client", title=f"Reliability of the clients (grey: absent){part}")
    _colorbar(figure, axes, image, "share of the fusion")
    return figure


def rounds(curves: Mapping[str, Sequence[float]], ylabel: str) -> Figure:
    """Learning curves: label → one value per round, from round 1. NaN leaves a gap."""
    figure, axes = _figure()
    _draw_rounds(axes, curves)
    axes.set(xlabel="round", ylabel=ylabel, title=f"{ylabel} by round")
    _legend(axes, len(curves))
    return figure


def round_panels(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Learning curves of several quantities on one page, with the same labels: a panel each, as :func:`rounds`."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = empty_figure(4.2 * columns, 3.0 * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (name, curves) in zip(grid, panels.items()):
        _style(axes)
        _draw_rounds(axes, curves)
        axes.set(xlabel="round", ylabel=name)
    for axes in grid[len(panels) :]:
        axes.remove()
    grid[0].set_title("Learning curves, by round")
    if max(map(len, panels.values())) > 1:
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_rounds(axes: Axes, curves: Mapping[str, Sequence[float]]) -> None:
    for (label, values), style in zip(curves.items(), _line_styles(len(curves))):
        marker = "o" if len(values) <= 20 else None
        axes.plot(range(1, len(values) + 1), values, label=label, marker=marker, markersize=3.5, **style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _figure(width: float = 5.0, height: float = 3.75) -> tuple[Figure, Axes]:
    figure = empty_figure(width, height)
    axes = figure.add_subplot()
    _style(axes)
    return figure, axes


def _heatmap(table: np.ndarray, width: float, height: float, **options: Any) -> tuple[Figure, Axes, AxesImage]:
    """Draw a table on a figure of about ``width`` × ``height`` inches. ``options`` are of ``imshow``."""
    figure, axes = _figure(min(max(width, 4.4), 12), min(max(height, 2.6), 10))
    image = axes.imshow(table, aspect="auto", **{"cmap": SEQUENTIAL, **options})
    axes.set_facecolor(GRID)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure, axes, image


def _colorbar(figure: Figure, axes: Axes, image: AxesImage, label: str) -> None:
    figure.colorbar(image, ax=axes, label=label, aspect=40).outline.set_visible(False)  # type: ignore[operator]


def _style(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.title.set(fontsize=11, color=INK, wrap=True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(fontsize=10, color=INK)


def _part(*counts: tuple[int, int, str]) -> str:
    """Return the end of a title that says how many of what are drawn. Empty if all are."""
    parts = [f"{drawn} of {number:,} {what}" for drawn, number, what in counts if drawn < number]
    return f"\n{', '.join(parts)}" if parts else ""


def _ticks(axes: Axes, columns: Sequence[str], rows: Sequence[str]) -> None:
    """Label every row and column of a table, or every n-th where they would not fit."""
    every_column, every_row = -(-len(columns) // 16), -(-len(rows) // 24)
    axes.set_xticks(range(0, len(columns), every_column), columns[::every_column])
    axes.set_yticks(range(0, len(rows), every_row), rows[::every_row])


def _line_styles(number: int) -> list[dict[str, Any]]:
    """Return one style per line: the colours of the palette, with dashes where they repeat."""
    dashes = ("-", "--", ":", "-.")
    return [
        {"color": PALETTE[i % len(PALETTE)], "linestyle": dashes[i // len(PALETTE) % len(dashes)], "linewidth": 1.8}
        for i in range(number)
    ]


def _legend(axes: Axes, entries: int) -> None:
    if entries <= 5:
        axes.legend(frameon=False, fontsize=9)
    else:
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()
