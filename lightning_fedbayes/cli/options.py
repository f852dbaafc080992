"""The options of the small commands, with mistakes as errors of this package."""

from __future__ import annotations

import argparse
from typing import NoReturn

from lightning_fedbayes.errors import FedBayesError, nearest


class Options(argparse.ArgumentParser):
    """An argument parser that raises FedBayesError instead of printing its usage."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(f"fedbayes {command}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise FedBayesError(f"{message}; see {self.prog} --help")

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """The values of ``arguments``; FedBayesError names the nearest option for an unknown one."""
        values, unknown = self.parse_known_args(arguments)
        if unknown:
            self.refuse(unknown[0])
        return values

    def refuse(self, argument: str) -> NoReturn:
        """Raise FedBayesError for an ``argument`` that nobody knows, with the nearest."""
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        raise FedBayesError(f"{self.prog}: unknown argument '{argument}': {nearest(argument, known)}")
