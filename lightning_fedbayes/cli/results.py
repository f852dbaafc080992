"""Results of runs: learning curves, and the file, table and picture of a comparison."""

import csv
import json
import math
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.core.run_file import BY_DRAWS

FILE = "results.json"
"""Runs of a comparison, as :func:`save` writes them."""
METRICS = "metrics.csv"
"""Metrics of one run, as a CSVLogger writes them."""
PICTURE = "learning_curves.png"
"""Picture of a comparison: every validation metric by round."""
AXES = ("epoch", "step", "round")

Curves = dict[str, list[float]]
"""Metric → its values in rounds 1, 2, …. NaN where it was not logged."""


def read_curves(file: Path) -> Curves:
    """Read the last value of every metric in every round (epoch, from 0) of a ``metrics.csv`` of a CSVLogger."""
    with open(file, newline="") as lines:
        rows = list(csv.DictReader(lines))
    rounds = 1 + max((int(float(row["epoch"])) for row in rows if row.get("epoch")), default=-1)
    names = [name for name in (rows[0] if rows else {}) if name not in AXES]
    curves: Curves = {name: [math.nan] * rounds for name in names}
    for row in rows:
        for name in names:
            if row.get("epoch") and row[name]:
                curves[name][int(float(row["epoch"]))] = float(row[name])
    return curves


@dataclass(frozen=True)
class Run:
    """One federation of a comparison: the name of its rule, its seed, and its metrics by round."""

    fusion: str
    seed: int
    curves: Curves


def save(folder: Path, configuration: dict[str, Any], runs: Sequence[Run]) -> None:
    """Write the runs and their common configuration. An interrupted write leaves the old file."""
    content = {"configuration": configuration, "runs": [asdict(run) for run in runs]}
    content = _replaced(content, math.nan, None)
    content["checksum"] = zlib.crc32(json.dumps(content).encode())
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{FILE}.part"
    unfinished.write_text(json.dumps(content, indent=1, allow_nan=False))
    unfinished.replace(folder / FILE)


def load(folder: Path) -> tuple[dict[str, Any], list[Run]]:
    """Return the configuration and the runs that :func:`save` wrote. Raise FedBayesError for another format."""
    try:
        content = json.loads((folder / FILE).read_text())
        if content.pop("checksum") != zlib.crc32(json.dumps(content).encode()):
            raise ValueError("its checksum is wrong")
        runs = [Run(run["fusion"], run["seed"], _replaced(run["curves"], None, math.nan)) for run in content["runs"]]
        return content["configuration"], runs
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "give another folder, or delete the file"
        raise FedBayesError(f"{folder / FILE} is not as 'fedbayes compare' wrote it: {error!r}; {remedy}") from error


def _replaced(value: Any, old: float | None, new: float | None) -> Any:
    """Replace NaN by null in ``value``, or null by NaN: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _replaced(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, old, new) for each in value]
    is_old = value is None if old is None else isinstance(value, float) and not math.isfinite(value)
    return new if is_old else value


def metrics_of(runs: Sequence[Run]) -> list[str]:
    """Return the sorted names of the validation metrics that at least one run has."""
    return sorted({name for run in runs for name in run.curves if name.startswith("val/")})


def mean_curves(runs: Sequence[Run], metric: str) -> Curves:
    """Return rule → mean of ``metric`` over the seeds in every round. NaN where a seed has no value."""
    by_rule = {
        run.fusion: [other.curves.get(metric, []) for other in runs if other.fusion == run.fusion] for run in runs
    }
    return {fusion: [statistics.fmean(values) for values in zip(*curves)] for fusion, curves in by_rule.items()}


def table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows: each rule's validation metrics in the last round, seconds and megabytes per round.

    Several seeds give mean ± standard deviation. Seconds are the median over the rounds. Megabytes are those sent and
    received, summed over the clients.

    >>> curves = {"val/nll": [0.5, 0.25], "federation/seconds": [3.0, 1.0], "federation/megabytes_up": [2.0, 2.0]}
    >>> table([Run("conflation", 0, curves), Run("conflation", 1, {**curves, "val/nll": [0.5, 0.75]})])
    (['fusion', 'seeds', 'nll', 's per round', 'MB per round'], [['conflation', '2', '0.5 ± 0.35', '2', '2']])
    """
    metrics = [name for name in metrics_of(runs) if "retained_area" not in name]
    columns = ["fusion", "seeds", *(name.removeprefix("val/") for name in metrics), "s per round", "MB per round"]
    rows = []
    for fusion in dict.fromkeys(run.fusion for run in runs):
        own = [run.curves for run in runs if run.fusion == fusion]
        scores = [_spread([_last(curves.get(metric, [])) for curves in own]) for metric in metrics]
        seconds = statistics.fmean(statistics.median(curves.get("federation/seconds", [math.nan])) for curves in own)
        traffic = statistics.fmean(
            sum(statistics.fmean(curves.get(f"federation/megabytes_{way}", [0.0])) for way in ("up", "down"))
            for curves in own
        )
        rows.append([fusion, str(len(own)), *scores, f"{seconds:.3g}", f"{traffic:.3g}"])
    return columns, rows


def _last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if not math.isnan(value)), math.nan)


def _spread(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    alone = len(values) == 1 or math.isnan(mean)
    return f"{mean:.4g}" if alone else f"{mean:.4g} ± {statistics.stdev(values):.2g}"


def draw(folder: Path, runs: Sequence[Run]) -> None:
    """Draw every validation metric by round on one page, a line for each rule, and print its file."""
    from lightning_fedbayes.core import plots  # here: Matplotlib takes longer to import than a mistake to be found

    panels = {spoken(metric): mean_curves(runs, metric) for metric in metrics_of(runs)}
    if panels:
        plots.round_panels(panels).savefig(folder / PICTURE)
        print(f"Picture: {folder / PICTURE}")


def spoken(metric: str) -> str:
    """Return the name of a metric in a picture.

    >>> spoken("val/nll"), spoken("test/client_accuracy"), spoken("val/draws/ece")
    ('validation NLL', 'test client accuracy', 'validation ECE, by draws')
    """
    stage, _, name = metric.partition("/")
    name, by = without_draws(name)
    shown = name.upper() if len(name) <= 4 else name.replace("_", " ")
    return f"{'validation' if stage == 'val' else stage} {shown}{by}"


def without_draws(name: str) -> tuple[str, str]:
    """Return a figure's name without :data:`BY_DRAWS`, and a remark in its place."""
    own = name.removeprefix(BY_DRAWS)
    return own, "" if own == name else ", by draws"
