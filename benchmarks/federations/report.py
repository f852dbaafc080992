"""Tables and figures of the federations."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from benchmarks.federations import published
from benchmarks.federations.methods import FEDERATED, KINDS, METHODS
from lightning_fedbayes.core.plots import GRID, PALETTE
from lightning_fedbayes.core.tables import markdown_table

LOCAL = tuple(name for name, method in METHODS.items() if method.alone)
PERSONAL = tuple(name for name, method in METHODS.items() if method.personal)
POPULATION = tuple(name for name, method in METHODS.items() if method.own)
LOOKED_AT = ("Fed-Heart", "Fed-Heart (one scale)")
"""Federations whose test results had been seen when longer local training and the shrunk choice were added."""

PARTS = {"validation": "validation parts", "tuning": "tuning parts, which also fitted λ and settings"}
"""Scores that a choice of the method can go by."""

Results = Mapping[Any, Mapping[str, Any]]
"""Cells (federation, method, seed) and what they gave, in the order of the tables."""
Seeds = Mapping[int, Mapping[str, Any]]
"""Seed → scores of one row."""
Rows = dict[str, dict[int, Mapping[str, Any]]]
"""Row → its seeds."""


def federations(results: Results) -> dict[str, Rows]:
    """Return federation → row → seed → scores; personal posteriors are rows of their own."""
    found: dict[str, Rows] = {}
    for cell, result in results.items():
        if cell.seed >= 0 and cell.federation not in published.STUDIES:
            rows = found.setdefault(cell.federation, {})
            for kind, each in result.items():
                rows.setdefault(name_of(cell.method, kind), {})[cell.seed] = each
    return found


def name_of(method: str, kind: str) -> str:
    """Return the name of a row."""
    return f"{method}, {kind}" if kind else method


def mean(seeds: Seeds, key: str) -> float:
    """Return the mean over seeds of what is known."""
    values = [each[key] for each in seeds.values() if each.get(key) is not None]
    return statistics.fmean(values) if values else math.nan


def shown(values: Sequence[float | None], digits: int = 3) -> str:
    """Return mean ± standard error of what is known."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    error = f" ± {statistics.stdev(known) / math.sqrt(len(known)):.{digits}f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.{digits}f}{error}"


def column(seeds: Seeds, key: str, digits: int = 3) -> str:
    """Return mean ± standard error of a score."""
    return shown([each.get(key) for each in seeds.values()], digits)


def candidates(rows: Rows) -> list[str]:
    """Return the rows of federated methods, of which one is chosen."""
    return [name for name in rows if name not in ("pooled", *LOCAL)]


def best(rows: Rows, names: Sequence[str]) -> str | None:
    """Return the row with the lowest score on the validation parts, None if there is none."""
    known = [name for name in names if name in rows]
    return lowest(rows, known, "validation") if known else None


def lowest(rows: Rows, names: Sequence[str], key: str) -> str:
    """Return the row with the lowest mean of a score over seeds."""
    return min(names, key=lambda name: mean(rows[name], key))


def chosen(rows: Rows) -> dict[str, str]:
    """Return "global", "local" and kinds of personal posteriors → the row that validation data choose, if there is one.

    The kinds of choosing λ share one method: the one whose shrunk choice has the lowest NLL there.
    """
    found = {"global": best(rows, FEDERATED), "local": best(rows, LOCAL), "population": best(rows, POPULATION)}
    method = best(rows, [name_of(each, KINDS[1]) for each in PERSONAL])
    if method is not None:
        found |= {kind: method.replace(KINDS[1], kind) for kind in KINDS}
    return {kind: name for kind, name in found.items() if name is not None}


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(results: Results) -> str:
    """Return the report of all finished cells, in Markdown."""
    found = federations(results)
    parts = []
    if found:
        parts += ["## Who wins where", summary(found)]
        if len(shared(found)) > 1:
            parts += ["## Choice of the method", choices(found), families(found), optimism(found)]
        if any(KINDS[0] in chosen(rows) for rows in found.values()):
            parts += ["## Personal posteriors", personal(found)]
    if any(cell.federation in published.STUDIES for cell in results):
        parts += ["## FLamby's settings", flamby(results)]
    for name, rows in found.items():
        parts += [f"## {name}", table(rows, tuning(results, name)), f"![scores of {name}](results/{slug(name)}.png)"]
    return "\n\n".join(parts)


def kind_of(rows: Rows) -> tuple[str, str, str]:
    """Return the names of the metric, of the calibration and of the size of sets."""
    first = next(iter(next(iter(rows.values())).values()))
    if "pooled" in first:
        return "c-index", "", ""
    return (
        ("accuracy", "ECE", "set size")
        if "calibration" in first and not regression(rows)
        else ("RMSE", "coverage of 90 % intervals", "interval width")
    )


