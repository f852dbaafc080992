"""The same examples in every run, and what every test gives back."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")  # new examples: pytest --hypothesis-profile default

LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")


@pytest.fixture(autouse=True)
def _loggers_speak_again() -> Iterator[None]:
    """Commands that run quietly set the level of Lightning's loggers for the rest of the process."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
