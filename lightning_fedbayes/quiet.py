"""Training without warnings and banners."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = ("lightning.pytorch", "lightning.fabric", "wandb")


@contextmanager
def quietly() -> Iterator[None]:
    """Switch warnings off and let Lightning and W&B log errors only; restore both at the end.

    When to use it: in commands that train many times.

    >>> with quietly():
    ...     warnings.warn("nobody sees this")
    """
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    silent = os.environ.get("WANDB_SILENT")
    os.environ.setdefault("WANDB_SILENT", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)
            if silent is None:
                os.environ.pop("WANDB_SILENT", None)
