"""Prints CASES.md, with the table made from the cases: ``python -m tests.zoo.page``."""

from itertools import groupby
from pathlib import Path

from tests.zoo.case import EQUAL, Case
from tests.zoo.cases import CASES

PAGE = Path(__file__).parent / "CASES.md"
HEAD = "| | by both engines | one after another; refused as a stack | refused |\n|---|---|---|---|\n"


def shown(case: Case) -> str:
    note = " (in distribution)" if case.noisy else " (to half precision)" if case.tolerance > 1e-3 else ""
    return case.name.replace("*args", "`*args`").replace("|", "\\|") + note * (case.vectorized == EQUAL)


def page() -> str:
    """Return the page: what stands in it before the table, and the table."""
    text = PAGE.read_text().partition(HEAD)[0] + HEAD
    for group, cases in groupby(CASES, key=lambda case: case.group):
        columns = {column: [] for column in ((True, True), (True, False), (False, False))}
        for case in cases:
            columns[case.sequential == EQUAL, case.vectorized == EQUAL].append(shown(case))
        text += f"| {group} | {' | '.join(map('; '.join, columns.values()))} |\n"
    return text


if __name__ == "__main__":
    print(page(), end="")
