"""What every experiment ends with: tables of mean ± standard error, the settings, and where they are written."""

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
from PIL import Image

import lightning_fedbayes
from lightning_fedbayes.callbacks.pictures import markdown_table

START = time.perf_counter()


def options(description: str | None, data: bool, seeds: int | None) -> argparse.ArgumentParser:
    """The arguments that all experiments take; ``seeds`` is None where nothing is random."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        parser.add_argument("--data", type=Path, required=True, help="folder with the data, see README.md")
    if seeds is not None:
        parser.add_argument("--seeds", type=int, default=seeds, help="number of repetitions, at least 2")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    return parser


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean over seeds and its standard error, s/√n."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def cell(values: Sequence[float], digits: int) -> str:
    """Mean ± standard error as text."""
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def table(
    first: str, titles: Mapping[str, str], published: Mapping[str, str] | None,
    columns: Mapping[str, Mapping[str, Sequence[float]]], digits: int,
) -> str:
    """One row per rule.

    Args:
        first: head of the first column.
        titles: rule → its title.
        published: rule → what the paper reports; None for no such column.
        columns: head → rule → scores of the seeds.
        digits: of the scores, after the point.
    """
    heads = [first, *([] if published is None else ["published"]), *columns]
    rows = [
        [title, *([] if published is None else [published.get(rule, "")]),
         *(cell(scores[rule], digits) for scores in columns.values())]
        for rule, title in titles.items()
    ]
    return markdown_table(heads, rows)


def write(
    out: Path, name: str, settings: str, tables: Sequence[str], figure: Figure | None = None, over_seeds: bool = True
) -> None:
    """Print the report and write it beside its figure if there is one, NAME.md and NAME.png.

    Args:
        out: folder.
        name: of the files.
        settings: what was run.
        tables: in Markdown.
        figure: or None.
        over_seeds: whether the figures are means over seeds.
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
    """How this process was started, without the folders of this machine."""
    arguments, folders = sys.argv[1:], {"--data": "DIR", "--out": "FOLDER"}
    shown = [folders.get(before, each) for before, each in zip(["", *arguments], arguments)]
    return " ".join(["python", f"benchmarks/untrusted/{Path(sys.argv[0]).name}", *shown])


def version() -> str:
    """Of the package."""
    from importlib.metadata import version as installed

    return installed(lightning_fedbayes.__name__.replace("_", "-"))
