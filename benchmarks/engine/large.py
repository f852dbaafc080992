"""CPU time of rounds of large networks over that of plain Lightning for the same steps.

    python -m benchmarks.engine.large [--repeats 3] [--steps 10] [--only U-Net]

Two clients take so many steps each in every one of three rounds. Plain Lightning takes as many steps in as many epochs,
on the same data with the same optimizer. All sides take turns in one process, of one thread. A figure is the median
over the repeats of the ratio of CPU times, from the start of training to its end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table

CLIENTS, ROUNDS, BATCH = 2, 3, 4
PLAIN, AVERAGES, SITES, IVON, LAYERS = "plain", "FedAvg", "sites, point network", "IVON + sites", "layers + sites"


class UNet(nn.Module):
    """U-Net for masks of one class, of five levels."""

    def __init__(self, width: int = 43) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(5)]
        self.down = nn.ModuleList(block(*each) for each in zip([3, *sizes[:-1]], sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in reversed(sizes[:-1]))
        self.join = nn.ModuleList(block(2 * size, size) for size in reversed(sizes[:-1]))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a logit for each pixel."""
        skipped = []
        for i, layer in enumerate(self.down):
            x = layer(x if i == 0 else nn.functional.max_pool2d(x, 2))
            skipped.append(x)
        for up, join, skip in zip(self.up, self.join, reversed(skipped[:-1])):
            x = join(torch.cat([up(x), skip], 1))
        return self.head(x).flatten(1)


def block(inputs: int, outputs: int) -> nn.Module:
    """Return two convolutions."""
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers)


class ViT(nn.Module):
    """The tiny vision transformer: 192 wide, twelve layers, patches of 16 × 16; 5.5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 16, 16)
        layer = nn.TransformerEncoderLayer(192, 3, 768, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.encoder(self.patches(x).flatten(2).mT).mean(1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "U-Net": (UNet, (3, 64, 64)),
    "ViT-tiny": (ViT, (3, 96, 96)),
}


class Module(L.LightningModule):
    """A network under a likelihood of its output, and the clock."""

    def __init__(self, name: str, side: str) -> None:
        super().__init__()
        network = NETWORKS[name][0]()
        self.network, self.side = fb.bayesianize(network, last=1) if side == LAYERS else network, side

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        outputs = self.network(batch[0])
        if outputs.shape == batch[1].shape:
            return nn.functional.binary_cross_entropy_with_logits(outputs, batch[1])
        return nn.functional.cross_entropy(outputs, batch[1].argmax(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.side == IVON:
            return fb.IVON(self.parameters(), lr=0.01)
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def on_train_start(self) -> None:
        self.begun = time.process_time()

    def on_train_end(self) -> None:
        self.seconds = time.process_time() - self.begun


def seconds(name: str, side: str, steps: int) -> float:
    """Return the CPU time of all rounds."""
    L.seed_everything(0, verbose=False)
    module = Module(name, side)
    examples = CLIENTS * steps * BATCH
    x = torch.randn(examples, *NETWORKS[name][1])
    outputs = module.network(x[:1]).shape[1]
    y = torch.randint(2, (examples, outputs)).float()
    rules: dict[str, Any] = {AVERAGES: "fedavg", SITES: "sites", IVON: "sites", LAYERS: "sites"}
    federation: list[L.Callback] = (
        [fb.FederatedBayes(fb.IIDPartition(CLIENTS), fusion=rules[side])] if side in rules else []
    )
    trainer = L.Trainer(
        max_epochs=ROUNDS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=federation,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, y), BATCH, shuffle=True))
    return module.seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of a client in a round")
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    sides = (PLAIN, AVERAGES, SITES, IVON, LAYERS)
    rows = []
    for name in options.only:
        times = [{side: seconds(name, side, options.steps) for side in sides} for _ in range(options.repeats)]
        ratios = (statistics.median(each[side] / each[PLAIN] for each in times) for side in sides[1:])
        count = sum(each.numel() for each in NETWORKS[name][0]().parameters())
        plain = statistics.median(each[PLAIN] for each in times) / (CLIENTS * ROUNDS * options.steps)
        rows.append([name, f"{count / 1e6:.1f}", f"{1e3 * plain:.0f}", *(f"{ratio:.2f}" for ratio in ratios)])
    print(f"torch {torch.__version__}, one thread, {options.steps} steps a round, medians of {options.repeats}\n")
    print(markdown_table(["network", "M parameters", "plain, ms a step", *sides[1:]], rows))


if __name__ == "__main__":
    with quietly():
        main()
