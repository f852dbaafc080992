"""``fedbayes plot``: learning curves of a run or a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_fedbayes import plots
from lightning_fedbayes.cli import results
from lightning_fedbayes.cli.curves import Curves, read_curves, validated
from lightning_fedbayes.cli.options import Options
from lightning_fedbayes.errors import FedBayesError

METRICS = "metrics.csv"


def plot(arguments: list[str]) -> int:
    """Draw every validation metric of a folder by round and say where."""
    options = Options("plot", "Draw every validation metric by round, as PNG files beside the figures.")
    options.add_argument("run", metavar="RUN", type=Path, help="folder of a CSVLogger (metrics.csv) or of a comparison")
    folder: Path = options.parse(arguments).run
    by_metric = curves_of(folder)
    if not by_metric:
        raise FedBayesError(f"{folder} holds no validation metrics ('val/...'): the run ended before its first one")
    for metric, curves in by_metric.items():
        print(draw(folder, metric, curves))
    return 0


def curves_of(folder: Path) -> dict[str, Curves]:
    """Validation metric → label → values by round, of a run or a comparison.

    Raises:
        FedBayesError: the folder is neither.
    """
    if (folder / results.FILE).is_file():
        _, runs = results.load(folder)
        return {metric: results.mean_curves(runs, metric) for metric in results.metrics_of(runs)}
    if (folder / METRICS).is_file():
        curves = read_curves(folder / METRICS)
        return {metric: {metric.removeprefix("val/"): curves[metric]} for metric in validated(curves)}
    below = sorted(each.parent for each in folder.glob(f"**/{METRICS}"))
    remedy = f"did you mean {below[-1]}?" if below else "give the folder of a CSVLogger or of 'fedbayes compare'"
    raise FedBayesError(f"there is neither {METRICS} nor {results.FILE} in {folder}: {remedy}")


def draw(folder: Path, metric: str, curves: Mapping[str, Sequence[float]]) -> Path:
    """Save a picture of ``metric`` by round, one line per label; returns its file."""
    file = folder / f"{metric.replace('/', '_')}_by_round.png"
    name = metric.removeprefix("val/")
    plots.rounds(curves, f"validation {name.upper() if len(name) <= 4 else name.replace('_', ' ')}").savefig(file)
    return file
