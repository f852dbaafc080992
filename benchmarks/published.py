"""Figures of other people's work, read from published.yaml, where each stands once."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lightning_fedbayes.core.errors import FederationError, nearest

FILE = Path(__file__).parent / "published.yaml"
OTHER = ("set_up", "derived")
"""Entries of a source that are no tables."""


@cache
def sources() -> dict[str, dict[str, Any]]:
    """Return source → table, "set_up" or "derived" → its content."""
    return yaml.safe_load(FILE.read_text())


def rows(table: str) -> list[dict[str, Any]]:
    """Return the rows of a table, each with the settings that all share: key → setting, or score as text.

    A row with a list of settings stands for a row with each of them.

    Args:
        table: source and table, such as "fbdl table 2".

    Raises:
        FederationError: there is no such table.
    """
    known = {
        f"{source} {name}": content
        for source, tables in sources().items()
        for name, content in tables.items()
        if name not in OTHER
    }
    if table not in known:
        raise FederationError(f"{FILE.name} has no table '{table}'; {nearest(table, known)}")
    found = []
    for row in known[table]["rows"]:
        whole = {**known[table].get("settings", {}), **row}
        lists = [value if isinstance(value, list) else [value] for value in whole.values()]
        found += [dict(zip(whole, values)) for values in itertools.product(*lists)]
    return found


def mean_and_spread(score: str) -> tuple[float, float | None]:
    """Return the numbers of a score; the spread is None where the source gives none.

    >>> mean_and_spread("3.02 ± 0.03"), mean_and_spread("3.72")
    ((3.02, 0.03), (3.72, None))
    """
    mean, _, spread = score.partition(" ± ")
    return float(mean), float(spread) if spread else None
