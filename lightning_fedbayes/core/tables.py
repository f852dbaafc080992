"""Tables as text: Markdown and HTML."""

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a cell that spreadsheets evaluate."""
Row = Sequence[str | float]
MOST_ROWS = 100
"""Most rows of a table, or of a picture, that people look at; and most clients that settings list one by one."""


def texts(rows: Iterable[Row]) -> list[list[str]]:
    """Return the cells of a table as text. Floats with four significant digits.

    >>> texts([["a", 0.123456, 3]])
    [['a', '0.1235', '3']]
    """
    return [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]


def worst_rows(rows: Sequence[Row], badness: Callable[[Row], Any]) -> list[Row]:
    """Return the rows of a table. Of more than 100 the worst, the worst first, and a last row that counts the others.

    >>> rows = worst_rows([[str(client), client / 4] for client in range(500)], badness=lambda row: row[1])
    >>> len(rows), rows[0], rows[-1]
    (100, ['499', 124.75], ['401 others, no worse', nan])
    """
    if len(rows) <= MOST_ROWS:
        return list(rows)
    worst = sorted(rows, key=badness, reverse=True)[: MOST_ROWS - 1]
    last: list[str | float] = ["" if isinstance(cell, str) else math.nan for cell in worst[0]]
    last[last.index("")] = f"{len(rows) - len(worst):,} others, no worse"
    return [*worst, last]


def sample(number: int, most: int = MOST_ROWS) -> list[int]:
    """Return at most ``most`` of the numbers below ``number``, from the first to the last, at equal distances.

    >>> sample(3), sample(100_000, 4)
    ([0, 1, 2], [0, 33333, 66666, 99999])
    """
    step = (number - 1) / max(min(number, most) - 1, 1)
    return [round(step * place) for place in range(min(number, most))]


def badness_of(value: float) -> float:
    """Return ``value`` as a key of :func:`worst_rows`: NaN is not known to be bad."""
    return -math.inf if math.isnan(value) else value


def markdown_table(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return a Markdown table. Floats with four significant digits.

    >>> print(markdown_table(["client", "loss"], [["a", 0.123456]]))
    | client | loss |
    |---|---|
    | a | 0.1235 |
    """
    head, *lines = ["| " + " | ".join(line) + " |" for line in texts([columns, *rows])]
    return "\n".join([head, "|" + "---|" * len(columns), *lines])


def write_csv(path: Path | str, rows: Iterable[Row]) -> None:
    """Write a CSV file, its head first. Text that a spreadsheet would evaluate gets an apostrophe in front."""

    def safe(cell: str | float) -> str | float:
        return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULAS) else cell

    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(map(safe, row) for row in rows)


def html_table(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return a table of HTML, its cells escaped. Floats with four significant digits.

    >>> html_table(("a",), [(1 / 3,)])
    '<table><tr><th>a</th></tr><tr><td>0.3333</td></tr></table>'
    """
    lines = ["".join(f"<th>{escape(each)}</th>" for each in columns)]
    lines += ["".join(f"<td>{escape(each)}</td>" for each in row) for row in texts(rows)]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