def regression(rows: Rows) -> bool:
    """Return whether lower metrics are better: the worst clients have a higher one than all."""
    known = [each for seeds in rows.values() for each in seeds.values()]
    return statistics.fmean(each["worst_metric"] - each["metric"] for each in known) > 0


def compared(rows: Rows) -> dict[str, str]:
    """Return "FedAvg", "local", "pooled" and "chosen" → row; the last is chosen by validation data of all federated."""
    names = {"FedAvg": "FedAvg", "local": best(rows, LOCAL), "pooled": "pooled", "chosen": best(rows, candidates(rows))}
    return {kind: each for kind, each in names.items() if each in rows}


def summary(found: Mapping[str, Rows]) -> str:
    """Return, for each federation, the method that validation data choose beside FedAvg, local and pooled training."""
    lines = []
    for name, rows in found.items():
        names = compared(rows)
        own = {kind: rows[each] for kind, each in names.items()}
        if "chosen" not in own:
            continue
        line = [name, names["chosen"], kind_of(rows)[0]]
        line += [
            " / ".join(
                f"{mean(own[kind], key):.3f}" if kind in own else "" for kind in ("chosen", "FedAvg", "local", "pooled")
            )
            for key in ("metric", "clients", "worst_nll")
        ]
        lines.append(line + [ratio(own, key) for key in ("kilobytes", "seconds")])
    heads = [
        "federation",
        "chosen on validation data",
        "metric",
        "metric: chosen / FedAvg / local / pooled",
        "NLL, mean over clients",
        "NLL, worst 10 % of clients",
        "bytes, times FedAvg's",
        "seconds, times FedAvg's",
    ]
    return markdown_table(heads, lines)


def shared(found: Mapping[str, Rows]) -> list[str]:
    """Return the federated methods that every federation has."""
    first, *others = (candidates(rows) for rows in found.values())
    return [name for name in first if all(name in known for known in others)]


def choices(found: Mapping[str, Rows]) -> str:
    """Return what each part chooses of the federated methods, and what the choices cost on the test parts."""
    lines = []
    for name, rows in found.items():
        picked = [lowest(rows, candidates(rows), key) for key in (*PARTS, "clients")]
        lines.append([name, *(cell for row in picked for cell in (row, f"{mean(rows[row], 'clients'):.3f}"))])
    heads = ["federation", *(head for part in (*PARTS, "test") for head in (f"lowest on {part} parts", "NLL"))]
    costs = by_choice(found)
    *_, single = costs.values()
    ends = [
        [name, f"{statistics.fmean(own):.3f}", shown([a - b for a, b in zip(own, single, strict=True)])]
        for name, own in costs.items()
    ]
    end = markdown_table(["chosen by", "NLL, mean over federations", "above the best one for all"], ends)
    return f"{markdown_table(heads, lines)}\n\n{end}"


def by_choice(found: Mapping[str, Rows]) -> dict[str, list[float]]:
    """Return way to choose → NLL on the test parts of each federation; last the best single method for all."""
    every = found.values()
    result = {}
    for key, part in PARTS.items():
        result[part] = [mean(rows[lowest(rows, candidates(rows), key)], "clients") for rows in every]
        result[f"{part}, each seed by itself"] = [by_seed(rows, key) for rows in every]
    result["test parts, in hindsight"] = [
        min(mean(rows[name], "clients") for name in candidates(rows)) for rows in every
    ]
    means = {name: [mean(rows[name], "clients") for rows in every] for name in shared(found)}
    single = min(means, key=lambda name: statistics.fmean(means[name]))
    return {**result, f"test parts, one for all: {single}": means[single]}


def by_seed(rows: Rows, key: str) -> float:
    """Return the NLL of the test parts where each seed takes the method with its own lowest score."""
    known = {name: rows[name] for name in candidates(rows)}
    apart = [
        {name: {seed: seeds[seed]} for name, seeds in known.items() if seed in seeds}
        for seed in {seed for seeds in known.values() for seed in seeds}
    ]
    return statistics.fmean(mean(own[lowest(own, list(own), key)], "clients") for own in apart)


