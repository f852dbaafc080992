"""Scaling of Trainer(strategy="fedbayes"): N processes, a core each, against one process on one core.

   python benchmarks/processes/run.py [--data FASHION] [--processes 2] [--repeats 5]

LeNet on FashionMNIST (or images of its shape that are made up, without --data): 10 clients × 500 examples, batches of
64, SGD, one local epoch, weighted average. Sides are run in turn; the ratio is that of the medians of a round's
seconds, after two rounds that do not count. The last row is what the machine allows: N runs of one process each, which
know nothing of each other, at the same time. Prints a Markdown table.
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
COLUMNS = (
    "side", "seconds per round", "rounds per second, times as many", "MB sent between processes per round",
    "the sums, in MB",
)


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
    cores = [int(core) for core in os.environ["CORES"].split(",")]
    os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", 0))]})
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


def start(processes: int, cores: list[int], arguments: argparse.Namespace, out: Path) -> subprocess.Popen:
    """A run of ``processes`` on these cores."""
    command = [sys.executable, __file__, "--work", str(processes), "--rounds", str(arguments.rounds), "--out", str(out)]
    if arguments.data is not None:
        command += ["--data", str(arguments.data)]
    return subprocess.Popen(command, env={**os.environ, "CORES": ",".join(str(core) for core in cores)})


def measure(runs: int, processes: int, arguments: argparse.Namespace) -> dict:
    """The seconds of the rounds of ``runs`` at the same time, and what one has sent."""
    cores = sorted(os.sched_getaffinity(0))
    folder = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    outs = [folder / f"{run}.json" for run in range(runs)]
    started = [start(processes, cores[run:], arguments, out) for run, out in enumerate(outs)]
    if any(each.wait() for each in started):
        raise SystemExit("a run has failed; what stopped it stands above")
    found = [json.loads(out.read_text()) for out in outs]
    return {**found[0], "seconds": [second for each in found for second in each["seconds"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with FashionMNIST's gzipped files")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6, help="timed rounds of a repeat")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("outputs/processes"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.rounds, arguments.data, arguments.out)
        return
    count = arguments.processes
    sides = {"1 process": (1, 1), f"{count} processes": (1, count), f"{count} runs of 1, apart": (count, 1)}
    found: dict[str, list[dict]] = {side: [] for side in sides}
    for _ in range(arguments.repeats):
        for side, (runs, processes) in sides.items():
            found[side].append(measure(runs, processes, arguments))
    rows = []
    for side, (runs, _) in sides.items():
        ratios = [
            runs * statistics.median(one["seconds"]) / statistics.median(each["seconds"])
            for one, each in zip(found["1 process"], found[side], strict=True)
        ]
        seconds = statistics.median(statistics.median(each["seconds"]) for each in found[side])
        faster = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        last = found[side][-1]
        rows.append((side, f"{seconds:.3f}", faster, f"{last['sent']:.2f}", f"{8 * last['size'] / 1e6:.2f}"))
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
