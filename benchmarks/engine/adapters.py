"""Rounds of adapters of a frozen transformer: the vectorized engine, which shares what is frozen, and one by one.

    python -m benchmarks.engine.adapters [--fits 3]

Adapters W + BA of rank 4 on the queries and values of a random transformer encoder, and a head; random words, batches
of eight texts, one batch per client and round, Adam, one thread. Fits of three rounds with each engine in turn; a
round's time is the median of the CPU's time over all of an engine's rounds but the first of a fit. Width 384 with six
layers is MiniLM's shape (``all-MiniLM-L6-v2``).
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table

WORDS, HEADS, RANK, BATCH, ROUNDS = 50, 4, 4, 8, 3
CELLS = [(16, 2, 16), (64, 2, 16), (128, 2, 16), (384, 6, 8), (384, 6, 16), (384, 6, 32)]
"""Width, layers, words of a text."""


class Adapter(nn.Linear):
    """A frozen linear layer with an update of low rank."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.down, self.up = nn.Linear(width, RANK, bias=False), nn.Linear(RANK, width, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.up(self.down(input))


class Layer(nn.Module):
    """Self-attention and a network of two layers, each with a residual connection and a normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = Adapter(width), nn.Linear(width, width), Adapter(width)
        self.output, self.first, self.second = (
            nn.Linear(width, width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = [part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2)
        x = self.norms[0](x + self.output(mixed))
        return self.norms[1](x + self.second(F.gelu(self.first(x))))


class Tuned(L.LightningModule):
    """A frozen transformer with adapters and a head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.head = nn.Linear(width, 2)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("down" in name or "up" in name or "head" in name)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.words(batch[0])).mean(1)), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Clock(L.Callback):
    """Takes the time of every round on the CPU."""

    sees_stacks = True

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.times.append(-time.process_time())

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.times[-1] += time.process_time()


def compare(width: int, layers: int, length: int, clients: int, fits: int) -> list[str]:
    """Return a row of a table: operations of a step, milliseconds of a round with each engine, and their ratio."""
    module, count = Tuned(width, layers), clients * BATCH
    data = TensorDataset(torch.randint(WORDS, (count, length)), torch.arange(count) % 2)
    engines: tuple[Literal["sequential", "vectorized"], ...] = ("sequential", "vectorized")
    times: dict[str, list[float]] = {engine: [] for engine in engines}
    operations = 0
    for engine in engines * fits:
        clock, federation = Clock(), fb.FederatedBayes(fb.IIDPartition(clients), fusion="fedavg", engine=engine)
        trainer = L.Trainer(
            max_epochs=ROUNDS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[federation, clock],
        )
        trainer.fit(module, DataLoader(data, BATCH))
        times[engine] += clock.times[1:]
        probed = getattr(federation.federation.engine, "probed", None)
        operations = operations if probed is None else probed.flops
    one, other = (1e3 * statistics.median(each) for each in times.values())
    return [
        f"{width} × {layers}",
        str(length),
        str(clients),
        f"{operations / 1e6:,.0f}",
        f"{one:.0f}",
        f"{other:.0f}",
        f"{one / other:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, default=3)
    fits = parser.parse_args().fits
    torch.set_num_threads(1)
    rows = [compare(*cell, clients, fits) for cell in CELLS for clients in (4, 10)]
    print(f"torch {torch.__version__}, one thread, medians of {fits * (ROUNDS - 1)} rounds\n")
    print(
        markdown_table(
            (
                "width × layers",
                "words",
                "clients",
                "million operations per step",
                "sequential, ms/round",
                "vectorized, ms/round",
                "sequential / vectorized",
            ),
            rows,
        )
    )


if __name__ == "__main__":
    with quietly():
        main()
