"""A round looks the same from outside in the short epoch loop as in Lightning's own."""

import csv
from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import lightning_fedbayes as fb
from tests.clients.test_evaluation import clients
from tests.federations import Plain, assert_equal, loader, parameters, trainer

OWN_LOOP = {"gradient_clip_val": 1e9}
"""A clip value that never bites makes the Trainer take its own steps."""


class Logging(Plain):
    """Logs per step and per epoch, and lowers its learning rate after every round."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return None if batch_idx == 5 else loss  # a step that is skipped

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Stop(L.Callback):
    """Asks for the end of the run in the middle of its second round."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.should_stop or trainer.global_step >= 15


class Seen(L.Callback):
    """Notes the arguments of a callback's hooks at every batch."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(("start", trainer.global_step, batch_idx, batch[0].sum().item()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        self.batches.append(("end", trainer.global_step, batch_idx, loss))


def run(folder, callbacks, **options):
    """Three rounds. Returns what was logged, saved, seen, counted and learnt."""
    module, seen = Logging(), Seen()
    saving = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=4, save_top_k=-1)
    federation = fb.FederatedBayes(fb.IIDPartition(3), engine="sequential")
    logging = {"logger": CSVLogger(folder, "log", 0), "log_every_n_steps": 3, "enable_checkpointing": True}
    made = trainer(3, [federation, saving, LearningRateMonitor(), seen, *callbacks], **logging, **options)
    made.fit(module, loader(), loader(shuffle=False))
    with open(folder / "log" / "version_0" / "metrics.csv") as file:
        rows = [{key: value for key, value in row.items() if "seconds" not in key} for row in csv.DictReader(file)]
    files = sorted(path.name for path in (folder / "checkpoints").iterdir())
    metrics = {key: float(value) for key, value in made.callback_metrics.items() if "seconds" not in key}
    return rows, files, metrics, seen.batches, (made.global_step, made.current_epoch), parameters(module)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("stop", "options"),
    [(False, {}), (True, {}), (True, {"min_steps": 20}), (True, {"min_epochs": 3})],
    ids=["whole rounds", "stopped", "stopped but min_steps", "stopped but min_epochs"],
)
def test_the_short_loop_is_seen_as_the_trainers_own(tmp_path, stop, options):
    *short, learnt = run(tmp_path / "short", [Stop()] if stop else [], **options)
    *own, own_learnt = run(tmp_path / "own", [Stop()] if stop else [], **options, **OWN_LOOP)
    for ours, theirs in zip(short, own, strict=True):
        assert ours == theirs
    assert_equal(learnt, own_learnt)
    assert len(short[0]) > 8
    assert len(short[1]) > 3


class Asks(Plain):
    """Notes what the Trainer estimates, and counts its own steps."""

    def configure_optimizers(self):
        self.at_first, self.inside, self.taken = self.trainer.estimated_stepping_batches, {}, {}
        return super().configure_optimizers()

    def on_client_start(self, client):
        self.client = client.name

    def training_step(self, batch, batch_idx):
        self.inside[self.client] = self.trainer.estimated_stepping_batches
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.taken[self.client] = self.taken.get(self.client, 0) + 1

    def on_validation_epoch_end(self):
        self.between = self.trainer.estimated_stepping_batches


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("epochs", [1, 2])
def test_they_are_the_steps_that_a_client_takes_in_all_rounds(accumulate, epochs):
    federation, module = fb.FederatedBayes(local_epochs=epochs, engine="sequential"), Asks()
    made = trainer(3, [federation], accumulate_grad_batches=accumulate)
    made.fit(module, loader(clients(40, 25)), loader(clients(9), shuffle=False))
    assert module.inside == module.taken
    assert module.at_first == module.between == max(module.taken.values())
    assert made.global_step == sum(module.taken.values())
    assert type(made) is L.Trainer
