"""Runs that are interrupted, resumed, or go on."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_fedbayes as fb
from benchmarks.situations.situation import NEVER, Group, Learnt, loop_of_plain_fits
from lightning_fedbayes.core.errors import FederationError
from tests import federations
from tests.zoo.case import SIZES, Case, Net, Positions, difference, federated, fit, loader, parts, values

asked = Group("Runs that go on")
LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


def made(case: Case, engine: str) -> fb.FederatedBayes:
    options = {"fusion": "weighted_average", **case.federation}
    return fb.FederatedBayes(engine=engine, **options)  # pyright: ignore[reportArgumentType]


def resumed(case: Case, engine: str, sizes: Sequence[int] = SIZES) -> Learnt:
    """Train all rounds but the last, and the last from a checkpoint with objects made anew."""
    data = fb.ClientDatasets(parts(case, sizes))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saves = replace(
            case,
            trainer={**case.trainer, "enable_checkpointing": True},
            callbacks=lambda: [*case.callbacks(), ModelCheckpoint(folder, save_last=True)],
        )
        fit(saves, case.module(), data, [made(case, engine)], case.rounds - 1)
        module, federation = case.module(), made(case, engine)
        trainer = federations.trainer(case.rounds, [*case.callbacks(), federation], num_sanity_val_steps=0)
        trainer.fit(module, loader(case, data), ckpt_path=f"{folder}/last.ckpt")
    return values(module), federation


def twice(case: Case, engine: str, sizes: Sequence[int] = SIZES) -> Learnt:
    """Train all rounds but the last, raise max_epochs, and call fit again."""
    data, module, federation = fb.ClientDatasets(parts(case, sizes)), case.module(), made(case, engine)
    trainer = fit(case, module, data, [federation], case.rounds - 1)
    trainer.fit_loop.max_epochs = case.rounds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader(case, data))
    return values(module), federation


def plain_twice(case: Case) -> dict[str, torch.Tensor]:
    """Do by plain Lightning what :func:`twice` does."""
    ((_, data),), module = parts(case, (sum(SIZES),)).items(), case.module()
    trainer = fit(case, module, data, [Positions(case, 0, 0)], case.rounds - 1)
    trainer.fit_loop.max_epochs = case.rounds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader(case, data))
    return values(module)


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@asked(
    "resumed from a checkpoint",
    f"{LIGHTNING}/issues/18098",
    "kill a run, start it again with ckpt_path, and compare with a run that was not killed",
    federate=resumed,
    rounds=3,
    tolerance=1e-4,
)
def adaptive():
    return Scheduled(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05))


asked(
    "fit is called twice",
    f"{LIGHTNING}/issues/5007",
    "raise max_epochs and go on with the same Trainer, which makes new optimizers and schedules",
    federate=twice,
    plain=plain_twice,
    loop=lambda case: loop_of_plain_fits(case, again=2),
    rounds=3,
)(Scheduled)


class StopsInside(L.Callback):
    """Ends the training inside of the second epoch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1 and trainer.current_epoch == 1:
            trainer.should_stop = True


class Lines(logging.Handler):
    """Keeps the lines of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def cut_short(case: Case, engine: str, sizes: Sequence[int] = SIZES) -> Learnt:
    """Train, and raise FederationError with the line that says what was dropped."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    handler, level = Lines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        learnt, federation = federated(case, engine, sizes)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    said = [line for line in handler.lines if "was cut short" in line]
    if (
        said
        and difference(learnt, federated(replace(case, rounds=1, callbacks=list), engine, sizes)[0]) <= case.tolerance
    ):
        raise FederationError(said[0])
    return learnt, federation


asked(
    "trainer.should_stop inside of an epoch",
    f"{LIGHTNING}/issues/1406",
    "stop at any point by a callback",
    callbacks=lambda: [StopsInside()],
    federate=cut_short,
    why="Round 2 was cut short; the module holds the global posterior that it started from",
    **NEVER,
)(Net)
