"""Tables of numbers: reading them from text files, and standardising their columns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FederationError


class Table(NamedTuple):
    """A text file of numbers.

    Attributes:
        values: float64, shape (rows, columns); NaN where a value is missing.
        lines: number of the line of the file that each row is in, from 1.
    """

    values: Tensor
    lines: tuple[int, ...]


def read_table(path: Path, separator: str | None = None, missing: str | None = None) -> Table:
    """Read the numbers in a text file with one row per line; empty lines are skipped.

    Args:
        path: of the file.
        separator: text between two values; None: any white space.
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
            row = [
                _number(text.strip(), missing, path, number, column)
                for column, text in enumerate(line.split(separator), start=1)
            ]
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
    """Return ``text`` as a finite number, or NaN if it is the text for a missing value."""
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


class Standardisation(NamedTuple):
    r"""Mean and standard deviation of every column of the training examples, to standardise these and others.

    .. math:: z = (x - m) / s, \qquad z = 0 \text{ where } x \text{ is missing or } s = 0

    So a missing value becomes the training mean. A column that is constant in training becomes 0 everywhere, since a
    network cannot learn what another value there means.

    Attributes:
        mean: m, shape (columns,), in the units of the columns; 0 where every value is missing.
        std: s, shape (columns,), population standard deviation (divided by n), exactly 0 for a constant column.
    """

    mean: Tensor
    std: Tensor

    def apply(self, values: Tensor) -> Tensor:
        """Standardise ``values``, shape (examples, columns); NaN means missing. Returns float32."""
        scaled = (values - self.mean) / self.std
        return scaled.masked_fill(values.isnan() | (self.std == 0), 0).float()


def standardisation_of(values: Tensor) -> Standardisation:
    """Mean and standard deviation of the values that are present; clients can compute them together from sums.

    Args:
        values: float64, shape (examples, columns); NaN means missing.

    >>> import torch
    >>> scale = standardisation_of(torch.tensor([[1.0, 7.0], [3.0, 7.0], [torch.nan, 7.0]], dtype=torch.float64))
    >>> scale.mean, scale.std
    (tensor([2., 7.], dtype=torch.float64), tensor([1., 0.], dtype=torch.float64))
    """
    mean = values.nanmean(0).nan_to_num()
    std = (values - mean).square().nanmean(0).sqrt()
    # rounding gives equal values a deviation of 1e-16 times their size
    constant = values.nan_to_num(float("inf")).amin(0) >= values.nan_to_num(-float("inf")).amax(0)
    return Standardisation(mean, std.masked_fill(constant, 0))
