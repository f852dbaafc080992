"""What a comparison has found so far: a file of runs, and a table and curves out of them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_fedbayes.cli.curves import Curves, validated
from lightning_fedbayes.errors import FedBayesError

FILE = "results.json"


@dataclass(frozen=True)
class Run:
    """One federation of a comparison.

    Attributes:
        fusion: name of its rule.
        seed: where its random draws come from.
        curves: its metrics by round.
    """

    fusion: str
    seed: int
    curves: Curves


def save(folder: Path, configuration: dict[str, Any], runs: Sequence[Run]) -> None:
    """Write the runs and the configuration that they share; an interrupted write leaves the old file."""
    content = {"configuration": configuration, "runs": [asdict(run) for run in runs]}
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{FILE}.part"
    unfinished.write_text(json.dumps(_replaced(content, math.nan, None), indent=1, allow_nan=False))
    unfinished.replace(folder / FILE)


def load(folder: Path) -> tuple[dict[str, Any], list[Run]]:
    """The configuration and the runs that :func:`save` wrote.

    Raises:
        FedBayesError: the file is something else.
    """
    try:
        content = json.loads((folder / FILE).read_text())
        runs = [Run(run["fusion"], run["seed"], _replaced(run["curves"], None, math.nan)) for run in content["runs"]]
        return content["configuration"], runs
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise FedBayesError(f"{folder / FILE} was not written by 'fedbayes compare': {error!r}") from error


def _replaced(value: Any, old: float | None, new: float | None) -> Any:
    """``value`` with NaN as null, or back: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _replaced(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, old, new) for each in value]
    is_old = value is None if old is None else isinstance(value, float) and not math.isfinite(value)
    return new if is_old else value


def metrics_of(runs: Sequence[Run]) -> list[str]:
    """Names of the validation metrics that some run has."""
    return sorted({name for run in runs for name in validated(run.curves)})


def mean_curves(runs: Sequence[Run], metric: str) -> Curves:
    """Rule → mean of ``metric`` over its seeds in every round; NaN where a seed has no value."""
    by_rule = {run.fusion: [other.curves.get(metric, []) for other in runs if other.fusion == run.fusion]
               for run in runs}
    return {fusion: [statistics.fmean(values) for values in zip(*curves)] for fusion, curves in by_rule.items()}


def table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: each rule's validation metrics in its last round, its seconds and megabytes per round.

    Several seeds give mean ± standard deviation, "nan" where one has no value. Seconds are the median of the rounds,
    since the first one sets up; megabytes go both ways, summed over the clients.

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
        traffic = statistics.fmean(sum(_megabytes(curves, way) for way in ("up", "down")) for curves in own)
        rows.append([fusion, str(len(own)), *scores, f"{seconds:.3g}", f"{traffic:.3g}"])
    return columns, rows


def _megabytes(curves: Curves, way: str) -> float:
    """Mean traffic of a round in one direction; 0 if it was not logged."""
    return statistics.fmean(curves.get(f"federation/megabytes_{way}", [0.0]))


def _last(values: Sequence[float]) -> float:
    """The last value that is there."""
    return next((value for value in reversed(values) if not math.isnan(value)), math.nan)


def _spread(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    alone = len(values) == 1 or math.isnan(mean)
    return f"{mean:.4g}" if alone else f"{mean:.4g} ± {statistics.stdev(values):.2g}"
