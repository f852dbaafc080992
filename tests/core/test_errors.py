"""Lists and failures in messages: a few examples and a count."""

import pytest

from lightning_fedbayes.core.errors import listed


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
