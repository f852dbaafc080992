"""The file of a run: lines of JSON with what its loggers get, from which ``fedbayes report`` makes a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_fedbayes.core.errors import FedBayesError

FILE = "federation.jsonl"
PLACES = ("", "files")
"""Where it lies in the folder of a run: of a CSVLogger, of W&B."""


@dataclass(frozen=True)
class Table:
    """A table of one round: heads of its columns, and rows of as many cells."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass
class RunRecord:
    """What the file of a run holds.

    Attributes:
        settings: of the federation; "network": its name and its numbers of parameters.
        figures: name → round (from 1) → value.
        curves: name → round → table.
        tables: name → its last table.
        torn: the last line is cut short, as that of a run that was killed while it wrote.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, dict[int, float]] = field(default_factory=dict)
    curves: dict[str, dict[int, Table]] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    torn: bool = False

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add a line of the file; what came earlier of the same name and round is replaced."""
        round = int(entry["round"])
        if "settings" in entry:
            if round == 0:  # another federation, in the folder of an earlier one
                self.__init__()
            self.settings = entry["settings"]
        for name, value in entry.get("figures", {}).items():
            self.figures.setdefault(name, {})[round] = float(value)
        if "name" in entry:
            table = Table(entry["columns"], entry["rows"])
            if entry.get("is_curve"):
                self.curves.setdefault(entry["name"], {})[round] = table
            else:
                self.tables[entry["name"]] = table


def append(folder: Path, entry: Mapping[str, Any]) -> None:
    """Append a line to the file of the run in ``folder``, with floats of six significant digits."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / FILE, "a", encoding="utf-8") as file:
        file.write(f"{json.dumps(_plain(entry), ensure_ascii=False, separators=(',', ':'))}\n")


def _plain(value: Any) -> Any:
    """Return ``value`` with floats rounded, and what JSON does not know as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value if value is None or isinstance(value, str | int) else str(value)


def file_of(run: Path) -> Path:
    """Return the file of the run in a folder of a CSVLogger, a TensorBoardLogger or W&B; or the file itself.

    Raises:
        FedBayesError: there is none.
    """
    if run.is_file() and run.name == FILE:
        return run
    for place in PLACES:
        if (run / place / FILE).is_file():
            return run / place / FILE
    if not run.exists():
        raise FedBayesError(f"there is no run {run}: give the folder of a CSVLogger, or W&B's folder offline-run-…")
    below = sorted(run.glob(f"**/{FILE}"), key=lambda file: file.stat().st_mtime)
    remedy = (
        f"did you mean {below[-1].parent.parent if below[-1].parent.name == PLACES[-1] else below[-1].parent}?" if below
        else "give the folder of a federation's CSVLogger, or W&B's folder offline-run-…"
    )
    raise FedBayesError(f"{run} is not the folder of a federation's run, which has a file {FILE}: {remedy}")


def read(run: Path) -> RunRecord:
    """Return what the file of a run holds. A last line that was cut short is left out.

    Raises:
        FedBayesError: there is no such file, it holds no finished round, or another of its lines is damaged.
    """
    file, record = file_of(run), RunRecord()
    *lines, last = file.read_text(encoding="utf-8", errors="replace").split("\n")  # every whole line ends
    record.torn = last != ""
    for number, line in enumerate(lines, start=1):
        try:
            record.add(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FedBayesError(
                f"{file}, line {number} of {len(lines)} cannot be read ({type(error).__name__}): the file is damaged; "
                "remove that line, or take a copy of the run that is whole"
            ) from error
    if not record.figures:
        raise FedBayesError(f"{file} holds no finished round: the run ended before its first one; train it longer")
    return record
