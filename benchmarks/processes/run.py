"""Scaling of Trainer(strategy="fedbayes"): N processes, a core each, against one process on one core.

   python -m benchmarks.processes.run [--data FASHION] [--processes 2] [--repeats 5]

LeNet on FashionMNIST (or images of its shape that are made up, without --data): 10 clients × 500 examples, batches of
64, SGD, one local epoch, weighted average. A repeat runs all sides in turn: one process on each of the cores, one after
the other, since cores of a virtual machine differ, and the mean over the cores counts; N processes, a core each; and N
independent runs of one process each, at the same time. Seconds of a round are medians, after two
rounds on the core that do not count. What waiting for the slowest process alone would allow is the longest that any
process of a round trains. The first N of the cores that it may use are taken. Prints a Markdown table.
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
from benchmarks.networks import lenet
from benchmarks.readers import read_idx
from lightning_fedbayes.callbacks.trainer import collective_of
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table

CLIENTS, EXAMPLES, BATCH, RATE = 10, 500, 64, 0.05
WARM_UP = 2
COLUMNS = (
    "side",
    "seconds per round",
    "rounds per second, times as many",
    "collectives per round",
    "MB that a process sends",
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
    """Record of the start of every round, of the training time of this process in it, and of the collectives so far.

    Args:
        cores: which the process takes in turn.
        lap: for how many rounds it stays on one.
    """

    def __init__(self, cores: list[int], lap: int) -> None:
        self.cores, self.lap = cores, lap
        self.starts: list[float] = []
        self.trained: list[float] = []
        self.collectives: list[int] = []
        self._last = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        now = time.perf_counter()
        if self.starts:
            self.trained.append(self._last - self.starts[-1])
        os.sched_setaffinity(0, {self.cores[len(self.starts) // self.lap % len(self.cores)]})
        self.starts.append(now)
        self.collectives.append(collective_of(trainer).calls)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        self._last = time.perf_counter()


def clients(data: Path | None) -> fb.ClientDatasets:
    """Ten clients of 500 examples each."""
    count = CLIENTS * EXAMPLES
    if data is None:
        images, labels = torch.randn(count, 1, 28, 28), torch.randint(10, (count,))
    else:
        pixels = read_idx(data / "train-images-idx3-ubyte.gz")[:count]
        images = (pixels[:, None].float() / 255 - 0.286) / 0.353
        labels = read_idx(data / "train-labels-idx1-ubyte.gz")[:count].long()
    parts = zip(images.split(EXAMPLES), labels.split(EXAMPLES), strict=True)
    return fb.ClientDatasets({str(k): TensorDataset(*part) for k, part in enumerate(parts)})


def work(processes: int, rounds: int, data: Path | None, out: Path) -> None:
    """Train as one process of a run, and write the seconds of every round and of the training in it.

    A single process takes the cores of its run in turn, several have one each.
    """
    rank = int(os.environ.get("LOCAL_RANK", 0))
    cores = [int(core) for core in os.environ["CORES"].split(",")]
    cores = cores[rank : rank + 1] if processes > 1 else cores
    lap = WARM_UP + rounds
    os.sched_setaffinity(0, {cores[0]})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    federation, clock = fb.FederatedBayes(fusion="weighted_average", engine="sequential", seed=0), Clock(cores, lap)
    trainer = L.Trainer(
        max_epochs=len(cores) * lap + 1,
        accelerator="cpu",
        devices=processes,
        strategy="fedbayes" if processes > 1 else "auto",
        callbacks=[clock, federation],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Plain(), DataLoader(clients(data), batch_size=BATCH, shuffle=True))
    seconds = [end - start for start, end in itertools.pairwise(clock.starts)]
    laps = [seconds[turn * lap :][WARM_UP:lap] for turn in range(len(cores))]
    (out / f"{rank}.json").write_text(
        json.dumps(
            {
                "seconds": statistics.mean(statistics.median(each) for each in laps),
                "trained": clock.trained[WARM_UP:lap],
                "collectives": (clock.collectives[-1] - clock.collectives[WARM_UP]) / rounds,
                "sent": federation.history[-1].get("megabytes_between_processes", 0.0),
                "size": federation.posterior.num_parameters,
            }
        )
    )


def start(processes: int, cores: list[int], arguments: argparse.Namespace, out: Path) -> subprocess.Popen:
    """Start a run of ``processes`` processes on these ``cores``."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.processes.run", "--work", str(processes), "--out", str(out)]
    command += ["--rounds", str(arguments.rounds)]
    command += ["--data", str(arguments.data)] if arguments.data is not None else []
    return subprocess.Popen(command, env={**os.environ, "CORES": ",".join(str(core) for core in cores)})


