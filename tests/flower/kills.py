"""Power cuts of a whole deployment, at random: SuperLink, SuperNodes, the server's app and the clients' at once.

    python -m tests.flower.kills [--kills 20] [--seed 0]

Two clients train five rounds of sites, with states on disk and copies at the server, and calibrate a temperature and
conformal sets. Runs are cut off at a random moment and started anew, over and over, and must end at the posterior, the
client states and the calibration of the run that nobody cut off, bit for bit. Between two runs one SuperNode is killed
while its rounds go on, and comes back: it is counted again. Not collected by pytest: it takes half a minute a kill.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from tqdm import tqdm

from lightning_fedbayes.core.quiet import quietly
from tests.flower.deployment import Deployment, deployed, kill

APP = """
import torch
from flwr.serverapp import ServerApp
import lightning_fedbayes as fb
from lightning_fedbayes.flower import FusionStrategy, client_app, initial_arrays
from lightning_fedbayes.modules import mlp

def network():
    torch.manual_seed(0)
    return fb.HybridBayesianClassifier(mlp(64, 10, [20]), bayesian_last=2, learning_rate=0.01)

client = client_app(
    network(), lambda context: fb.DigitsDataModule(), partition=fb.DirichletPartition(2, 0.5), fusion="sites",
    trainer={"accelerator": "cpu"}, state_folder="FOLDER/states",
)
server = ServerApp()

@server.main()
def main(grid, context):
    config = context.run_config
    strategy = FusionStrategy("sites", wait_for=int(config["wait"]), checkpoint="FOLDER/federation.pt", evaluate=False,
                              safeguards=fb.Safeguards(min_clients=1))
    result = strategy.start(grid, initial_arrays(network()), int(config["rounds"]), timeout=float(config["timeout"]))
    if config["calibrate"]:
        calibration = [fb.FederatedTemperature(), fb.FederatedConformal(0.9)]
        strategy.calibrate(grid, result.arrays, calibration, timeout=60)
"""
CONFIG = """
[project]
name = "kills"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.flwr.app]
publisher = "lightning-fedbayes"

[tool.flwr.app.components]
serverapp = "kills_app:server"
clientapp = "kills_app:client"

[tool.flwr.app.config]
rounds = 5
wait = 2
timeout = 60.0
calibrate = true
"""


def write_app(folder: Path) -> Path:
    """Write the app that keeps its files in ``folder``."""
    app = folder / "app"
    app.mkdir(parents=True)
    (app / "kills_app.py").write_text(APP.replace("FOLDER", str(folder)))
    (app / "pyproject.toml").write_text(CONFIG)
    return app


def run(app: Path, cut_after: float | None = None) -> bool:
    """Run the app in a new deployment; return whether it came to its end before the power was cut.

    Args:
        app: see :func:`write_app`.
        cut_after: seconds from the start of the app; None: never.
    """
    with tempfile.TemporaryDirectory() as flower, deployed(Path(flower)) as deployment:
        deployment.start_simulation(2)
        work = threading.Thread(target=lambda: started(deployment, app))
        work.start()
        work.join(cut_after)
        deployment.stop()
        work.join()
    path = app.parent / "federation.pt"
    return path.exists() and bool(torch.load(path, weights_only=False)["calibration"])


def started(deployment: Deployment, app: Path, config: str = "") -> None:
    """Run the app until it ends, or what runs it does."""
    with suppress(AssertionError):
        deployment.run(app, config)


def comes_back(app: Path) -> list[int]:
    """Kill one of two SuperNodes during the rounds and start it again; return how many clients each round counts."""
    def counted() -> list[int]:
        path = app.parent / "federation.pt"
        history = torch.load(path, weights_only=False)["server"]["history"] if path.exists() else []
        return [int(figures["valid_clients"]) for figures in history]

    with tempfile.TemporaryDirectory() as flower, deployed(Path(flower)) as deployment:
        deployment.start_nodes(2)
        config = "rounds=8 wait=1 timeout=120.0 calibrate=false"
        work = threading.Thread(target=lambda: started(deployment, app, config))
        work.start()
        until(lambda: 2 in counted())
        kill([deployment.nodes[1]])
        until(lambda: counted()[-1] == 1)
        deployment.start_node(1)
        work.join()
    return counted()


def until(true: Callable[[], bool], seconds: float = 600) -> None:
    """Wait until something is true."""
    for _ in range(int(seconds)):
        if true():
            return
        time.sleep(1)
    raise TimeoutError(f"not true within {seconds:g} s")


def digest(folder: Path) -> str:
    """Return a digest of the posterior, the calibration and the clients' states."""
    found = hashlib.sha256()
    state = torch.load(folder / "federation.pt", weights_only=False)
    for part in (state["server"]["posterior"], state["calibration"]):
        found.update(repr(_plain(part)).encode())
    for path in sorted((folder / "states").rglob("*.pt")):
        found.update(repr(_plain(torch.load(path, weights_only=False))).encode())
    return found.hexdigest()


def _plain(value: object) -> object:
    """Return ``value`` without what differs between equal runs: names of runs, times."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if name not in ("federation", "seconds")}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else repr(value)


def main() -> None:
    """Cut, resume and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="power cuts (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    given = parser.parse_args()
    chance, cuts, runs, wrong = random.Random(given.seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder, tqdm(total=given.kills, unit="kill") as bar:
        begin = time.perf_counter()
        if not run(write_app(Path(folder) / "whole")):
            raise RuntimeError("the run that nobody cuts off does not come to its end")
        whole, expected = time.perf_counter() - begin, digest(Path(folder) / "whole")
        while cuts < given.kills:
            own = Path(folder) / str(runs)
            app = write_app(own)
            while not run(app, None if cuts >= given.kills else chance.uniform(0.3, 1.0) * whole):
                cuts += 1
                bar.update()
            runs += 1
            wrong += digest(own) != expected
            shutil.rmtree(own)
        counted = comes_back(write_app(Path(folder) / "node"))
    print(f"{cuts} power cuts of {runs} runs, {wrong} of which end elsewhere; clients that count in the rounds of a "
          f"SuperNode that is killed and comes back: {counted}")


if __name__ == "__main__":
    with quietly():
        main()
