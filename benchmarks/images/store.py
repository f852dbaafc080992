"""Results of the cells of a study: one line of JSON per cell in one file."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.images.settings import Settings

Result = dict[str, Any]
"""Result of a cell, see :func:`federation.run_cell`; or its ``error``."""


class Store:
    """Results by the settings of their cells, in a file of lines ``{"settings": {...}, ...}``.

    Each result is appended as one line with one write as soon as its cell is finished, so that a killed run loses at
    most the cell under way. Several processes may share the file: each locks its folder while it writes. Lines that
    cannot be read, such as one cut short by a full disk, are reported and ignored. The last line of a cell counts.

    Args:
        file: ``cells.jsonl`` of a study; made with its folder when the first result is kept.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def put(self, cell: Settings, result: Result) -> None:
        """Append the result of a cell."""
        line = json.dumps({"settings": cell.as_dict(), **result}, separators=(",", ":")).encode() + b"\n"
        with self._lock(), self.file.open("ab+", buffering=0) as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the end of a line that was cut short
                    line = b"\n" + line
            file.write(line)

    def finished(self, cells: Iterable[Settings]) -> dict[Settings, Result]:
        """Return the results of those of ``cells`` that are finished, in their order."""
        results = {key: json.loads(line) for key, line in self._lines().items()}
        return {cell: results[key] for cell in cells if (key := _key(cell.as_dict())) in results}

    def sort(self) -> None:
        """Rewrite the file sorted by settings, with one line per cell; a kill leaves the old file or the new one."""
        if not self.file.exists():
            return
        with self._lock():
            unfinished = self.file.with_suffix(".part")
            unfinished.write_text("".join(f"{line}\n" for line in sorted(self._lines().values())))
            unfinished.replace(self.file)

    def _lines(self) -> dict[str, str]:
        """Return the last readable line of every cell by its settings."""
        lines: dict[str, str] = {}
        text = self.file.read_bytes() if self.file.exists() else b""
        for number, line in enumerate(text.splitlines(), 1):
            try:
                lines[_key(json.loads(line)["settings"])] = line.decode()
            except (ValueError, KeyError, TypeError):
                print(f"{self.file.name}, line {number}: incomplete, ignored; its cell is run anew", file=sys.stderr)
        return lines

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Wait until no other process writes, and keep the others waiting meanwhile."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.file.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def _key(settings: dict[str, Any]) -> str:
    """Return text that is the same for the same settings; a cell from before a setting was added has its default."""
    return json.dumps({**Settings().as_dict(), **settings}, sort_keys=True)
