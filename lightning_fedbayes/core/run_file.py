"""The file of a run: lines of JSON with what its loggers get. ``fedbayes report`` makes a page of it."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_fedbayes.core.errors import FedBayesError

FILE = "federation.jsonl"
WANDB_FILES = "files"
"""Its folder in W&B's folder of a run. Other loggers have it in the run's folder itself."""
BY_DRAWS = "draws/"
"""Prefix, behind "val/" or "test/", of figures of predictions that this package has drawn for a module."""
Table = Mapping[str, Any]


@dataclass
class RunRecord:
    """Content of the file of a run.

    Attributes:
        settings: of the federation. "network": its name and its numbers of parameters.
        figures: name → round (from 1) → value.
        curves: name → round → table.
        tables: name → the last one.
        torn: the last line is cut short, because the run was killed while it wrote.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, dict[int, float]] = field(default_factory=dict)
    curves: dict[str, dict[int, Table]] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    torn: bool = False

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add a line of the file. It replaces earlier values of the same name and round."""
        round = entry["round"]
        if "settings" in entry:
            if round == 0:  # another federation, in the folder of an earlier one
                self.__init__()
            self.settings = entry["settings"]
        for name, value in entry.get("figures", {}).items():
            self.figures.setdefault(name, {})[round] = float(value)
        if "curve" in entry:
            self.curves.setdefault(entry["curve"], {})[round] = entry
        if "table" in entry:
            self.tables[entry["table"]] = entry


def line_of(entry: Mapping[str, Any]) -> str:
    """Return ``entry`` as a line of JSON, with a checksum as its last value. What JSON does not know becomes text.

    >>> line_of({"round": 1})
    '{"round": 1, "checksum": 3656647457}\\n'
    """
    text = json.dumps(entry, ensure_ascii=False, default=str)
    return f'{text[:-1]}, "checksum": {zlib.crc32(text.encode())}}}\n'


def entry_of(line: str) -> dict[str, Any]:
    """Return the entry in a line of :func:`line_of`, without its end. Raise ValueError for another line."""
    text, _, checksum = line.rpartition(', "checksum": ')
    if checksum != f"{zlib.crc32(f'{text}}}'.encode())}}}":
        raise ValueError("its checksum is wrong")
    return json.loads(f"{text}}}")


def append(folder: Path, entry: Mapping[str, Any]) -> None:
    """Append :func:`line_of` an entry to the file of the run in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / FILE, "a", encoding="utf-8") as file:
        file.write(line_of(entry))


def file_of(run: Path) -> Path:
    """Return the file of a run, in the folder of a logger or of W&B. Raise FedBayesError if there is none."""
    found = next((each for each in (run / FILE, run / WANDB_FILES / FILE) if each.is_file()), None)
    if found is None:
        below = [home_of(file) for file in sorted(run.glob(f"**/{FILE}"))]
        remedy = f"did you mean {below[-1]}?" if below else "give that of a CSVLogger, or W&B's offline-run-…"
        raise FedBayesError(f"{run} is not the folder of a federation's run, which has a file {FILE}: {remedy}")
    return found


def home_of(file: Path) -> Path:
    """Return the folder of the run that wrote ``file``."""
    return file.parent.parent if file.parent.name == WANDB_FILES else file.parent


def read(file: Path) -> RunRecord:
    """Return the content of a file of whole lines. Raise FedBayesError if it holds no round, or one is damaged."""
    record = RunRecord()
    *lines, last = file.read_text(encoding="utf-8", errors="replace").split("\n")  # every whole line ends
    for number, line in enumerate(lines, start=1):
        try:
            record.add(entry_of(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FedBayesError(
                f"{file}: line {number} of {len(lines)} is damaged ({type(error).__name__}); remove it, or take a copy "
                "of the run that is whole"
            ) from error
    if not record.figures:
        raise FedBayesError(f"{file} holds no round: the run ended before its first one; train it longer")
    record.torn = last != ""
    return record