def families(found: Mapping[str, Rows]) -> str:
    """Return on how many federations a method of each family is chosen, and is the lowest on the test parts."""
    linear = [name for name in POPULATION if METHODS[name].linear]
    members = {
        "global model": FEDERATED,
        "personal posterior by λ": [name_of(each, kind) for each in PERSONAL for kind in KINDS],
        "population of networks": [name for name in POPULATION if name not in linear],
        "hierarchical linear": linear,
    }
    picked = [[lowest(rows, candidates(rows), key) for rows in found.values()] for key in ("validation", "clients")]
    lines = []
    for family, names in members.items():
        suited = sum(any(name in rows for name in names) for rows in found.values())
        if suited:
            lines.append([family, *(f"{sum(name in names for name in own)} of {suited}" for own in picked)])
    return markdown_table(["family", "chosen on validation parts", "lowest on test parts"], lines)


def optimism(found: Mapping[str, Rows]) -> str:
    """Return by how much the tuning parts flatter each method: their NLL less that of the validation parts."""
    gaps = {
        name: {row: mean(seeds, "tuning") - mean(seeds, "validation") for row, seeds in rows.items()}
        for name, rows in found.items()
    }
    lines = []
    for row in dict.fromkeys(row for rows in found.values() for row in rows):
        known = [own for own in gaps.values() if row in own]
        paired = [own[row] - own["FedAvg"] if "FedAvg" in own else None for own in known]
        lines.append([row, len(known), shown([own[row] for own in known]), shown(paired)])
    table = markdown_table(["method", "federations", "NLL, tuning less validation", "the same less FedAvg's"], lines)
    return f"Optimism of the parts that λ, settings and rounds were chosen by, mean over federations:\n\n{table}"


def ratio(own: Mapping[str, Seeds], key: str) -> str:
    """Return a cost of the chosen method over FedAvg's."""
    return f"{mean(own['chosen'], key) / mean(own['FedAvg'], key):.1f}" if "FedAvg" in own else ""


def personal(found: Mapping[str, Rows]) -> str:
    """Return personal posteriors beside the best global and the best local model, each chosen on validation data."""
    lines, wins = [], dict[str, dict[str, tuple[bool, bool]]]()
    order = (*KINDS, "population", "global", "local")
    for name, rows in found.items():
        by = chosen(rows)
        if not set(order) <= by.keys():
            continue
        own = {kind: rows[each] for kind, each in by.items()}
        cells = [name, by[KINDS[0]].split(",")[0], by["population"], by["global"], by["local"]]
        cells += [column(own[kind], "clients") for kind in order]
        cells += [shown(gains(own, kind, "clients")) for kind in KINDS[:2]]
        cells.append(" / ".join(f"{mean(own[kind], 'worst_nll'):.3f}" for kind in order))
        wins[name] = {
            kind: (
                statistics.fmean(gains(own, kind, "clients")) > 0,
                statistics.fmean(gains(own, kind, "worst_nll")) > 0,
            )
            for kind in order[:-2]
        }
        lines.append(cells)
    heads = [
        "federation",
        "personal: posteriors by",
        "population: best",
        "global: best",
        "local: best",
        *(f"NLL: {kind}" for kind in order),
        *(f"gain over the better of both: {kind}" for kind in KINDS[:2]),
        f"NLL, worst 10 %: {' / '.join(order)}",
    ]
    unseen = {name: own for name, own in wins.items() if name not in LOOKED_AT}
    ends = [
        [kind if kind == "population" else f"λ by {kind}", *counts(wins, kind), *counts(unseen, kind)]
        for kind in order[:-2]
    ]
    lower = ["mean NLL over clients lower than both", "NLL of the worst 10 % lower", "both"]
    end = markdown_table(["personal posteriors", *lower, *(f"without Fed-Heart: {each}" for each in lower)], ends)
    return f"{markdown_table(heads, lines)}\n\nFederations on which they beat the global and the local model:\n\n{end}"


def counts(wins: Mapping[str, Mapping[str, tuple[bool, bool]]], kind: str) -> list[str]:
    """Return on how many federations the mean, the worst clients and both are better."""
    each = [own[kind] for own in wins.values()]
    return [
        f"{sum(values)} of {len(each)}"
        for values in (
            [mean for mean, _ in each],
            [worst for _, worst in each],
            [mean and worst for mean, worst in each],
        )
    ]


def gains(own: Mapping[str, Seeds], kind: str, key: str) -> list[float]:
    """Return by how much personal posteriors are below the better of global and local, seed by seed."""
    better = min(("global", "local"), key=lambda each: mean(own[each], key))
    shared = own[kind].keys() & own[better].keys()
    return [own[better][seed][key] - own[kind][seed][key] for seed in sorted(shared)]


def tuning(results: Results, name: str) -> dict[str, Mapping[str, Any]]:
    """Return method → what was chosen for it."""
    return {cell.method: result for cell, result in results.items() if cell.federation == name and cell.seed < 0}


