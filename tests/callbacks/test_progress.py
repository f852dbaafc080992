"""The progress bar shows the round and the client."""

from __future__ import annotations

import lightning as L
import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

import lightning_fedbayes as fb
from tests.federations import Plain, federate, loader

pytestmark = pytest.mark.slow


def descriptions(bar: L.Callback, read, engine="sequential", **settings) -> list[str]:
    class Spy(L.Callback):
        sees_stacks = True

        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_train_batch_end(self, *_) -> None:
            text = read(bar)
            if text not in self.seen:
                self.seen.append(text)

    spy = Spy()
    parts = fb.ClientDatasets({"north": loader().dataset, "south": loader().dataset})
    federation = fb.FederatedBayes(engine=engine, **settings)
    federate(Plain(), federation, 2, loader(parts), enable_progress_bar=True, callbacks=[bar, spy])
    return spy.seen


EXPECTED = [
    f"Round {round}/2, client {client} ({name})"
    for round in (1, 2)
    for client, name in (("1/2", "north"), ("2/2", "south"))
]


def test_tqdm():
    def read(bar):
        return bar.train_progress_bar.desc.removesuffix(": ")

    assert descriptions(TQDMProgressBar(), read) == EXPECTED


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 1e9}], ids=["fast loop", "Lightning's loop"])
def test_the_bar_counts_the_batches_of_the_round_and_is_given_back(options):
    class Spy(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen.append((bar.train_progress_bar.n, bar.train_progress_bar.total))

    seen, bar = [], TQDMProgressBar()
    federation = fb.FederatedBayes(fb.IIDPartition(3), engine="sequential")
    federate(Plain(), federation, 2, loader(), enable_progress_bar=True, callbacks=[bar, Spy()], **options)
    assert seen == [(12, 12)] * 2
    assert "on_train_batch_end" not in vars(bar)


def test_rich():
    pytest.importorskip("rich")

    def read(bar):
        return bar.progress.tasks[bar.train_progress_bar_id].description

    assert descriptions(RichProgressBar(), read) == EXPECTED
