"""Tests of calls that are refused."""

from collections.abc import Callable
from typing import Any

import pytest


def refusals(error: type[Exception], *rows: Any, call: Callable[..., Any] = lambda make: make()) -> Any:
    """Return a test that ``call`` refuses all rows but for their last entries, each of which is what the error says."""

    @pytest.mark.parametrize("row", rows)
    def test(row: tuple) -> None:
        *arguments, says = row
        with pytest.raises(error, match=says):
            call(*arguments)

    return test
