"""Opacus, which only this room needs: an extra of the installation, imported when it is first used."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from types import ModuleType

from lightning_fedbayes.errors import FederationError


def check_opacus() -> None:
    """Raise FederationError unless Opacus is installed."""
    if importlib.util.find_spec("opacus") is None:
        raise FederationError(
            "differential privacy needs Opacus, which is not installed: pip install lightning-fedbayes[privacy]"
        )


def import_opacus(name: str) -> ModuleType:
    """The module ``name`` of Opacus, such as "opacus.accountants".

    Raises:
        FederationError: it is not installed.
    """
    check_opacus()
    root = logging.getLogger()
    handlers = list(root.handlers)
    try:
        return importlib.import_module(name)
    finally:
        root.handlers = handlers  # the import puts one there, through which every library would speak
