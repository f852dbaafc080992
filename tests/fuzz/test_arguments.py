"""Every argument of every public callable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import EXAMPLES, many, only_own_errors
from tests.fuzz.doors import DOORS, FUNCTIONS, POOL

VALUES = st.one_of(st.sampled_from(POOL), st.sampled_from(POOL), st.floats(), st.integers(-(2**70), 12),
    st.text(max_size=8), st.lists(st.one_of(st.floats(), st.integers(-3, 9), st.text(max_size=3)), max_size=4),
    st.dictionaries(st.text(max_size=3), st.sampled_from(POOL), max_size=3), st.recursive(st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner), max_leaves=5))  # fmt: skip
ran = 0


@st.composite
def calls(draw):
    """A door with one or two arguments replaced."""
    door = draw(st.sampled_from(sorted(DOORS)))
    function, good = DOORS[door]
    names = draw(st.lists(st.sampled_from(sorted(good)), min_size=1, max_size=2, unique=True))
    bad = {name: draw(VALUES) for name in names}
    bad = {name: value for name, value in bad.items() if not (name in FUNCTIONS and callable(value))}
    return door, function, {**good, **bad}


@given(call=calls())
@many("arguments")
def bad_arguments(call):
    global ran
    ran += 1
    _, function, arguments = call
    with only_own_errors():
        function(**arguments)


@pytest.mark.slow
def test_bad_arguments_are_refused_with_errors_of_the_package():
    bad_arguments()
    assert ran >= EXAMPLES["arguments"]


def test_the_good_call_of_every_door_works():
    """Otherwise the fuzz would test one error message only."""
    for function, arguments in DOORS.values():
        function(**arguments)
