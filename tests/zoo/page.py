"""Prints docs/what_works.md, with tables made from the cases: ``python -m tests.zoo.page``."""

from itertools import groupby
from pathlib import Path

from tests.zoo.case import EQUAL, Case
from tests.zoo.cases import CASES

PAGE = Path(__file__).parents[2] / "docs" / "what_works.md"
WORDS = {True: "as Lightning", False: "refused"}


def row(case: Case) -> str:
    name = case.name.replace("*args", "`*args`").replace("|", "\\|")
    note = ", in distribution" if case.noisy else ", to half precision" if case.tolerance > 1e-3 else ""
    vectorized = WORDS[case.vectorized == EQUAL] + (note if case.vectorized == EQUAL else "")
    return f"| {name} | {WORDS[case.sequential == EQUAL]} | {vectorized} |"


def page() -> str:
    """Return the page: what stands in it before the tables, and the tables."""
    parts = [PAGE.read_text().partition("## Optimizers of torch\n")[0]]
    for group, cases in groupby(CASES, key=lambda case: case.group):
        rows = "\n".join(row(case) for case in cases)
        parts.append(f"## {group}\n\n| case | sequential | vectorized |\n|---|---|---|\n{rows}\n")
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


if __name__ == "__main__":
    print(page(), end="")
