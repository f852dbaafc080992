"""Power cuts of a whole deployment, at random: SuperLink, SuperNodes, the server's app and the clients' at once.

    python -m tests.flower.kills [--kills 20] [--seed 0] [--without-rounds kills|time]

Two clients train five rounds of sites, with states on disk and copies at the server, and calibrate a temperature and
conformal sets. Runs are cut off at a random moment and started anew, over and over, and must end at the posterior, the
client states and the calibration of the run that nobody cut off, bit for bit. Between two runs one SuperNode is killed
while its rounds go on, and comes back: it is counted again. Not collected by pytest: it takes half a minute a kill.

Without rounds, four clients of whom one is slow: "kills" ends the server's app or a SuperNode at random moments, starts
it anew, and compares the posterior with that of one process that repeats the log, bit by bit; "time" compares how long
federations with and without rounds take to the same loss on validation data.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import lightning_fedbayes as fb
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
SLOW = """
import json, time
import torch
from flwr.serverapp import ServerApp
import lightning_fedbayes as fb
from lightning_fedbayes.flower import FusionStrategy, client_app, initial_arrays
from lightning_fedbayes.flower.wire import from_arrays
from lightning_fedbayes.modules import mlp

def network():
    torch.manual_seed(0)
    return fb.HybridBayesianClassifier(mlp(64, 10, [20]), bayesian_last=2, learning_rate=0.01)

def data(context):
    time.sleep(SLEEP * (context.node_config["partition-id"] == CLIENT))
    return fb.DigitsDataModule()

client = client_app(
    network(), data, partition=fb.IIDPartition(4), fusion="sites", local_epochs=2, trainer={"accelerator": "cpu"},
    state_folder="FOLDER/states",
)
server = ServerApp()

