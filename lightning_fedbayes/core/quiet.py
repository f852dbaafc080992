"""Training without warnings and banners."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = ("lightning.pytorch", "lightning.fabric", "wandb")


@contextmanager
def without_banners(level: int = logging.WARNING) -> Iterator[None]:
    """Let Lightning and W&B log nothing below ``level`` inside.

    When to use it: around a Trainer that is one of many and would introduce itself each time.
    """
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels):
            logger.setLevel(before)


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables inside. Restore them at the end.

    >>> with environment(WANDB_NAME="inside"):
    ...     os.environ["WANDB_NAME"]
    'inside'
    """
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update(before)


@contextmanager
def quietly() -> Iterator[None]:
    """Switch warnings off and let Lightning and W&B log errors only. Restore both at the end.

    When to use it: in commands that train many times.

    >>> with quietly():
    ...     warnings.warn("not shown")
    """
    silent = os.environ.get("WANDB_SILENT", "true")
    with warnings.catch_warnings(), without_banners(logging.ERROR), environment(WANDB_SILENT=silent):
        warnings.simplefilter("ignore")
        yield
