"""Cells of a study: each finished one is a line of a file, and none is run twice, whatever has cut a run off."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

C = TypeVar("C", bound=tuple[Any, ...])


def read(file: Path, kind: Callable[..., C]) -> dict[C, dict[str, Any]]:
    """Return the finished cells of a file, named tuples of this ``kind``; none if there is no file."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    pairs = ((line.pop("cell"), line) for line in lines)
    return {kind(**cell) if isinstance(cell, dict) else kind(*cell): line for cell, line in pairs}


def keep(file: Path, cell: Any, result: dict[str, Any]) -> None:
    """Append a finished cell as one line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps({"cell": cell._asdict(), **short(result)}, separators=(",", ":")) + "\n")


def run(file: Path, todo: Iterable[C], result_of: Callable[[C], dict[str, Any]]) -> None:
    """Run the cells ``todo``, and keep each as soon as it is finished."""
    with tqdm(list(todo)) as bar:
        for cell in bar:
            bar.set_postfix_str(", ".join(map(str, cell)))
            keep(file, cell, result_of(cell))


def in_order(done: dict[C, Any], cells: Sequence[C]) -> dict[C, Any]:
    """Return the finished ones of ``cells``, in their order."""
    return {cell: done[cell] for cell in cells if cell in done}


def short(value: Any) -> Any:
    """Round floats to five digits; NaN becomes None."""
    if isinstance(value, dict):
        return {key: short(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [short(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if value == value else None
    return value
