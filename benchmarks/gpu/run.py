"""One GPU: tests, rounds of stacked clients, fusion of large posteriors, cells of BA-BFL, in the order of their worth.

    python -m benchmarks.gpu.run [--minutes 25] [--data DIR] [--out FOLDER]
    python -m benchmarks.gpu.run --device cpu --scale 0.1        # a rehearsal without a GPU, at a tenth of its size

Every finished cell is a line of cells.jsonl in the folder, with the card and the date. A command that is cut off, or
that has used up its minutes, goes on there. It prints the tables.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from benchmarks import cells as study
from benchmarks.networks import lenet, resnet20
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.modules import mlp

BATCH, BATCHES, ROUNDS = 32, 4, 4
"""Examples of a batch, batches of a client, and timed rounds, of which the first warms up."""
SIZES = (10, 100, 1000)
FUSED = (100, 10_000_000)
"""Clients and parameters of the fusion."""
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "dense 784-64-10": (lambda: mlp(784, 10, [64]), (784,), False),
    "dense, mean-field": (lambda: mlp(784, 10, [64]), (784,), True),
    "LeNet": (lenet, (1, 28, 28), False),
    "ResNet-20, Flipout": (resnet20, (3, 32, 32), True),
}
LOOP, SEQUENTIAL, STACKED = "plain loop", "one after another", "stacked"
SIDES = (LOOP, SEQUENTIAL, STACKED, f"{STACKED}, bf16", f"{STACKED}, compiled")
RULES = ("weighted_average", "reverse_kl_barycenter", "conflation", "geometric_median")


class Cell(NamedTuple):
    """A measurement: what, of which network or rule, clients, by which side."""

    what: str
    name: str
    clients: int
    side: str


class Module(L.LightningModule):
    """A network, its cross-entropy and its divergence."""

    def __init__(self, name: str) -> None:
        super().__init__()
        make, _, bayesian = NETWORKS[name]
        network = make()
        self.network = (
            fb.bayesianize(network, types=[nn.Conv2d, nn.Linear], estimator="flipout") if bayesian else network
        )
        self.bayesian = bayesian

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        return loss + fb.kl_divergence(self.network) / (BATCH * BATCHES) if self.bayesian else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(L.Callback):
    """Takes the time of every round."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, list[float]()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.times.append(time.perf_counter())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        wait(self.device)
        self.times.append(time.perf_counter())


def wait(device: torch.device) -> None:
    """Wait for what the device has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def memory(device: torch.device) -> float:
    """Return the peak memory of the device since it was reset, MiB. 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0


