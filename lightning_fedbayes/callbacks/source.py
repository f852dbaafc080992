"""Where the Trainer gets its training batches from: the user's loader, dealt out to clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L

from lightning_fedbayes.errors import FederationError


class FederatedSource:
    """Stands in for the Trainer's source of training loaders.

    It asks the user's source (loaders passed to ``fit``, a datamodule or the module's own hook) when the Trainer
    asks, so that all ``setup`` hooks have run by then.

    Args:
        source: the Trainer's own source.
        federate: turns the user's loader into the federation's.
    """

    def __init__(self, source: Any, federate: Callable[[Any], Any]) -> None:
        self.source = source
        self.federate = federate

    @property
    def instance(self) -> Any:
        """What the user gave."""
        return self.source.instance

    def dataloader(self) -> Any:
        """The federation's loader."""
        loader = self.source.dataloader()
        try:
            return self.federate(loader)
        except Exception as error:
            # Lightning calls this with DataLoader.__init__ patched, and an exception here would leave it so for good
            return _Refused(error)

    def is_defined(self) -> bool:
        """Whether there is a training loader."""
        return self.source.is_defined()

    def is_module(self) -> bool:
        """Whether the loader comes from a module's or datamodule's hook."""
        return self.source.is_module()


class _Refused:
    """A loader that raises when it is first asked for a batch."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Any:
        if isinstance(self.error, TypeError):  # which Lightning would take for its own
            raise FederationError(f"the training data cannot be dealt out to clients: {self.error}") from self.error
        raise self.error


def install_source(trainer: L.Trainer, federate: Callable[[Any], Any]) -> None:
    """Let ``trainer`` train on what ``federate`` makes of its own training loader."""
    loop: Any = trainer.fit_loop
    loop._data_source = FederatedSource(loop._data_source, federate)


def remove_source(trainer: L.Trainer) -> None:
    """Give ``trainer`` its own training source back."""
    loop: Any = trainer.fit_loop
    if isinstance(loop._data_source, FederatedSource):
        loop._data_source = loop._data_source.source


def set_round_length(trainer: L.Trainer, num_batches: int) -> None:
    """Let the epoch that begins have ``num_batches``: rounds differ when cohorts do, Lightning keeps the first's."""
    loop: Any = trainer.fit_loop
    loop.max_batches = num_batches
    loop._combined_loader.limits = [num_batches]
    trainer.val_check_batch = num_batches
