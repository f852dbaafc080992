"""Scaling of Trainer(strategy="fedbayes"): N processes, a core each, against one process on one core.

   python benchmarks/processes/run.py [--data FASHION] [--processes 2] [--repeats 5]

LeNet on FashionMNIST (or images of its shape that are made up, without --data): 10 clients × 500 examples, batches of
64, SGD, one local epoch, weighted average. Sides are run in turn; the ratio is that of the medians of a round's
seconds, after two rounds that do not count. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.callbacks.pictures import markdown_table
from lightning_fedbayes.data.idx import read_idx
from lightning_fedbayes.modules import lenet
from lightning_fedbayes.quiet import quietly

CLIENTS, EXAMPLES, BATCH, RATE = 10, 500, 64, 0.05
WARM_UP = 2
COLUMNS = ("processes", "seconds per round", "times faster", "MB sent between processes per round", "the sums, in MB")


class Plain(L.LightningModule):
    """A user's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.network = lenet()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> STEP_OUTPUT:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.network(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Clock(L.Callback):
    """Notes when rounds begin."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.starts.append(time.perf_counter())


def clients(data: Path | None) -> fb.ClientDatasets:
    """Ten clients of 500 examples each."""
    count = CLIENTS * EXAMPLES
    if data is None:
        images, labels = torch.randn(count, 1, 28, 28), torch.randint(10, (count,))
    else:
        pixels = read_idx(data / "train-images-idx3-ubyte.gz", 3)[:count]
        images = (pixels[:, None].float() / 255 - 0.286) / 0.353
        labels = read_idx(data / "train-labels-idx1-ubyte.gz", 1)[:count].long()
    parts = zip(images.split(EXAMPLES), labels.split(EXAMPLES), strict=True)
    return fb.ClientDatasets({str(k): TensorDataset(*part) for k, part in enumerate(parts)})


def work(processes: int, rounds: int, data: Path | None, out: Path) -> None:
    """One process of a side: train, and let the first say how long rounds took."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    cores = sorted(os.sched_getaffinity(0)) if rank == 0 else [int(c) for c in os.environ["CORES"].split(",")]
    os.environ["CORES"] = ",".join(str(core) for core in cores)
    os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    federation, clock = fb.FederatedBayes(fusion="weighted_average", engine="sequential", seed=0), Clock()
    trainer = L.Trainer(
        max_epochs=rounds + WARM_UP + 1, accelerator="cpu", devices=processes,
        strategy="fedbayes" if processes > 1 else "auto", callbacks=[clock, federation], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Plain(), DataLoader(clients(data), batch_size=BATCH, shuffle=True))
    if trainer.is_global_zero:
        starts = clock.starts[WARM_UP:]
        seconds = [end - start for start, end in itertools.pairwise(starts)]
        sent = federation.history[-1].get("megabytes_between_processes", 0.0)
        out.write_text(json.dumps({"seconds": seconds, "sent": sent, "size": federation.posterior.num_parameters}))


def measure(processes: int, arguments: argparse.Namespace, out: Path) -> dict:
    """The seconds of a side's rounds."""
    command = [sys.executable, __file__, "--work", str(processes), "--rounds", str(arguments.rounds), "--out", str(out)]
    if arguments.data is not None:
        command += ["--data", str(arguments.data)]
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "CORES")}
    subprocess.run(command, check=True, env=environment)
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with FashionMNIST's gzipped files")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6, help="timed rounds of a repeat")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("outputs/processes.json"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.rounds, arguments.data, arguments.out)
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    sides = (1, arguments.processes)
    found: dict[int, list[dict]] = {side: [] for side in sides}
    for _ in range(arguments.repeats):
        for side in sides:
            found[side].append(measure(side, arguments, arguments.out))
    ratios = [
        statistics.median(one["seconds"]) / statistics.median(several["seconds"])
        for one, several in zip(found[1], found[arguments.processes], strict=True)
    ]
    rows = []
    for side in sides:
        seconds = statistics.median(statistics.median(each["seconds"]) for each in found[side])
        faster = "1" if side == 1 else f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        sums = 8 * found[side][-1]["size"] / 1e6
        rows.append((str(side), f"{seconds:.3f}", faster, f"{found[side][-1]['sent']:.2f}", f"{sums:.2f}"))
    print(markdown_table(COLUMNS, rows))
    print(
        f"\n{'FashionMNIST' if arguments.data else 'made-up images'}, {CLIENTS} clients × {EXAMPLES}, batches of "
        f"{BATCH}, seed 0; medians of {arguments.repeats} repeats of {arguments.rounds} rounds; {platform.machine()}, "
        f"{os.cpu_count()} cores, torch {torch.__version__}, lightning {L.__version__}. The sums are those of the "
        "weighted average: one number per parameter, in double precision."
    )


if __name__ == "__main__":
    with quietly():
        main()
