"""The figure of an experiment: scores against rounds or adversaries, one panel per setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from report import mean_and_error

from lightning_fedbayes.plots import DPI, GRID, PALETTE

DASHES = ("-", "--", ":")


def panels(
    curves: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], titles: Mapping[str, str], x: Sequence[int],
    xlabel: str, ylabel: str, log: bool = False,
) -> Figure:
    """Mean over seeds with a band of ± one standard error.

    Args:
        curves: title of the panel → rule → scores, one sequence per seed of as many entries as ``x``.
        titles: rule → its title.
        x: rounds, or numbers of adversaries.
        xlabel, ylabel: what the axes show.
        log: logarithmic scores.
    """
    figure = Figure(figsize=(3.3 * len(curves) + 2.0, 3.4), dpi=DPI, layout="constrained")
    grid = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (panel, scores) in zip(grid, curves.items()):
        axes.grid(color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        for number, rule in enumerate(scores):
            points = [mean_and_error(values) for values in zip(*scores[rule])]
            colour = PALETTE[number % len(PALETTE)]
            axes.plot(x, [mean for mean, _ in points], color=colour, label=titles[rule],
                      linestyle=DASHES[number // len(PALETTE)], linewidth=1.6)
            axes.fill_between(x, [m - e for m, e in points], [m + e for m, e in points], color=colour, alpha=0.15,
                              linewidth=0)
        axes.set_title(panel, fontsize=9)
        axes.set(xlabel=xlabel)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    grid[0].set(ylabel=ylabel, yscale="log" if log else "linear")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    return figure