def measure(processes: int, runs: list[list[int]], arguments: argparse.Namespace) -> list[list[dict]]:
    """Start a run on each list of cores in ``runs``, all at the same time; return what their ``processes`` wrote."""
    outs = [arguments.out / str(number) for number in range(len(runs))]
    started = [start(processes, cores, arguments, out) for cores, out in zip(runs, outs, strict=True)]
    ended = [each.wait() for each in started]
    if any(ended):
        raise SystemExit("a run has failed; what stopped it stands above")
    return [[json.loads((out / f"{rank}.json").read_text()) for rank in range(processes)] for out in outs]


def repeat(cores: list[int], arguments: argparse.Namespace) -> dict[str, float]:
    """Run all sides; return seconds per round of each, training of the slowest process, collectives and traffic."""
    count = len(cores)
    [[alone]] = measure(1, [cores], arguments)
    [together] = measure(count, [cores], arguments)
    apart = measure(1, [[core] for core in cores], arguments)
    slowest = [max(each) for each in zip(*(process["trained"] for process in together), strict=True)]
    return {
        "alone": alone["seconds"],
        "together": together[0]["seconds"],
        "slowest": statistics.median(slowest),
        "apart": statistics.mean(process["seconds"] for [process] in apart) / count,
        "collectives": together[0]["collectives"],
        "sent": together[0]["sent"],
        "sums": 8 * together[0]["size"] / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with FashionMNIST's gzipped files")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of a repeat")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("outputs/processes"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.rounds, arguments.data, arguments.out)
        return
    count, cores = arguments.processes, sorted(os.sched_getaffinity(0))
    if count > len(cores):
        raise SystemExit(f"--processes {count} needs as many cores, and this process may use {len(cores)}; give fewer")
    found = [repeat(cores[:count], arguments) for _ in range(arguments.repeats)]
    told = f"{found[-1]['collectives']:.0f}", f"{found[-1]['sent']:.2f}"
    sides = (
        ("1 process, the cores in turn", "alone", ("0", "0.00")),
        (f"{count} processes", "together", told),
        (f"{count} processes, waiting for the slowest alone", "slowest", ("", "")),
        (f"{count} runs of 1, apart", "apart", ("0", "0.00")),
    )
    rows = []
    for side, key, said in sides:
        ratios = [each["alone"] / each[key] for each in found]
        faster = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((side, f"{statistics.median(each[key] for each in found):.3f}", faster, *said))
    print(markdown_table(COLUMNS, rows))
    print(
        f"\n{'FashionMNIST' if arguments.data else 'made-up images'}, {CLIENTS} clients × {EXAMPLES}, batches of "
        f"{BATCH}, seed 0; medians of {arguments.repeats} repeats of {arguments.rounds} rounds, least and largest in "
        f"brackets; {platform.machine()}, cores {cores[:count]} of {os.cpu_count()}, torch {torch.__version__}, "
        f"lightning {L.__version__}. The sums of the weighted average, one number per parameter in double precision, "
        f"are {found[-1]['sums']:.2f} MB."
    )


if __name__ == "__main__":
    with quietly():
        main()
