"""One JSON file per finished cell, so that a study that was killed goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from settings import Settings

Result = dict[str, Any]
"""What is kept of a cell: see :func:`federation.run_cell`; or its ``error``."""


class Store:
    """Results by the settings of their cells.

    Args:
        folder: where the files lie; made when the first result is kept.
        factors: the settings that a file is named after.
    """

    def __init__(self, folder: Path, factors: Sequence[str]) -> None:
        self.folder = folder
        self.factors = factors

    def file(self, cell: Settings) -> Path:
        """Where the result of a cell is kept: any change of its settings gives another file."""
        text = json.dumps(cell.as_dict(), sort_keys=True)
        return self.folder / f"{slug(cell, self.factors)}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"

    def get(self, cell: Settings) -> Result | None:
        """The result of a cell, or None if it has not been finished."""
        file = self.file(cell)
        return json.loads(file.read_text()) if file.exists() else None

    def put(self, cell: Settings, result: Result) -> None:
        """Keep a result; a kill leaves the whole file or none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.file(cell).with_suffix(".part")
        unfinished.write_text(json.dumps({"settings": cell.as_dict(), **result}, separators=(",", ":")) + "\n")
        unfinished.replace(self.file(cell))


def slug(cell: Settings, factors: Sequence[str]) -> str:
    """A short name of a cell for files and runs."""
    parts = [str(getattr(cell, factor)) for factor in factors]
    return re.sub(r"[^a-zA-Z0-9_.]+", "-", "-".join([*parts, f"seed{cell.seed}"]))
