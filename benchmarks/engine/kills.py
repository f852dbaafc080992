"""Power cuts of Flower's or FLARE's processes: begun anew, a federation ends at the same bits.

    python -m benchmarks.engine.kills flower|nvflare [--kills 6] [--seed 0]

Two clients train five rounds. Runs are cut off at a random moment by SIGKILL and started anew, over and over, and must
end at the posterior and the client states of a run that nobody cut off. Not collected by pytest: half a minute a kill.
"""

import argparse
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
from tqdm import tqdm

from lightning_fedbayes.core.quiet import quietly
from tests.flower.deployment import deployed, descendants

ROUNDS, LONGEST = 5, 300
EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"


def flower(folder: Path, cut: float) -> None:
    """Run the example over Flower for at most ``cut`` seconds."""
    config = f'rounds={ROUNDS} checkpoint="{folder}/federation.pt" evaluate=false'
    with tempfile.TemporaryDirectory() as home, deployed(Path(home)) as deployment:
        deployment.start_simulation(2)

        def work() -> None:
            with suppress(AssertionError):
                deployment.run(EXAMPLE, config)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(cut)
        deployment.stop()
        thread.join()


def nvflare(folder: Path, cut: float) -> None:
    """Run a federation by sites in FLARE's simulator for at most ``cut`` seconds."""
    from tests.nvflare.simulated import Long, started

    job = started(folder, Long.__name__, alone=True)
    with suppress(subprocess.TimeoutExpired):
        job.wait(cut)
    for process in [job.pid, *descendants(job.pid)] if job.poll() is None else []:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    job.wait()
    while any(f"{folder}/workspace" in command(path) for path in Path("/proc").glob("[0-9]*/cmdline")):
        time.sleep(1)  # clients end when they find that their server has


def command(path: Path) -> str:
    """Return the command line of a process; empty if it has ended."""
    with suppress(OSError):
        return path.read_bytes().decode(errors="replace")
    return ""


def rounds(folder: Path) -> int:
    """Return how many rounds the checkpoint has."""
    return max((torch.load(path)["server"]["rounds"] for path in folder.glob("*.pt")), default=0)


def content(folder: Path) -> list[object]:
    """Return the posterior and the clients' states, without what is another in every run."""
    posteriors = [torch.load(path)["server"]["posterior"] for path in folder.glob("*.pt")]
    states = [torch.load(path) for path in sorted(folder.rglob("client-*.pt"))]
    return [*posteriors, *({name: each[name] for name in each.keys() - {"federation", "secret"}} for each in states)]


def main() -> None:
    """Cut, resume and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("transport", choices=("flower", "nvflare"))
    parser.add_argument("--kills", type=int, default=6, help="power cuts (6)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    given = parser.parse_args()
    run, chance, cuts = {"flower": flower, "nvflare": nvflare}[given.transport], random.Random(given.seed), []
    with tempfile.TemporaryDirectory() as folder, tqdm(total=given.kills, unit="kill") as bar:
        begin = time.time()
        run(whole := Path(folder) / "whole", LONGEST)
        # to the last round: what a process does after it, no kill undoes
        seconds, runs = max(path.stat().st_mtime for path in whole.glob("*.pt")) - begin, 0
        while len(cuts) < given.kills:
            own, runs = Path(folder) / str(runs), runs + 1
            run(own, chance.uniform(0.5, 1.0) * seconds)
            while rounds(own) < ROUNDS:
                cuts.append(rounds(own))
                bar.update()
                run(own, chance.uniform(0.5, 1.0) * seconds if len(cuts) < given.kills else LONGEST)
            torch.testing.assert_close(content(own), content(whole), rtol=0, atol=0)
    print(f"The same bits in {runs} runs after power cuts behind rounds {cuts}")


if __name__ == "__main__":
    with quietly():
        main()
