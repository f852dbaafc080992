"""Text files of numbers, read with errors that name the file, the line and the column."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fedbayes.errors import FederationError


class Table(NamedTuple):
    """A text file of numbers.

    Attributes:
        values: float64, shape (rows, columns); NaN where the file says that a value is missing.
        lines: line of the file that each row stands in, counted from 1.
    """

    values: Tensor
    lines: tuple[int, ...]


def read_table(path: Path, separator: str | None = None, missing: str | None = None) -> Table:
    """The numbers in a text file of one row per line; empty lines are skipped.

    Args:
        path: of the file.
        separator: what stands between two values; None: any white space.
        missing: text that stands for a missing value; None: none is missing.

    Raises:
        FederationError: no such file, a file without numbers, a value that is not a finite number, or lines of
            different lengths.
    """
    if not path.is_file():
        raise FederationError(f"there is no file {path}; complete the folder {path.parent}")
    rows, lines = [], []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row = [_number(text.strip(), missing, path, number, column)
                   for column, text in enumerate(line.split(separator), start=1)]
            if rows and len(row) != len(rows[0]):
                raise FederationError(
                    f"{path}, line {number}: {len(row)} columns, but the lines before have {len(rows[0])}; the line is "
                    "truncated or damaged: get the file anew"
                )
            rows.append(row)
            lines.append(number)
    if not rows:
        raise FederationError(f"{path} holds no number; get the file anew")
    return Table(torch.tensor(rows, dtype=torch.float64), tuple(lines))


def _number(text: str, missing: str | None, path: Path, line: int, column: int) -> float:
    """``text`` as a finite number, or NaN if it is the text for a missing value."""
    if text == missing:
        return math.nan
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FederationError(
            f"{path}, line {line}, column {column}: {text[:40]!r} is not a finite number; correct it or leave out the "
            "line"
        )
    return value
