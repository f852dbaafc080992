"""Figures that ``training_step`` logs per epoch, averaged client by client."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lightning_fedbayes.core.errors import FederationError

Sums = dict[str, tuple[Tensor | float, float]]
"""Name of a figure → its sum over examples, and the number of examples."""

Collected = tuple[dict[int, Sums], dict[str, dict[str, Any]]]
"""The sums of each client, and the options of ``self.log`` for the mean of each figure."""

SIGNATURE = inspect.signature(L.LightningModule.log)


class TrainingLog:
    """Collects ``self.log(..., on_step=False, on_epoch=True)`` of ``training_step`` and logs the means once a round.

    The mean over examples is the one that Lightning logs, but a client that is left out does not count, and a value
    costs a few microseconds instead of Lightning's 200. Lightning logs everything else.

    Args:
        module: its ``log`` is replaced between :meth:`install` and :meth:`remove`.
        in_training_step: returns True while ``training_step`` runs.

    Attributes:
        is_shared: True if other processes train some of the clients.
    """

    def __init__(self, module: L.LightningModule, in_training_step: Callable[[], bool]) -> None:
        self.module = module
        self.in_training_step = in_training_step
        self.batch: Any = None
        self.is_shared = False
        self._log = module.log
        self._sums: Sums = {}
        self._clients: dict[int, Sums] = {}
        self._options: dict[str, dict[str, Any]] = {}

    def install(self) -> None:
        """Replace the module's ``log``."""
        self.module.log = self.log  # pyright: ignore[reportAttributeAccessIssue]

    def remove(self) -> None:
        """Restore the module's ``log``."""
        self.module.__dict__.pop("log", None)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Collect a mean over the epoch; pass everything else on to :meth:`lightning.LightningModule.log`."""
        if self.in_training_step() and not args and is_epoch_mean(value, kwargs):
            weight = kwargs.get("batch_size") or extract_batch_size(self.batch)
            detached = value.detach() if isinstance(value, Tensor) else float(value)
            total, examples = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (total + detached * weight, examples + weight)
            self._remember(name, kwargs)
        else:
            if self.is_shared and self.in_training_step():
                self.check_local(name, SIGNATURE.bind(None, name, value, *args, **kwargs).arguments)
            self._log(name, value, *args, **kwargs)

    @staticmethod
    def check_local(name: str, options: Mapping[str, Any]) -> None:
        """Raise FederationError for a figure of the epoch, which each process would compute from its clients."""
        if options.get("on_epoch"):
            raise FederationError(
                f"self.log('{name}', ..., on_epoch=True) in training_step: processes train different clients, and of "
                "such figures only the mean over the round is gathered; give on_step=False, on_epoch=True, and log the "
                "value of a step under another name"
            )

    def _remember(self, name: str, options: Mapping[str, Any]) -> None:
        """Keep the options with which the mean of the round is logged."""
        self._options[name] = {key: options[key] for key in ("prog_bar", "logger") if key in options}

    def end_client(self, client: int) -> dict[str, float]:
        """Return the means of the client that has just trained; they count for the round unless it is forgotten."""
        self._clients[client], self._sums = self._sums, {}
        return {name: float(total) / examples for name, (total, examples) in self._clients[client].items()}

    def forget(self, client: int) -> None:
        """Do not count a client that is left out."""
        self._clients.pop(client, None)

    def collected(self) -> Collected:
        """Return what the clients of this process have logged in this round, ready to be sent."""
        clients: dict[int, Sums] = {
            client: {name: (float(total), examples) for name, (total, examples) in sums.items()}
            for client, sums in self._clients.items()
        }
        return clients, self._options

    def take(self, everyone: Sequence[Collected]) -> None:
        """Take what the clients of all processes have logged in place of this one's."""
        self._clients = dict(sorted((c, sums) for clients, _ in everyone for c, sums in clients.items()))
        for _, options in everyone:
            self._options = options | self._options

    @property
    def names(self) -> set[str]:
        """Names of all figures so far."""
        return set(self._options)

    def end_round(self) -> None:
        """Log the means over the round's clients; called where epoch-wise values are logged."""
        for name, options in self._options.items():
            sums = [client[name] for client in self._clients.values() if name in client]
            if sums:
                mean = sum(total for total, _ in sums) / sum(examples for _, examples in sums)
                self._log(name, mean, on_step=False, on_epoch=True, **options)
        self._sums, self._clients = {}, {}


def is_epoch_mean(value: Any, options: Mapping[str, Any]) -> bool:
    """Return True if a call of ``self.log`` asks for nothing but the mean over the epoch."""
    return (
        isinstance(value, Tensor | float | int)
        and options.get("on_step") is False
        and options.get("on_epoch") is True
        and options.get("reduce_fx", "mean") == "mean"
    )
