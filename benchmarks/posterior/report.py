"""Tables and figure of the study."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from lightning_fedbayes.core.plots import DPI, GRID, PALETTE
from lightning_fedbayes.core.tables import markdown_table

AT = (10, 20, 50)
"""Rounds of logistic regression in the table."""
KL_BAR, MEAN_BAR = 0.02, 0.2
"""Bars of sites on logistic regression, within 50 rounds."""
NLL_BAR, FACTOR_BAR = 0.16, 1.5
"""Bars of sites on digits, Dirichlet(0.5): NLL, and mutual information over or under that of pooled training."""
BAR_SPLIT = "Dirichlet(0.5)"
POINTS_BAR = 0.5
"""Bar of sites on FashionMNIST beside NLL and ECE: percentage points of accuracy that FedAvg may be ahead."""

Results = Mapping[Any, Mapping[str, Any]]
"""Cells (study, split, rule, prior, seed) and what they gave, in the order of the tables."""


def rows_of(results: Results, study: str) -> dict[tuple[str, str, str], dict[int, Mapping[str, Any]]]:
    """Return (split, rule, prior) → seed → result of the cells of a study."""
    rows: dict[tuple[str, str, str], dict[int, Mapping[str, Any]]] = {}
    for cell, result in results.items():
        if cell.study == study:
            rows.setdefault((cell.split, cell.rule, cell.prior), {})[cell.seed] = result
    return rows


def tables(results: Results) -> str:
    """Return the report of all finished cells, in Markdown."""
    parts = []
    if rows := rows_of(results, "logistic"):
        parts += ["## Logistic regression", logistic_table(rows), bars_by_round(rows)]
    if rows := rows_of(results, "digits"):
        parts += ["## Digits", scores_table(rows), digits_bars(rows)]
    if rows := rows_of(results, "digits_hybrid"):
        parts += ["## Digits, last layer Bayesian", scores_table(rows)]
    if rows := rows_of(results, "fashion_mnist"):
        parts += ["## FashionMNIST", scores_table(rows), fashion_mnist_bars(rows)]
        fedavg = {key: seeds for key, seeds in rows.items() if key[1] == "fedavg"}  # which has no KL to weigh
        if tempered := rows_of(results, "fashion_mnist_tempered"):
            rows = {**fedavg, **tempered}
            parts += ["## FashionMNIST, KL weight 0.1", scores_table(rows), fashion_mnist_bars(rows)]
    return "\n\n".join(parts)


def logistic_table(rows: Mapping[tuple[str, str, str], Mapping[int, Mapping[str, Any]]]) -> str:
    """Return distances after some rounds, means over the seeds."""
    lines = []
    for (split, rule, prior), seeds in rows.items():
        shown = []
        for key in ("kl", "mean_error", "variance_ratio"):
            by_round = [statistics.fmean(values) for values in zip(*(result[key] for result in seeds.values()))]
            shown.append(" / ".join(f"{by_round[at - 1]:.2g}" for at in AT if at <= len(by_round)))
        lines.append([split, rule, prior_of(rule, prior), len(seeds), *shown])
    when = ", ".join(map(str, AT))
    heads = [
        "clients",
        "rule",
        "prior",
        "seeds",
        f"KL per parameter after {when} rounds",
        "error of the mean, posterior sd",
        "variance ratio",
    ]
    return markdown_table(heads, lines)


def bars_by_round(rows: Mapping[tuple[str, str, str], Mapping[int, Mapping[str, Any]]]) -> str:
    """Return from which round on sites are within the bars, the latest of the seeds."""
    lines = []
    for (split, rule, _), seeds in rows.items():
        if not sites(rule):
            continue
        latest = max(reached(result) for result in seeds.values())
        worst = [max(result[key][-1] for result in seeds.values()) for key in ("kl", "mean_error")]
        shown = "not reached" if latest == math.inf else latest
        lines.append([split, rule, len(seeds), shown, *(f"{value:.2g}" for value in worst)])
    head = f"both bars (KL ≤ {KL_BAR}, mean ≤ {MEAN_BAR} sd) hold from round"
    heads = ["clients", "rule", "seeds", head, "KL, last round", "error of the mean, last round"]
    return f"The worst of the seeds:\n\n{markdown_table(heads, lines)}"


def reached(result: Mapping[str, Any]) -> float:
    """Return the first round from which on both bars hold until the last; infinity if there is none."""
    outside = [
        number
        for number, (kl, error) in enumerate(zip(result["kl"], result["mean_error"], strict=True), 1)
        if not (kl <= KL_BAR and error <= MEAN_BAR)
    ]
    first = max(outside, default=0) + 1
    return first if first <= len(result["kl"]) else math.inf


def scores_table(rows: Mapping[tuple[str, str, str], Mapping[int, Mapping[str, Any]]]) -> str:
    """Return the scores, mean ± standard error over the seeds."""
    lines = []
    for (split, rule, prior), seeds in rows.items():
        scores = [
            mean_and_error([result[key] for result in seeds.values()])
            for key in ("nll", "ece", "accuracy", "mutual_information")
        ]
        sent = [result["megabytes"] for result in seeds.values() if "megabytes" in result and not pooled(rule)]
        where = "" if pooled(rule) else split
        traffic = f"{statistics.fmean(sent):.2f}" if sent else ""
        lines.append([where, rule, prior_of(rule, prior), len(seeds), *scores, traffic])
    heads = [
        "clients",
        "rule",
        "prior",
        "seeds",
        "NLL",
        "ECE",
        "accuracy",
        "mutual information, nats",
        "MB up per round",
    ]
    return markdown_table(heads, lines)


def digits_bars(rows: Mapping[tuple[str, str, str], Mapping[int, Mapping[str, Any]]]) -> str:
    """Return sites beside pooled training on the split of the bars, seed by seed."""
    lines = []
    ours_of, theirs_of = (rows.get(key, {}) for key in ((BAR_SPLIT, "sites", "fixed"), ("none", "pooled", "fixed")))
    for seed in sorted(ours_of.keys() & theirs_of.keys()):
        ours, theirs = ours_of[seed], theirs_of[seed]
        factor = ours["mutual_information"] / theirs["mutual_information"]
        met = [ours["nll"] <= NLL_BAR, max(factor, 1 / factor) <= FACTOR_BAR]
        lines.append([seed, f"{ours['nll']:.3f}", f"{theirs['nll']:.3f}", f"{factor:.2f}", *map(verdict, met)])
    heads = [
        "seed",
        "NLL of sites",
        "NLL of pooled training",
        "mutual information, sites / pooled",
        f"NLL ≤ {NLL_BAR}",
        f"within a factor {FACTOR_BAR}",
    ]
    return f"{BAR_SPLIT}, seed by seed:\n\n{markdown_table(heads, lines)}"


def fashion_mnist_bars(rows: Mapping[tuple[str, str, str], Mapping[int, Mapping[str, Any]]]) -> str:
    """Return sites beside the best fusion rule and FedAvg, seed by seed."""
    lines = []
    for split in dict.fromkeys(split for split, _, _ in rows):
        ours_of, fedavg_of = (rows.get((split, rule, "fixed"), {}) for rule in ("sites", "fedavg"))
        for seed in sorted(ours_of.keys() & fedavg_of.keys()):
            ours = ours_of[seed]
            rivals = {
                f"{rule}, {prior}": seeds[seed]
                for (where, rule, prior), seeds in rows.items()
                if where == split and seed in seeds and not rule.startswith("fedavg") and not sites(rule)
            }
            line, met = [], []
            for score in ("nll", "ece"):
                best, name = min(((each[score], name) for name, each in rivals.items()), default=(math.nan, "none"))
                line += [f"{ours[score]:.3f}", f"{best:.3f} ({name})"]
                met.append(ours[score] < best)
            points = 100 * (ours["accuracy"] - fedavg_of[seed]["accuracy"])
            met.append(points >= -POINTS_BAR)
            lines.append([split, seed, *line, f"{points:+.1f}", *map(verdict, met)])
    heads = [
        "clients",
        "seed",
        "NLL of sites",
        "lowest of the rules",
        "ECE of sites",
        "lowest of the rules",
        "accuracy − FedAvg's, points",
        "NLL lowest",
        "ECE lowest",
        f"≥ −{POINTS_BAR} points",
    ]
    return f"Sites beside the best rule, each score by itself:\n\n{markdown_table(heads, lines)}"


def verdict(met: bool) -> str:
    """Return "yes" or a bold "no"."""
    return "yes" if met else "**no**"


def sites(rule: str) -> bool:
    """Return whether a rule is a form of sites."""
    return rule.split(",")[0] == "sites"


def pooled(rule: str) -> bool:
    """Return whether a row is training on pooled data."""
    return rule.startswith("pooled")


def prior_of(rule: str, prior: str) -> str:
    """Return what the clients have as their prior."""
    return "share" if sites(rule) else "" if pooled(rule) or rule.startswith("fedavg") else prior


def mean_and_error(values: Sequence[float]) -> str:
    """Return mean ± standard error."""
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{error}"


def curves(results: Results, file: Path) -> None:
    """Draw the KL divergence of logistic regression by round, the first seed of every row."""
    rows = rows_of(results, "logistic")
    if not rows:
        return
    splits = list(dict.fromkeys(split for split, _, _ in rows))
    rules = list(dict.fromkeys(rule for _, rule, _ in rows))
    figure = Figure(figsize=(10.5, 3.6), dpi=DPI, layout="constrained")
    grid = figure.subplots(1, len(splits), sharey=True, squeeze=False)[0]
    for axes, split in zip(grid, splits, strict=True):
        axes.grid(color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        for (where, rule, prior), seeds in rows.items():
            kl = next(iter(seeds.values()))["kl"]
            if where == split:
                number = rules.index(rule)
                label = f"{rule}, {prior_of(rule, prior)}"
                axes.plot(
                    range(1, len(kl) + 1),
                    kl,
                    color=PALETTE[number % len(PALETTE)],
                    label=label,
                    linestyle="--" if prior == "global" else "-",
                    linewidth=2.4 if rule == "sites" else 1.3,
                )
        axes.axhline(KL_BAR, color="#777777", linewidth=0.8)
        axes.set(title=split, xlabel="round")
    grid[0].set(ylabel="KL per parameter, nats", yscale="log", ylim=(2e-3, 100))
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=7)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=90)
    Image.open(picture).convert("RGB").quantize(256).save(file, optimize=True)
