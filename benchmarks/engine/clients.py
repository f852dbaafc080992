"""Rounds of many clients: time and memory from a thousand to a million.

    python -m benchmarks.engine.clients                                        # one round of 1,000, 10,000, 100,000
    python -m benchmarks.engine.clients --million [--keeps posterior | sites]  # states on disk; killed once, resumed

Network 13-50-1, 751 parameters; every client has one example and takes one step, on the vectorized engine, with one
thread. The first study averages point masses. In the second the layers are Bayesian, and every client keeps 1,502
numbers on disk: the mean and variance that it has trained last, or its site. A tenth of the clients take part in each
of ten rounds, with a checkpoint after each. The run is made twice: once from start to end, and once killed by SIGKILL
inside a round and resumed; both must end at the same global posterior and the same states, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import lightning_fedbayes as fb
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.store import FILE
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.modules import mlp

FEATURES, HIDDEN = 13, 50
FUSIONS = {"nothing": "weighted_average", "posterior": "rklb", "sites": "sites"}
"""What clients keep → the rule."""


class Regressor(L.LightningModule):
    """Two layers under the squared error, with plain SGD."""

    def __init__(self, bayesian: bool) -> None:
        super().__init__()
        self.network = mlp(FEATURES, 1, hidden=[HIDDEN])
        if bayesian:
            self.network = fb.bayesianize(self.network, types=[nn.Linear], estimator="reparameterization")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.network(batch[0]) - batch[1]).square().mean() + 1e-3 * fb.kl_divergence(self.network)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Watch(L.Callback):
    """Prints a line for each round: seconds since the last, and the largest memory so far."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        now = time.perf_counter()
        say(round=trainer.current_epoch + 1, seconds=now - self._last, megabytes=most_megabytes())
        self._last = now


def say(**figures: float | str) -> None:
    """Print a line for the process that has started this one."""
    print(json.dumps(figures), flush=True)


