"""Tables that a command writes into a page."""

from __future__ import annotations

from pathlib import Path

BEGIN, END = "<!-- begin: written by the command -->", "<!-- end -->"


def write(text: str, out: Path, here: Path) -> None:
    """Write tables between the marks of the README in ``here``, or to tables.md in another folder than its results.

    Args:
        text: Markdown.
        out: folder of the results.
        here: folder of the study.
    """
    if out == here / "results":
        include(here / "README.md", text)
    else:
        (out / "tables.md").write_text(f"{text}\n")
    print(f"\n{text}\n\nWritten to {out}")


def include(page: Path, text: str) -> None:
    """Replace what stands between the marks of a page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")
