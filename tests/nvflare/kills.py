"""Power cuts of FLARE's simulator at random: of all its processes, or of the server's, which ends the clients'.

    python -m tests.nvflare.kills [--kills 6] [--seed 0]

Two clients train five rounds of sites, with states on disk and a checkpoint at the server. Runs are cut off at a random
moment by SIGKILL and started anew, over and over, and must end at the posterior and the client states of the run that
nobody cut off, bit for bit. Not collected by pytest: it takes half a minute a kill.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from tqdm import tqdm

from tests.flower.deployment import descendants
from tests.flower.kills import _plain
from tests.nvflare.simulated import Long, started

LONGEST = 300
"""Seconds after which a run hangs."""


def run(folder: Path, cut: tuple[int, float] | None = None, whole: bool = True) -> bool:
    """Run the federation; return whether it came to its end before the power was cut.

    Args:
        folder: for its files.
        cut: rounds, and seconds after those are done; None: never.
        whole: cut off the clients' processes, too.
    """
    job, begin = started(folder, Long.__name__, alone=True), time.monotonic()
    while job.poll() is None and (cut is None or rounds(folder) < cut[0]):
        if time.monotonic() - begin > LONGEST:
            raise TimeoutError(f"the run goes on after {LONGEST} s")
        time.sleep(0.1)
    if cut is not None:
        with suppress(subprocess.TimeoutExpired):
            job.wait(cut[1])
    for process in [job.pid, *descendants(job.pid)] if job.poll() is None else []:
        if whole or "simulator_worker" not in command(process):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    job.wait()
    until_idle(str(folder / "workspace"))
    return rounds(folder) == Long.rounds


def command(process: int | str) -> str:
    """Return the command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().decode()
    return ""


def until_idle(workspace: str) -> None:
    """Wait until no process works in a workspace: clients end when they find that their server has."""
    for _ in range(LONGEST):
        if not any(workspace in command(path.name) for path in Path("/proc").glob("[0-9]*")):
            return
        time.sleep(1)
    raise TimeoutError(f"clients go on {LONGEST} s after their server")


def rounds(folder: Path) -> int:
    """Return how many rounds the checkpoint has."""
    path = folder / f"{Long.seed}.pt"
    return torch.load(path, weights_only=False)["server"]["rounds"] if path.exists() else 0


def digest(folder: Path) -> str:
    """Return a digest of the posterior and the clients' states."""
    found = hashlib.sha256(repr(_plain(torch.load(folder / f"{Long.seed}.pt")["server"]["posterior"])).encode())
    for path in sorted((folder / str(Long.seed)).glob("*.pt")):
        found.update(repr(_plain(torch.load(path))).encode())
    return found.hexdigest()


def main() -> None:
    """Cut, resume and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6, help="power cuts (6)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    given = parser.parse_args()
    chance, cuts, runs, wrong, found = random.Random(given.seed), 0, 0, 0, []
    with tempfile.TemporaryDirectory() as folder, tqdm(total=given.kills, unit="kill") as bar:
        if not run(Path(folder) / "whole"):
            raise RuntimeError("the run that nobody cuts off does not come to its end")
        expected = digest(Path(folder) / "whole")
        while cuts < given.kills:
            own = Path(folder) / str(runs)
            while cuts < given.kills and rounds(own) < Long.rounds - 1:
                run(own, (chance.randint(rounds(own), Long.rounds - 1), chance.uniform(0, 3)), cuts % 2 == 0)
                found.append(rounds(own))
                cuts += 1
                bar.update()
            run(own)
            runs += 1
            wrong += digest(own) != expected
    print(f"{cuts} power cuts of {runs} runs, after rounds {found}; {wrong} end elsewhere")


if __name__ == "__main__":
    main()
