"""Lists and failures in messages: a few examples and a count."""

import pytest

from lightning_fedbayes.core.errors import listed, nearest, told_failures


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (range(5), "0, 1, 2, 3, 4"),
        (range(6), "0, 1, 2 and 3 others"),
        ((str(each) for each in range(10_000)), "0, 1, 2 and 9,997 others"),
    ],
)
def test_a_list_names_all_of_few_and_some_of_many(items, text):
    assert listed(items) == text


def test_names_to_choose_from_are_all_listed_up_to_a_hundred():
    known = [f"{number:03}" for number in range(100)]
    assert nearest("x", known) == f"Known: {', '.join(known)}"
    assert nearest("0999", [*known, "999"]) == "did you mean '999'? Known: 000, 001, 002 and 98 others"


def test_failures_are_a_line_for_each_kind_of_error():
    failures = {"a": OSError("torn"), "b": ValueError("odd"), "c": OSError("gone")}
    assert told_failures(failures) == [
        "clients a, c are left out; the first: OSError: torn",
        "client b is left out: ValueError: odd",
    ]
    assert told_failures({}) == []
