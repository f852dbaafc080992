"""The validation data as what a server may score candidates with, and what was chosen by them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import lightning as L
from lightning.pytorch.trainer.call import _call_strategy_hook
from lightning.pytorch.utilities import CombinedLoader

from lightning_fedbayes.callbacks.pictures import log_table
from lightning_fedbayes.engines.federation import HELD_OUT_LOSS
from lightning_fedbayes.errors import FederationError


def check_held_out(trainer: L.Trainer) -> None:
    """Raise FederationError if there are no validation data to choose a rule with."""
    if next(held_out_batches(trainer), None) is None:
        raise FederationError(
            "fusion='auto' chooses a rule on the validation data, and there are none: give trainer.fit a validation "
            "loader (val_dataloaders=, or a datamodule with one), or name a fusion rule"
        )


def held_out_batches(trainer: L.Trainer) -> Iterator[Any]:
    """The batches of all validation loaders, one after the other, as ``validation_step`` would get them."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if not loop._data_source.is_defined():
        return
    loop.setup_data()
    loaders = loop._combined_loader
    if not isinstance(loaders, CombinedLoader):
        return
    for number, (loader, most) in enumerate(zip(loaders.flattened, loop.max_batches)):
        for batch in islice(loader, None if most == float("inf") else int(most)):
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=number)
            yield _call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=number)


def log_choices(trainer: L.Trainer, history: Sequence[Mapping[str, float]]) -> None:
    """Log which rule was chosen in each round, and what every candidate lost on the held-out data."""
    scored = [row for row in history if candidate_losses(row)]
    if not scored or not trainer.loggers:
        return
    names = sorted({name for row in scored for name in candidate_losses(row)})
    rows = []
    for row in scored:
        losses = candidate_losses(row)
        chosen = min((name for name in losses if math.isfinite(losses[name])), key=lambda name: losses[name])
        rows.append([int(row["round"]) + 1, chosen, *(losses.get(name, math.nan) for name in names)])
    log_table(trainer, "federation/chosen_rules", ["round", "chosen", *names], rows, round=trainer.current_epoch)


def candidate_losses(figures: Mapping[str, float]) -> dict[str, float]:
    """Name of a candidate → its loss, from the figures of a round."""
    return {
        name.removeprefix(HELD_OUT_LOSS): value for name, value in figures.items() if name.startswith(HELD_OUT_LOSS)
    }
