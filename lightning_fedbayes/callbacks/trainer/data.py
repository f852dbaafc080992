"""The Trainer's data: the user's training loader dealt out to clients, and validation batches for the server."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import lightning as L
from lightning.pytorch.loops.utilities import _reset_progress
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_fedbayes.clients.snapshot import ModuleState
from lightning_fedbayes.core.errors import FedBayesError, FederationError


class FederatedSource:
    """Turns the user's training loader into the federation's when the Trainer asks for it, after all ``setup``.

    Otherwise it is the user's ``source``.
    """

    def __init__(self, source: Any, federate: Callable[[Any], Any]) -> None:
        self.source, self.federate = source, federate

    def dataloader(self) -> Any:
        """Return the federation's loader."""
        loader = self.source.dataloader()
        try:
            return self.federate(loader)
        except Exception as error:
            # Lightning calls this with DataLoader.__init__ patched, and an exception here would leave it so for good
            return _Refused(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


class _Refused:
    """A loader that raises when it is first asked for a batch."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Any:
        if isinstance(self.error, TypeError):  # which Lightning would take for its own
            raise FederationError(f"the training data cannot be dealt out to clients: {self.error}") from self.error
        raise self.error


def held_out_batches(trainer: L.Trainer) -> Iterator[Any]:
    """Yield the batches of all validation loaders, one after the other, as ``validation_step`` would get them."""
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    if not loop._data_source.is_defined():
        return
    loop.setup_data()
    loaders = loop._combined_loader
    if not isinstance(loaders, CombinedLoader):
        return
    for number, (loader, most) in enumerate(zip(loaders.flattened, loop.max_batches)):
        for batch in islice(loader, None if most == float("inf") else int(most)):
            yield brought(trainer, batch, number)


def brought(trainer: L.Trainer, batch: Any, number: int = 0) -> Any:
    """Return a batch of loader ``number`` as a step of the module would get it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=number)
    return trainer.strategy.batch_to_device(batch, trainer.strategy.root_device, dataloader_idx=number)


def validate_batch(trainer: Any, module: L.LightningModule, callbacks: list[Any]) -> None:
    """Validate a batch as a sanity check does, for ``callbacks`` only, without a trace. Raise their FedBayesError."""
    before, stage = ModuleState(module, module.named_buffers()), trainer.state.stage
    options = trainer.callbacks, trainer.num_sanity_val_steps
    trainer.callbacks, trainer.num_sanity_val_steps = callbacks, 1
    try:
        with isolate_rng():
            trainer._run_sanity_check()
    except FedBayesError:
        raise
    except Exception:  # whatever the user's code needs
        _reset_progress(trainer.fit_loop.epoch_loop.val_loop)
        trainer._logger_connector.reset_results()
        trainer._logger_connector.reset_metrics()
    finally:
        (trainer.callbacks, trainer.num_sanity_val_steps), trainer.state.stage = options, stage
        before.restore()
