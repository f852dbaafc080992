"""Report of an experiment: the rules compared, tables of mean ± standard error, figure, settings, machine."""

from __future__ import annotations

import argparse
import io
import math
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import lightning
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

import lightning_fedbayes
from benchmarks.published import rows
from lightning_fedbayes.core.plots import DPI, GRID, PALETTE
from lightning_fedbayes.core.tables import markdown_table

START = time.perf_counter()


def options(description: str | None, data: bool, seeds: int | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments of all experiments; ``seeds`` is None where nothing is random."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        parser.add_argument("--data", type=Path, required=True, help="folder with the data, see README.md")
    if seeds is not None:
        parser.add_argument("--seeds", type=int, default=seeds, help="number of repetitions, at least 2")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    return parser


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds and its standard error, s/√n."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def cell(values: Sequence[float], digits: int) -> str:
    """Return mean ± standard error as text."""
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def table(
    first: str,
    titles: Mapping[str, str],
    published: Mapping[str, str] | None,
    columns: Mapping[str, Mapping[str, Sequence[float]]],
    digits: int,
) -> str:
    """Return a table with one row per rule.

    Args:
        first: head of the first column.
        titles: rule → its title.
        published: rule → what the paper reports; None for no such column.
        columns: head → rule → scores of the seeds.
        digits: of the scores, after the point.
    """
    heads = [first, *([] if published is None else ["published"]), *columns]
    rows = [
        [
            title,
            *([] if published is None else [published.get(rule, "")]),
            *(cell(scores[rule], digits) for scores in columns.values()),
        ]
        for rule, title in titles.items()
    ]
    return markdown_table(heads, rows)


def write(
    out: Path, name: str, settings: str, tables: Sequence[str], figure: Figure | None = None, over_seeds: bool = True
) -> None:
    """Print the report and write it to NAME.md, and its figure, if any, to NAME.png.

    Args:
        out: folder.
        name: of the files.
        settings: description of the run.
        tables: in Markdown.
        figure: or None.
        over_seeds: True if the figures are means over seeds.
    """
    spent = time.perf_counter() - START
    machine = (
        f"{platform.machine()}, 1 thread, Python {platform.python_version()}, torch {torch.__version__}, "
        f"lightning {lightning.__version__}, lightning-fedbayes {version()}; {spent / 60:.1f} minutes"
    )
    figures = "Mean ± standard error over the seeds. " if over_seeds else ""
    text = "\n\n".join([f"`{command()}`", settings, f"{figures}{machine}.", *tables])
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(f"{text}\n")
    if figure is not None:
        picture = io.BytesIO()
        figure.savefig(picture, dpi=90)
        image = Image.open(picture).convert("RGB").quantize(256)  # a third of the size
        image.save(out / f"{name}.png", optimize=True)
    print(f"\n{text}\n\nWritten to {out}: {name}.*")


def command() -> str:
    """Return the command line without the folders of this machine."""
    arguments, folders = sys.argv[1:], {"--data": "DIR", "--out": "FOLDER"}
    shown = [folders.get(before, each) for before, each in zip(["", *arguments], arguments)]
    return " ".join(["python -m", f"benchmarks.untrusted.{Path(sys.argv[0]).stem}", *shown])


def version() -> str:
    """Return the version of the package."""
    from importlib.metadata import version as installed

    return installed(lightning_fedbayes.__name__.replace("_", "-"))


RULES = {
    "weighted_average": "uniform average",
    "geometric_median": "geometric median",
    "coordinate_median": "coordinate median",
    "ivar_vb": "IVAR-VB",
    "ivar_mle": "IVAR-MLE",
    "icov_vb": "ICOV-VB",
    "icov_mle": "ICOV-MLE",
    "krum": "Krum",
    "multi_krum": "multi-Krum",
    "trimmed_mean": "trimmed mean",
    "nearest_neighbour_mixing": "nearest-neighbour mixing",
    "norm_clipping": "norm clipping",
}
"""Registered name → title. All rules have their defaults, and equal weights if they take weights."""

PUBLISHED = {
    experiment: {row["rule"]: row[experiment] for row in rows("untrusted table 1") if experiment in row}
    for experiment in ("synthetic", "mnist", "shakespeare")
}
"""Experiment → rule → prediction error, accuracy of one round, accuracy of the next character."""


DASHES = ("-", "--", ":")


def panels(
    curves: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    titles: Mapping[str, str],
    x: Sequence[int],
    xlabel: str,
    ylabel: str,
    log: bool = False,
) -> Figure:
    """Draw the mean over seeds with a band of ± one standard error, one panel per setting.

    Args:
        curves: title of the panel → rule → scores, one sequence per seed of as many entries as ``x``.
        titles: rule → its title.
        x: rounds, or numbers of adversaries.
        xlabel, ylabel: labels of the axes.
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
            axes.plot(
                x,
                [mean for mean, _ in points],
                color=colour,
                label=titles[rule],
                linestyle=DASHES[number // len(PALETTE)],
                linewidth=1.6,
            )
            axes.fill_between(
                x, [m - e for m, e in points], [m + e for m, e in points], color=colour, alpha=0.15, linewidth=0
            )
        axes.set_title(panel, fontsize=9)
        axes.set(xlabel=xlabel)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    grid[0].set(ylabel=ylabel, yscale="log" if log else "linear")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    return figure
