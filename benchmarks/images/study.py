"""A study, read from YAML: fixed settings, grids of varied settings, and budgets."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.images.data import OFFLINE
from benchmarks.images.report import METRICS
from benchmarks.images.settings import KEYS, Settings, check_settings
from benchmarks.published import rows
from lightning_fedbayes.core.errors import FederationError, nearest

BUDGETS = ("tiny", "laptop", "full")
"""Budgets that every study has; it may have others."""
FIGURES = {"lines": {"x", "metrics"}, "curves": {"panels"}, "retained": {"panels"}}
"""Kind of a figure → keys that it needs besides ``series``."""


@dataclass(frozen=True)
class Study:
    """A study.

    Args:
        name: name of its file without ``.yaml``.
        title: heading of the report.
        fixed: setting → its value in every cell.
        grids: mappings from setting to values; the cells of a grid are the product of its values. A grid may have
            ``budgets`` of its own, which go before those of the study.
        budgets: budget → settings that it changes, except those that a grid varies.
        metrics: columns of the table.
        figures: descriptions of the figures; see :func:`figures.draw`.
        published: names of tables of published.yaml, such as "fbdl table 2".
        source: source of the published values, and how they were measured.
    """

    name: str
    title: str
    fixed: Mapping[str, Any]
    grids: Sequence[Mapping[str, Any]]
    budgets: Mapping[str, Mapping[str, Any]]
    metrics: Sequence[str]
    figures: Sequence[Mapping[str, Any]] = ()
    published: Sequence[str] = ()
    source: str = ""

    @property
    def factors(self) -> list[str]:
        """Return the names of the varied settings, data sets first."""
        names = list(dict.fromkeys(key for grid in self.grids for key in _varied(grid)))
        return sorted(names, key=lambda name: name != "dataset")

    @property
    def published_rows(self) -> list[dict[str, Any]]:
        """Return the rows of all published tables: settings, and scores as text."""
        return [row for table in self.published for row in rows(table)]

    def cells(self, budget: str, seeds: int, offline: bool) -> list[Settings]:
        """Return all cells at a budget, each once: all cells of seed 0, then all of seed 1, and so on.

        Args:
            budget: name of the budget.
            seeds: number of seeds.
            offline: replace the data sets of the study by scikit-learn's digits.

        Raises:
            FederationError: the study has no such budget.
        """
        _check_names([budget], self.budgets, f"{self.name}.yaml: unknown budget")
        changes = {**self.fixed, **self.budgets[budget], **({"dataset": OFFLINE} if offline else {})}
        cells = []
        for seed in range(seeds):
            for grid in self.grids:
                kept = {key: values for key, values in _varied(grid).items() if not (offline and key == "dataset")}
                own = grid.get("budgets", {}).get(budget, {})
                for values in itertools.product(*kept.values()):
                    cells.append(Settings(**{**changes, **own, **dict(zip(kept, values)), "seed": seed}))
        return list(dict.fromkeys(cells))


def read_study(path: Path) -> Study:
    """Read a study from a YAML file.

    Raises:
        FederationError: no such file, no mapping, or an unknown or missing key, setting, metric or figure.
    """
    if not path.is_file():
        raise FederationError(f"there is no study {path}; give a YAML file, such as those in configs/")
    try:
        read = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise FederationError(f"{path.name} is no YAML: {error}") from error
    known = [key for key in Study.__dataclass_fields__ if key != "name"]
    if not isinstance(read, dict):
        raise FederationError(f"{path.name} holds no settings; its keys are {', '.join(known)}")
    _check_names(read, known, f"{path.name}: unknown key")
    missing = [key for key in ("title", "fixed", "grids", "budgets", "metrics") if key not in read]
    if missing:
        raise FederationError(f"{path.name} lacks {', '.join(missing)}")
    study = Study(name=path.stem, **read)
    _check(study, path.name)
    return study


def only(cells: Sequence[Settings], wanted: Sequence[str]) -> list[Settings]:
    """Return the cells whose settings agree with every ``KEY=VALUE,VALUE`` of ``wanted``.

    Raises:
        FederationError: text that cannot be read, an unknown setting, or a value that no cell has.
    """
    kept = list(cells)
    for text in wanted:
        key, equals, values = text.partition("=")
        if not equals:
            raise FederationError(f"--only {text}: write KEY=VALUE, or KEY=VALUE,VALUE")
        if key not in KEYS:
            raise FederationError(f"--only {text}: unknown setting '{key}'; {nearest(key, KEYS)}")
        present = {str(getattr(cell, key)) for cell in cells}
        for value in values.split(","):
            if value not in present:
                raise FederationError(f"--only {text}: no cell has {key}={value}; {nearest(value, present)}")
        kept = [cell for cell in kept if str(getattr(cell, key)) in values.split(",")]
    if not kept:
        raise FederationError(f"--only {' '.join(wanted)}: no cell has all of these")
    return kept


def _check(study: Study, file: str) -> None:
    """Raise FederationError for unknown names and values of the wrong kind."""
    check_settings(study.fixed, f"{file}, fixed")
    for grid in study.grids:
        _check_lists(_varied(grid), f"{file}, grids")
        _check_budgets(grid.get("budgets", {}), f"{file}, grids, budgets", study.budgets)
    absent = [budget for budget in BUDGETS if budget not in study.budgets]
    if absent:
        raise FederationError(f"{file}, budgets: {', '.join(absent)} is missing; give {{}} to change nothing")
    _check_budgets(study.budgets, f"{file}, budgets", study.budgets)
    _check_names(study.metrics, METRICS, f"{file}, metrics: unknown metric")
    for figure in study.figures:
        _check_names([figure.get("kind", "")], FIGURES, f"{file}, figures: unknown kind")
        needs = {"kind", "series", *FIGURES[figure["kind"]]}
        _check_names(figure, {*needs, "where"}, f"{file}, figures, {figure['kind']}: unknown key")
        _check_lists(figure.get("where", {}), f"{file}, figures, where")
        if needs - set(figure):
            raise FederationError(f"{file}, figures, {figure['kind']}: {', '.join(needs - set(figure))} is missing")
        _check_names(
            [figure[key] for key in ("x", "series", "panels") if key in figure],
            KEYS,
            f"{file}, figures: unknown setting",
        )
        _check_names(figure.get("metrics", ()), METRICS, f"{file}, figures: unknown metric")
    for row in study.published_rows:
        _check_names(row, (*KEYS, *METRICS), f"{file}, published: unknown setting or metric")


def _varied(grid: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Return the settings of a grid and their values."""
    return {key: values for key, values in grid.items() if key != "budgets"}


def _check_budgets(budgets: Mapping[str, Mapping[str, Any]], where: str, known: Mapping[str, Any]) -> None:
    """Raise FederationError for a budget that is not ``known``, and for unknown or wrong settings."""
    _check_names(budgets, known, f"{where}: unknown budget")
    for budget, settings in budgets.items():
        check_settings(settings, f"{where}, {budget}")


def _check_lists(settings: Mapping[str, Any], where: str) -> None:
    """Raise FederationError for a setting without a list of valid values."""
    for key, values in settings.items():
        if not isinstance(values, list) or not values:
            raise FederationError(f"{where}: {key}={values!r} has to be a list of values")
        for value in values:
            check_settings({key: value}, where)


def _check_names(names: Any, known: Any, problem: str) -> None:
    """Raise FederationError, with the nearest known name, for the first unknown name."""
    for name in names:
        if name not in known:
            raise FederationError(f"{problem} '{name}'; {nearest(str(name), known)}")