@server.main()
def main(grid, context):
    config = context.run_config
    schedule = fb.Asynchronous(buffer=BUFFER) if config["schedule"] else None
    wait = int(config["wait"])
    strategy = FusionStrategy("sites", wait_for=wait, checkpoint="FOLDER/federation.pt", schedule=schedule)
    digits, module = fb.DigitsDataModule(), network()
    digits.prepare_data()
    digits.setup("validate")
    x, y = (torch.cat(parts) for parts in zip(*digits.val_dataloader()))

    strategy._roster.wait(grid, wait, 300.0)
    begin = time.time()

    def evaluate(server_round, arrays):
        fb.load_posterior(module, from_arrays(arrays, "the server")[0])
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(module.predict_mean(x), y).item()
        with open("FOLDER/losses.jsonl", "a") as file:
            file.write(json.dumps({"seconds": time.time() - begin, "loss": loss}) + "\\n")

    arrays = initial_arrays(network())
    strategy.start(grid, arrays, int(config["rounds"]), float(config["timeout"]), evaluate_fn=evaluate)
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
schedule = true
"""


def write_app(folder: Path, text: str = APP) -> Path:
    """Write the app that keeps its files in ``folder``."""
    app = folder / "app"
    app.mkdir(parents=True, exist_ok=True)
    (app / "kills_app.py").write_text(text.replace("FOLDER", str(folder)))
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


def slow(client: int, sleep: float, buffer: int) -> str:
    """Return the app of a federation with one slow client."""
    return SLOW.replace("CLIENT", str(client)).replace("SLEEP", str(sleep)).replace("BUFFER", str(buffer))


def killed_without_rounds(folder: Path, kills: int, chance: random.Random) -> tuple[dict[str, int], int, bool]:
    """Kill the server's app, or a SuperNode, over and over; return how often which, the fusions, and whether a single
    process that repeats the log ends at the same posterior.
    """
    app, count = write_app(folder, slow(client=2, sleep=5, buffer=1)), Counter[str]()
    config = "rounds=999 wait=1 timeout=60.0"

    def fusions() -> int:
        path = folder / "federation.pt"
        return torch.load(path, weights_only=False)["server"]["rounds"] if path.exists() else 0

    with tempfile.TemporaryDirectory() as flower, deployed(Path(flower)) as deployment:
        deployment.start_nodes(3)
        deployment.flwr("run", str(app), "loopback", "--run-config", config)
        until(lambda: fusions() > 0)
        for _ in range(kills):
            time.sleep(chance.uniform(1, 20))
            if chance.random() < 0.5:
                until(lambda: bool(deployment.server_apps()))
                for process in deployment.server_apps():
                    os.kill(process, signal.SIGKILL)
                deployment.flwr("run", str(app), "loopback", "--run-config", config)
                count["server"] += 1
            else:
                node = chance.randrange(3)
                kill([deployment.nodes[node]])
                count["node"] += 1
            deployment.revive()
        before = fusions()
        until(lambda: deployment.revive() or fusions() > before)
    return dict(count), fusions(), repeats(folder)


def repeats(folder: Path) -> bool:
    """Return whether one process that repeats the log ends where the checkpoint is."""
    from tests.federations import trainer  # torch's warnings are errors there

    scope: dict[str, Any] = {}
    exec(compile((folder / "app" / "kills_app.py").read_text(), "app", "exec"), scope)
    stored = torch.load(folder / "federation.pt", weights_only=False)["server"]
    federation = fb.FederatedBayes(
        fb.IIDPartition(4),
        fusion="sites",
        local_epochs=2,
        engine="sequential",
        schedule=fb.Asynchronous(replay=folder / "federation.jsonl"),
    )
    alone = trainer(stored["rounds"], [federation], limit_val_batches=0)
    alone.fit(scope["network"](), datamodule=fb.DigitsDataModule())
    mine = federation.posterior.state_dict()
    return all(
        torch.equal(value, mine[part][name])
        for part in ("mean", "variance")
        for name, value in stored["posterior"][part].items()
    )


def timed(folder: Path, schedule: bool, rounds: int, loss: float = 0.0) -> list[tuple[float, float]]:
    """Return seconds and loss on validation data after each fusion, until so many are done, or a loss is reached."""
    app = write_app(folder, slow(client=3, sleep=60, buffer=2))
    config = f"rounds={rounds} wait=4 timeout=300.0 schedule={str(schedule).lower()}"

    def seen() -> list[tuple[float, float]]:
        path = folder / "losses.jsonl"
        rows = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        return [(row["seconds"], row["loss"]) for row in rows]

    with tempfile.TemporaryDirectory() as flower, deployed(Path(flower)) as deployment:
        deployment.start_nodes(4)
        deployment.flwr("run", str(app), "loopback", "--run-config", config)
        until(lambda: len(found := seen()) == rounds or (bool(found) and found[-1][1] <= loss))
    return seen()


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


def without_rounds(folder: Path, given: argparse.Namespace) -> None:
    """Print what becomes of a federation without rounds."""
    if given.without_rounds == "kills":
        count, fusions, same = killed_without_rounds(folder, given.kills, random.Random(given.seed))
        end = "at the same bits" if same else "ELSEWHERE"
        print(f"{count} killed in {fusions} fusions; repeating the log ends {end}")
        return
    seconds, loss = timed(folder / "rounds", False, 3)[-1]
    reached, other = timed(folder / "without", True, 30, loss)[-1]
    ratio = reached / seconds
    print(f"loss {loss:.3f} in {seconds:.0f} s by rounds; {other:.3f} in {reached:.0f} s without ({ratio:.2f} times)")


def main() -> None:
    """Cut, resume and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="power cuts (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--without-rounds", choices=("kills", "time"), help="see above")
    given = parser.parse_args()
    if given.without_rounds:
        with tempfile.TemporaryDirectory() as folder:
            without_rounds(Path(folder), given)
        return
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
    print(
        f"{cuts} power cuts of {runs} runs, {wrong} of which end elsewhere; clients that count in the rounds of a "
        f"SuperNode that is killed and comes back: {counted}"
    )


if __name__ == "__main__":
    with quietly():
        main()