def most_megabytes() -> float:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def work(options: argparse.Namespace) -> None:
    """Run a federation in this process, or go on with the one in the folder."""
    torch.set_num_threads(1)
    folder, keeps = Path(options.worker), options.keeps
    checkpoints = ModelCheckpoint(folder / "checkpoints", save_last=True, filename="round")
    kept = () if keeps == "nothing" else fb.Kept(["posterior"] if keeps == "posterior" else (), folder / "clients")
    made = fb.FederatedBayes(
        fb.IIDPartition(options.clients),
        fusion=FUSIONS[keeps],
        fraction=options.fraction,
        keep=kept,
        engine="vectorized",
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(options.clients, FEATURES, generator=generator)
    data = TensorDataset(inputs, inputs[:, :3].sum(1, keepdim=True))
    L.seed_everything(0, verbose=False)
    module, last = Regressor(keeps != "nothing"), folder / "checkpoints" / "last.ckpt"
    with quietly():
        trainer = L.Trainer(
            max_epochs=options.rounds,
            accelerator="cpu",
            logger=False,
            callbacks=[Watch(), made, checkpoints],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        resumed = str(last) if last.exists() else None
        trainer.fit(module, DataLoader(data, batch_size=1, shuffle=True), ckpt_path=resumed, weights_only=False)
    clients = folder / "clients"
    say(digest=digest_of(made, clients), checkpoint=last.stat().st_size / 1e6, disk=size_of(clients))


def digest_of(made: fb.FederatedBayes, folder: Path) -> str:
    """Return a digest of the global posterior and of every client's last state on disk."""
    digest = hashlib.sha256()
    for value in [*made.posterior.mean.values(), *made.posterior.variance.values()]:
        digest.update(value.numpy().tobytes())
    if (folder / FILE).exists():
        with sqlite3.connect(folder / FILE) as file:
            for client, _, state in file.execute("SELECT client, max(rounds), state FROM states GROUP BY client"):
                digest.update(client.to_bytes(8) + state)
    return digest.hexdigest()


def size_of(folder: Path) -> float:
    """Return the megabytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*")) / 1e6 if folder.exists() else 0.0


def started(folder: Path, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Start a process that works in a folder."""
    given = {
        "worker": folder,
        "clients": options.clients,
        "rounds": options.rounds,
        "fraction": options.fraction,
        "keeps": options.keeps,
    }
    command = [sys.executable, "-m", "benchmarks.engine.clients"]
    command += [part for name, value in given.items() for part in (f"--{name}", str(value))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)


def followed(process: subprocess.Popen[str], bar: tqdm, until: int | None = None) -> list[dict]:
    """Return the lines of a process; kill it inside the round after round ``until``."""
    found = []
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("{"):
            continue
        found.append(json.loads(line))
        bar.update("round" in found[-1])
        if until is not None and found[-1].get("round") == until:
            time.sleep(found[-1]["seconds"] / 2)
            process.send_signal(signal.SIGKILL)
    process.wait()
    if until is None and "digest" not in found[-1]:
        raise RuntimeError(f"the run has died after {found[-1]}")
    return found


def million(options: argparse.Namespace) -> str:
    """Return the table of a run, and of one that is killed once and resumed."""
    rows, digests = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, tqdm(total=2 * options.rounds, unit="round") as bar:
        for killed in (False, True):
            begun, own = time.perf_counter(), Path(folder) / str(killed)
            found = followed(started(own, options), bar, options.rounds // 2) if killed else []
            found += followed(started(own, options), bar)
            seconds, rounds = time.perf_counter() - begun, [each for each in found if "round" in each]
            most = max(each["megabytes"] for each in rounds)
            digests.append(found[-1]["digest"])
            times, last = sorted(each["seconds"] for each in rounds), found[-1]
            rows.append(
                [
                    "killed once, resumed" if killed else "from start to end",
                    f"{seconds / 60:.1f}",
                    f"{times[0]:.0f} to {times[-1]:.0f}",
                    f"{most / 1e3:.2f}",
                    f"{last['checkpoint']:.1f}",
                    f"{last['disk'] / 1e3:.1f}",
                    digests[-1][:12],
                ]
            )
            shutil.rmtree(own)
    if len(set(digests)) > 1:
        raise RuntimeError(f"the resumed run ends elsewhere: {digests}")
    head = ["run", "minutes", "s per round", "memory, GB", "checkpoint, MB", "clients on disk, GB", "SHA-256"]
    return markdown_table(head, rows)


def by_number(options: argparse.Namespace) -> str:
    """Return the table of one round of 1,000, 10,000 and 100,000 clients, the fastest of three."""
    rows = []
    options.keeps, options.fraction, options.rounds = "nothing", 1.0, 3
    numbers = (1_000, 10_000, 100_000)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, tqdm(total=3 * len(numbers), unit="round") as bar:
        for options.clients in numbers:
            found = followed(started(Path(folder) / str(options.clients), options), bar)
            best = min(each["seconds"] for each in found if "round" in each)
            rows.append(
                [
                    f"{options.clients:,}",
                    f"{best:.2f}",
                    f"{1e6 * best / options.clients:.0f}",
                    f"{max(each.get('megabytes', 0) for each in found) / 1e3:.2f}",
                ]
            )
    return markdown_table(["clients", "s per round", "µs per client", "memory, GB"], rows)


def main() -> None:
    """Run one of the studies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", action="store_true", help="a million clients on disk, killed and resumed")
    parser.add_argument("--clients", type=int, default=1_000_000, metavar="K", help="their number (1000000)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="rounds of that study (10)")
    parser.add_argument("--fraction", type=float, default=0.1, metavar="C", help="share of the clients in each (0.1)")
    parser.add_argument("--keeps", default="posterior", choices=FUSIONS, help="what a client keeps (posterior)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where states lie meanwhile (the system's)")
    parser.add_argument("--worker", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
    else:
        print(million(options) if options.million else by_number(options))


if __name__ == "__main__":
    main()
