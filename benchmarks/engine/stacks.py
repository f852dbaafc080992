"""Rounds of the vectorized engine against the sequential one: recurrent layers, and metrics in ``training_step``.

    python -m benchmarks.engine.stacks [--rounds 7]

Random sequences of 32 features and five classes, ten batches of 16 per client, Adam, one local epoch, one thread. Both
engines fit in turn in one process; a round's time is the median over the rounds but the first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import lightning_fedbayes as fb
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table

FEATURES, CLASSES, BATCH, BATCHES = 32, 5, 16, 10


class Sequences(L.LightningModule):
    """One recurrent layer, and a linear one on its last output."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(FEATURES, hidden, batch_first=True), nn.Linear(hidden, CLASSES)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layer(batch[0])[0][:, -1]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Measured(L.LightningModule):
    """A small network on the first vector of the sequence, with a metric that is called or updated."""

    def __init__(self, metric: Any, *, update: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        self.metric, self.update = metric, update

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0][:, 0])
        if self.metric is not None:
            (self.metric.update if self.update else self.metric)(logits, batch[1])
            if isinstance(self.metric, MetricCollection):
                self.log_dict(self.metric, on_step=False, on_epoch=True)
            else:
                self.log("metric", self.metric, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(logits, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    """Takes the time of every round."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.times.append(-time.perf_counter())

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.times[-1] += time.perf_counter()


def compare(name: str, make: Any, clients: int, times: int, rounds: int) -> list[str]:
    """Return a row of a table: milliseconds of a round with each engine, and their ratio."""
    count = clients * BATCH * BATCHES
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(count, times, FEATURES), torch.randint(CLASSES, (count,)))
    medians: list[float] = []
    for engine in ("sequential", "vectorized"):
        clock = Clock()
        trainer = L.Trainer(
            max_epochs=rounds,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                fb.FederatedBayes(fb.IIDPartition(clients), fusion="reverse_kl_barycenter", engine=engine),
                clock,
            ],
        )
        trainer.fit(make(), DataLoader(data, BATCH, shuffle=True))
        medians.append(1e3 * statistics.median(clock.times[1:]))
    return [name, str(clients), *(f"{each:.0f}" for each in medians), f"{medians[0] / medians[1]:.2f}"]


def metrics() -> MetricCollection:
    return MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    columns = ("clients", "sequential, ms/round", "vectorized, ms/round", "sequential / vectorized")
    cells = [
        (hidden, times, clients)
        for hidden, times in ((8, 20), (8, 80), (32, 20), (128, 20), (128, 80), (256, 20))
        for clients in (2, 5, 10, 20)
        if clients == 10 or hidden < 128
    ]
    rows = [
        compare(
            f"GRU, hidden {hidden}, {times} steps in time",
            lambda h=hidden: Sequences(h),
            clients,
            times,
            rounds,
        )
        for hidden, times, clients in cells
    ]
    print(f"torch {torch.__version__}, one thread, medians of {rounds - 1} rounds\n")
    print(markdown_table(("layer", *columns), rows))
    kinds = [
        ("none", lambda: None, False),
        ("accuracy, called", lambda: MulticlassAccuracy(CLASSES), False),
        ("accuracy, updated", lambda: MulticlassAccuracy(CLASSES), True),
        ("two in a collection, called", metrics, False),
        ("two in a collection, updated", metrics, True),
    ]
    rows = [
        compare(name, lambda m=make, u=update: Measured(m(), update=u), 10, 1, rounds) for name, make, update in kinds
    ]
    print("\n" + markdown_table(("metric", *columns), rows))


if __name__ == "__main__":
    with quietly():
        main()
