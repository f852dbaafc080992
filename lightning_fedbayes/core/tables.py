"""Tables as text: Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Row = Sequence[str | float]


def texts(rows: Iterable[Row]) -> list[list[str]]:
    """Return the cells of a table as text; floats with four significant digits.

    >>> texts([["a", 0.123456, 3]])
    [['a', '0.1235', '3']]
    """
    return [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]


def markdown_table(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return a Markdown table; floats with four significant digits.

    >>> print(markdown_table(["client", "loss"], [["a", 0.123456]]))
    | client | loss |
    |---|---|
    | a | 0.1235 |
    """
    head, *lines = ["| " + " | ".join(line) + " |" for line in texts([columns, *rows])]
    return "\n".join([head, "|" + "---|" * len(columns), *lines])


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of HTML; cells are escaped by the caller.

    >>> html_table(("a",), [("1",)])
    '<table><tr><th>a</th></tr><tr><td>1</td></tr></table>'
    """
    lines = ["".join(f"<th>{each}</th>" for each in head)]
    lines += ["".join(f"<td>{each}</td>" for each in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