def rounds(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Return the median seconds of a round, and the peak memory."""
    torch.manual_seed(0)
    shape = NETWORKS[cell.name][1]
    x, y = torch.randn(cell.clients * BATCH * BATCHES, *shape), torch.randint(10, (cell.clients * BATCH * BATCHES,))
    module = Module(cell.name)
    if cell.side == LOOP:
        times = looped(module.to(device), x.to(device), y.to(device), cell.clients, device)
    else:
        if cell.side.endswith("compiled"):
            module.network = torch.compile(module.network)  # pyright: ignore[reportAttributeAccessIssue]
        clock, engine = Clock(device), "sequential" if cell.side == SEQUENTIAL else "vectorized"
        rule = "reverse_kl_barycenter" if module.bayesian else "weighted_average"
        trainer = L.Trainer(
            max_epochs=ROUNDS,
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if cell.side.endswith("bf16") else "32-true",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[fb.FederatedBayes(fb.IIDPartition(cell.clients), fusion=rule, engine=engine), clock],
        )
        trainer.fit(module, DataLoader(TensorDataset(x, y), BATCH, shuffle=True))
        times = [after - before for before, after in itertools.pairwise(clock.times)]
    return {"seconds": statistics.median(times[1:]), "mib": memory(device)}


def looped(module: Module, x: Tensor, y: Tensor, clients: int, device: torch.device) -> list[float]:
    """Return the times of rounds that are written by hand: one network, a new SGD per client, batches sliced."""
    start = {name: value.detach().clone() for name, value in module.named_parameters()}
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        sums = {name: torch.zeros_like(value) for name, value in start.items()}
        for part in torch.arange(len(y), device=device).chunk(clients):
            with torch.no_grad():
                for name, value in module.named_parameters():
                    value.copy_(start[name])
            optimizer = module.configure_optimizers()
            for rows in part.split(BATCH):
                optimizer.zero_grad()
                module.training_step((x[rows], y[rows]), 0).backward()
                optimizer.step()
            with torch.no_grad():
                for name, value in module.named_parameters():
                    sums[name].add_(value, alpha=1 / clients)
        start = sums
        wait(device)
        times.append(time.perf_counter() - begun)
    return times


def fusion(cell: Cell, device: torch.device, parameters: int) -> dict[str, Any]:
    """Return the seconds of a server's round with updates that are made on the device one by one."""
    size = {"w": (parameters,)}
    draws = torch.Generator(device).manual_seed(0)

    def made() -> fb.GaussianPosterior:
        mean = {name: torch.randn(shape, device=device, generator=draws) for name, shape in size.items()}
        return fb.GaussianPosterior(mean, {name: torch.full_like(value, 0.01) for name, value in mean.items()})

    server, one = fb.Server(made(), fusion=cell.name), made()
    server.begin(fb.RoundPlan(0, tuple(range(cell.clients))))
    wait(device)
    begun = time.perf_counter()
    for client in range(cell.clients):
        server.admit(fb.ClientUpdate(client, 10, one))
    server.finish()
    wait(device)
    return {"seconds": time.perf_counter() - begun, "mib": memory(device), "parameters": parameters}


def tests(_: Cell) -> dict[str, Any]:
    """Run the tests that need a GPU; without one they are skipped."""
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/test_gpu.py"], capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1:] or [done.stderr[-200:]]
    return {"returned": done.returncode, "said": last[0], "seconds": time.perf_counter() - begun}


def images(_: Cell, data: Path, out: Path, budget: str) -> dict[str, Any]:
    """Train the cells of BA-BFL on CIFAR-10 that are missing, each of which is stored at once."""
    begun = time.perf_counter()
    name = [sys.executable, "-m", "benchmarks.images.run", "benchmarks/images/configs/fusion.yaml", "--data", str(data)]
    more = ["--only", "dataset=cifar10", "--budget", budget, "--out", str(out / "images")]
    done = subprocess.run([*name, *more], capture_output=True, text=True)
    return {"returned": done.returncode, "seconds": time.perf_counter() - begun}


def cells_of(scale: float) -> list[Cell]:
    """Return all cells, the most useful first."""
    found = [Cell("tests", "tests/test_gpu.py", 0, "")]
    sizes = [max(2, round(scale * size)) for size in SIZES]
    # 1,000 clients one after another, or a stack of 1,000 deep networks, would take the time of all else
    for clients, (name, side) in itertools.product(sizes, itertools.product(NETWORKS, SIDES)):
        if clients < sizes[2] or (side.startswith(STACKED) and name != "ResNet-20, Flipout"):
            found.append(Cell("round", name, clients, side))
    found += [Cell("fusion", rule, max(2, round(scale * FUSED[0])), "") for rule in RULES]
    return [*found, Cell("images", "BA-BFL, CIFAR-10", 10, "")]


def measure(cell: Cell, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Return a cell's figures, or the error that it met."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        if cell.what == "tests":
            found = tests(cell)
        elif cell.what == "round":
            found = rounds(cell, device)
        elif cell.what == "fusion":
            found = fusion(cell, device, round(options.scale * FUSED[1]))
        elif options.data is None:
            return {"skipped": "no --data"}
        else:
            found = images(cell, options.data, options.out, "short_rounds" if options.scale >= 1 else "tiny")
    except (RuntimeError, fb.FedBayesError, torch.OutOfMemoryError) as error:
        found = {"error": f"{type(error).__name__}: {str(error)[:150]}"}
    card = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return {**found, "card": card, "date": str(datetime.date.today()), "torch": torch.__version__}


def tables(done: dict[Cell, dict[str, Any]]) -> str:
    """Return Markdown tables of all finished cells."""

    def shown(cell: Cell) -> str:
        found = done.get(cell, {})
        seconds = f"{found['seconds']:.3g}" if "seconds" in found else found.get("error", "")[:30]
        return f"{seconds}, {found['mib']:.0f} MiB" if found.get("mib") else seconds

    sizes = sorted({cell.clients for cell in done if cell.what == "round"})
    rows = []
    for name, clients in itertools.product(NETWORKS, sizes):
        cells = [Cell("round", name, clients, side) for side in SIDES]
        if any(cell in done for cell in cells):
            rows.append([name, str(clients), *map(shown, cells)])
    text = [markdown_table(["seconds of a round", "clients", *SIDES], rows)]
    other = [
        [c.what, c.name, str(c.clients), shown(c), r.get("said", "")] for c, r in done.items() if c.what != "round"
    ]
    where = sorted({f"{r['card']}, torch {r['torch']}, {r['date']}" for r in done.values() if "card" in r})
    return "\n\n".join([*text, markdown_table(["", "", "clients", "seconds", ""], other), "; ".join(where)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="no cell begins after them")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="of clients and parameters, for a rehearsal")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with the folder cifar10")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"), metavar="FOLDER")
    options = parser.parse_args()
    device, begun, file = torch.device(options.device), time.monotonic(), options.out / "cells.jsonl"
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU: give --device cpu --scale 0.1 for a rehearsal")
    cells, done = cells_of(options.scale), study.read(file, Cell)
    for cell in cells:
        if cell not in done and time.monotonic() - begun < 60 * options.minutes:
            print(*cell, flush=True)
            study.keep(file, cell, measure(cell, device, options))
    print(tables(study.in_order(study.read(file, Cell), cells)))


if __name__ == "__main__":
    with quietly():
        main()