def table(rows: Rows, settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the scores of all methods on one federation, mean ± standard error over the seeds."""
    name, calibration, size = kind_of(rows)
    survival = name == "c-index"
    lines = []
    for row, seeds in rows.items():
        line = [row, column(seeds, "metric")]
        line += [column(seeds, "pooled")] if survival else []
        line += [column(seeds, "nll"), column(seeds, "clients")]
        line += [] if survival else [column(seeds, "calibration"), column(seeds, "set_size", 2)]
        line += [column(seeds, "worst_metric"), column(seeds, "worst_nll")]
        line += [column(seeds, "tuning"), column(seeds, "validation")]
        sent = mean(seeds, "kilobytes")
        tuned = settings.get(row, settings.get(row.rpartition(", ")[0]))
        line += [f"{sent:.2f}" if sent else "", f"{mean(seeds, 'seconds'):.1f}", choice(tuned)]
        lines.append(line)
    scores = [f"{name} within clients", "c-index of all"] if survival else [name]
    heads = ["method", *scores, "NLL", "NLL, mean over clients"]
    heads += [] if survival else [calibration, size]
    heads += [
        f"{name}, worst 10 %",
        "NLL, worst 10 %",
        "NLL, tuning",
        "NLL, validation",
        "kB up per round and client",
        "seconds",
        "setting",
    ]
    return markdown_table(heads, lines)


def choice(chosen: Mapping[str, Any] | None) -> str:
    """Return setting and rounds in words."""
    if chosen is None:
        return ""
    setting = ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in chosen["setting"].items())
    return f"{setting}, rounds {chosen['rounds']}"


def flamby(results: Results) -> str:
    """Return our figures under FLamby's settings beside those that it publishes."""
    lines = []
    for study, settings in published.STUDIES.items():
        for method, theirs in settings.methods.items():
            ours = [
                result["metric"]
                for cell, result in results.items()
                if (cell.federation, cell.method) == (study, method)
            ]
            if len(ours) < 2:
                continue
            difference = statistics.fmean(ours) - theirs.mean
            lines.append(
                [
                    study.split(",")[0],
                    method,
                    settings.metric,
                    len(ours),
                    f"{statistics.fmean(ours):.3f} ± {statistics.stdev(ours):.3f}",
                    f"{theirs.mean:.3f} ± {theirs.deviation:.3f}",
                    f"{difference:+.3f}",
                    "yes" if abs(difference) <= 2 * theirs.deviation else "**no**",
                ]
            )
    heads = [
        "federation",
        "method",
        "metric",
        "seeds",
        "ours",
        "FLamby",
        "difference",
        "within two of its standard deviations",
    ]
    return f"Mean ± standard deviation over the seeds 42 to 46, pooled test set:\n\n{markdown_table(heads, lines)}"


# -- figures -----------------------------------------------------------------------------------------------------------


def slug(name: str) -> str:
    """Return a name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def figures(results: Results, folder: Path) -> None:
    """Draw one figure for each federation: NLL over clients, and of the worst 10 %, by method."""
    for name, rows in federations(results).items():
        draw(name, rows, folder / f"{slug(name)}.png")


def draw(name: str, rows: Rows, file: Path) -> None:
    """Draw mean and standard error of both NLLs, one line for each method."""
    wanted: list[str] = [each for each in rows if not each.endswith((KINDS[0], KINDS[2]))]
    figure = Figure(figsize=(6.4, 0.8 + 0.25 * len(wanted)), dpi=90, layout="constrained")
    axes = figure.subplots()
    keys: dict[str, tuple[str, Callable[[int], float]]] = {
        "clients": ("mean over clients", lambda row: row - 0.12),
        "worst_nll": ("worst 10 %", lambda row: row + 0.12),
    }
    for number, (key, (label, place)) in enumerate(keys.items()):
        values = [[each[key] for each in rows[row].values() if each.get(key) is not None] for row in wanted]
        errors = [statistics.stdev(own) / math.sqrt(len(own)) if len(own) > 1 else 0.0 for own in values]
        axes.errorbar(
            [statistics.fmean(own) for own in values],
            [place(row) for row in range(len(wanted))],
            xerr=errors,
            fmt="o" if number == 0 else "s",
            markersize=4,
            color=PALETTE[number],
            label=label,
        )
    axes.set_yticks(range(len(wanted)), wanted, fontsize=7)
    axes.invert_yaxis()
    axes.grid(color=GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"{name}: NLL on the clients' test parts, nats", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    figure.legend(loc="outside upper center", ncols=2, fontsize=8, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture)
    Image.open(picture).convert("RGB").quantize(64).save(file, optimize=True)
