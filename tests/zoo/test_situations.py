"""Situations from public threads: each comes out as the tables of this folder's README say."""

import pytest

from benchmarks.situations import run
from benchmarks.situations.situation import GROUPS, SITUATIONS, verdicts


def test_the_tables_are_made_from_them():
    assert run.tables() in run.README.read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", SITUATIONS, ids=lambda case: case.name)
def test_each_is_as_declared(case):
    for package in GROUPS[case.group].packages:
        pytest.importorskip(package)
    assert not run.mistakes(case, verdicts(case))
