"""Storms over what a federation stores: bits that flip, processes that are killed, and many fits in one process.

    python -m benchmarks.engine.storms [--flips 500] [--kills 60] [--fits 100] [--seed 0]

A flipped bit must be refused by an error of the package, or leave what is read as it was. A killed run must end at the
same bits. Fits must leave no memory behind.
``FUZZ_TIMES=6 pytest tests/fuzz tests/*/test_fuzz.py`` has calls.
"""

import argparse
import math
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

import lightning_fedbayes as fb
from lightning_fedbayes.callbacks.trainer.checkpoints import WholeCheckpointIO
from lightning_fedbayes.cli import results
from lightning_fedbayes.core import run_file
from lightning_fedbayes.core.errors import FedBayesError, FederationError
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.store import FILE, Store
from lightning_fedbayes.modules import mlp
from lightning_fedbayes.server.schedule import read_arrivals
from lightning_fedbayes.transport.calibration import count_noise
from lightning_fedbayes.transport.checkpoint import ServerState, stored_state
from lightning_fedbayes.transport.flower import FusionStrategy, roster
from tests.federations import CLASSES, FEATURES, Plain, federate, loader, saving
from tests.flower.clients import client_apps, run
from tests.flower.grid import LocalGrid, SlowGrid
from tests.flower.test_schedules import Estimated
from tests.transport.federation import PARTITION, BlobData

ROUNDS = 4
FLOWER: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "SCAFFOLD over Flower": (Plain, {"fusion": "scaffold"}, {}),
    "FedNova over Flower": (Estimated, {"fusion": "fednova"}, {"keep": ["optimizer"]}),
    "Ditto over Flower": (Estimated, {"fusion": "ditto"}, {}),
    "sites over Flower": (Estimated, {"fusion": "sites"}, {}),
    "private updates over Flower": (Plain, {"fusion": "rklb"}, {"privacy": fb.UpdatePrivacy(1.0, 0.1)}),
    "private examples over Flower": (Plain, {"fusion": "rklb"}, {}),
    "without rounds over Flower": (Plain, {"fusion": "sites", "schedule": fb.Asynchronous(buffer=2)}, {}),
}
"""Name → module, options of the server, and of its clients."""
REPLAYED = "without rounds over Flower"
ALONE: dict[str, dict[str, Any]] = {
    "SCAFFOLD": {"fusion": "scaffold"},
    "FedNova": {"fusion": "fednova"},
    "Ditto": {"fusion": "ditto"},
    "population": {"fusion": "population"},
    "private updates": {"fusion": "rklb", "privacy": fb.UpdatePrivacy(1.0, 0.1)},
    "private examples": {"fusion": "rklb", "engine": "sequential"},
    "without rounds": {"fusion": "sites", "schedule": fb.Asynchronous(3, 1, fb.Delays(slow={0: 10.0}))},
}
"""Name → options of the federation in one process, whose clients keep their states on disk."""

ANEW = ("federation", "messages")
"""Another thing in every run: its name, and accounts, which count messages that are sent again, too."""


def content(value: Any) -> Any:
    """What can be compared: tensors as their bytes, objects as their attributes."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, Mapping):
        return [(name, content(each)) for name, each in value.items() if name not in ANEW]
    if isinstance(value, list | tuple | set):
        return [content(each) for each in value]
    return repr(value) if type(value).__module__ in ("builtins", "pathlib") else (type(value), content(vars(value)))


# -- federations -------------------------------------------------------------------------------------------------------


def over_flower(name: str, folder: Path, rounds: int) -> None:
    """Train over a grid in one process, from the checkpoint in ``folder`` if there is one."""
    make, server, client = FLOWER[name]
    strategy = FusionStrategy(**server, wait_for=4, seed=3, checkpoint=folder / "server.pt")
    privacy = {"callbacks": [fb.ExamplePrivacy(1.0, 0.5)]} if "examples" in name else {}
    grid = SlowGrid if "schedule" in server else LocalGrid
    options = {**client, "state_folder": folder / "clients", "trainer": {"accelerator": "cpu", **privacy}}
    method = {} if "schedule" in server else {"shared": False}
    with mock.patch.multiple(TaskIdentity, _task_id=1, _run_id=1, _node_id=1):  # as in the process of a ServerApp
        run(grid(client_apps(make=make, fusion=server["fusion"], **method, **options)), strategy, rounds, make)


def alone(name: str, folder: Path, rounds: int) -> None:
    """Train in one process, from the last checkpoint in ``folder`` if there is one."""
    options = {"keep": fb.Kept(["posterior"], folder / "clients"), "fraction": 1.0, **ALONE[name]}
    callbacks = [fb.ExamplePrivacy(1.0, 0.5)] if "examples" in name else []
    last = "last" if (folder / "last.ckpt").exists() else None
    federation = fb.FederatedBayes(fb.IIDPartition(4), seed=3, **options)
    federate(Plain(), federation, rounds, loader(), ckpt_path=last, **saving(folder, *callbacks))


def trained(name: str, folder: Path, rounds: int) -> None:
    (over_flower if name in FLOWER else alone)(name, folder, rounds)


def stored(folder: Path) -> dict[str, Any]:
    """All that a federation has stored, but for times and file names."""
    server = [ServerState.load(path).server for path in folder.glob("server.pt")]
    made = [torch.load(path, weights_only=False) for path in folder.glob("last.ckpt")]
    found = {
        "server": [{n: each[n] for n in ("posterior", "buffers", "rule_states")} for each in server],
        "module": [[each["state_dict"], each["callbacks"].get("ExamplePrivacy")] for each in made],
        "states": [
            {**stored_state(path, client_of(path)), "steps": None}
            for path in sorted(folder.glob("clients/client-*.pt"))
        ],
        "disk": [states_in(folder / "clients") for _ in folder.glob(f"clients/{FILE}")],
    }
    return {part: content(each) for part, each in found.items()}


def client_of(path: Path) -> int:
    """Return the client whose state a file holds."""
    return int(path.stem.removeprefix("client-"))


def states_in(folder: Path) -> dict[int, Any]:
    store = Store(folder)
    try:
        store.resume(store.run, store.rounds)
        return {client: store.get(client) for client in store.clients()}
    finally:
        store.close()


def replayed(folder: Path) -> Any:
    """The posterior of the same federation in one process, by the log of arrivals in ``folder``."""
    schedule = fb.Asynchronous(replay=folder / "server.jsonl")
    federation = fb.FederatedBayes(PARTITION, engine="sequential", fusion="sites", schedule=schedule, seed=3)
    federate(Plain(), federation, ROUNDS, BlobData().train_dataloader())
    return content(federation.posterior.state_dict())


# -- flips -------------------------------------------------------------------------------------------------------------


def arrivals(path: Path) -> Any:
    """A replay asks for as many fusions as there were."""
    found = read_arrivals(path)
    if len(found) != ROUNDS:
        raise FederationError(f"replay= ends after {len(found)} fusions")
    return found


def figures(path: Path) -> Any:
    """A page says that the last line is cut short."""
    found = run_file.read(path)
    if found.torn:
        raise FedBayesError("the last line is cut short")
    return found


def files(folder: Path) -> dict[str, tuple[Path, Any]]:
    """One stored file of every kind: name → path, and a function that reads it."""
    one, two, three = map(folder.joinpath, ("private examples", "without rounds over Flower", "FedNova over Flower"))
    for path in (one, two, three):
        trained(path.name, path, ROUNDS)
    (one / "last.ckpt").rename(one / "one.ckpt")  # of a damaged last one another takes the place
    count_noise(folder, 0, 1.5)
    for round in range(ROUNDS):
        run_file.append(folder, {"round": round, "settings": {"fusion": "Σ"}, "figures": {"val/nll": 0.1 * round}})
    results.save(folder, {"seed": 1}, [results.Run("sites", 0, {"val/nll": [0.5, math.nan]})])
    return {
        "checkpoint": (one / "one.ckpt", WholeCheckpointIO().load_checkpoint),
        "states on disk": (one / "clients" / FILE, lambda path: states_in(path.parent)),
        "server's checkpoint": (three / "server.pt", ServerState.load),
        "server's checkpoint without rounds": (two / "server.pt", ServerState.load),
        "client's state": (three / "clients" / "client-0.pt", lambda path: stored_state(path, 0)),
        "log of arrivals": (two / "server.jsonl", arrivals),
        "account of counts": (folder / "client-0-counts.json", lambda path: count_noise(path.parent, 0, 0.0)),
        "file of a run": (folder / run_file.FILE, figures),
        "comparison": (folder / results.FILE, lambda path: results.load(path.parent)),
    }


def flip(path: Path, read: Any, place: int, bit: int) -> str:
    """Return what became of one flipped bit."""
    before = content(read(path))
    whole = path.read_bytes()
    data = bytearray(whole)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    try:
        return "harmless" if content(read(path)) == before else f"silent: {path.name}, byte {place}, bit {bit}"
    except FedBayesError:
        return "refused"
    except Exception as error:
        return f"foreign: {path.name}, byte {place}, bit {bit}: {type(error).__name__}: {error}"
    finally:
        path.write_bytes(whole)


def flips(count: int, chance: random.Random, folder: Path) -> Counter[str]:
    """Flip bits in all kinds of files in turn, every second one in a byte that is not 0, as most of the unused are."""
    kinds, found = files(folder), Counter[str]()
    for number in range(count):
        name = list(kinds)[number % len(kinds)]
        path, read = kinds[name]
        places = [i for i, byte in enumerate(path.read_bytes()) if byte or number // len(kinds) % 2]
        found[f"{name}: {flip(path, read, chance.choice(places), chance.randrange(8))}"] += 1
    return found


# -- kills -------------------------------------------------------------------------------------------------------------


def in_a_fork(work: Any, seconds: float | None = None) -> bool:
    """Do ``work`` in another process, killed after ``seconds``. Return True if it was."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"a run ended with {code}"
    return code != 0


def kills(count: int, chance: random.Random, folder: Path) -> Counter[str]:
    """Kill runs after their first round at a random moment, and compare with runs that nobody killed."""
    found, names = Counter[str](), [*FLOWER, *ALONE]
    seconds, whole = {}, {}
    for name in names:
        in_a_fork(partial(trained, name, folder / name / "begun", 1))
        shutil.copytree(folder / name / "begun", folder / name / "run")
        begin = time.perf_counter()
        in_a_fork(partial(trained, name, folder / name / "run", ROUNDS))
        seconds[name], whole[name] = time.perf_counter() - begin, stored(folder / name / "run")
    number = 0
    while sum(found.values()) < count:
        name = names[number % len(names)]
        number += 1
        shutil.rmtree(folder / name / "run")  # under the same name, which files hold
        shutil.copytree(folder / name / "begun", folder / name / "run")
        work = partial(trained, name, folder / name / "run", ROUNDS)
        if in_a_fork(work, chance.uniform(0.1, 0.9) * seconds[name]):
            in_a_fork(work)
            resumed = stored(folder / name / "run")
            if name == REPLAYED:  # messages arrive in another order, which the log repeats
                whole[name] = {"server": replayed(folder / name / "run")}
                resumed = {"server": content(ServerState.load(folder / name / "run" / "server.pt").server["posterior"])}
            parts = [part for part, value in whole[name].items() if value != resumed[part]]
            found[f"{name}: {f'other {parts}' if parts else 'the same bits'}"] += 1
    return found


# -- memory ------------------------------------------------------------------------------------------------------------


def fits(count: int, width: int) -> list[float]:
    """Return the resident memory in MB after each of so many fits of a network of this width."""
    found = []
    for number in range(count):
        made = fb.FederatedBayes(fb.IIDPartition(4), engine=("sequential", "vectorized")[number % 2])
        federate(Plain(mlp(FEATURES, CLASSES, hidden=[width])), made, 2, loader(), loader(shuffle=False))
        found.append(psutil.Process().memory_info().rss / 2**20)
    return found


def main() -> None:
    """Run the storms and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("flips", 500), ("kills", 60), ("fits", 100), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"({usual})")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    roster.POLL_SECONDS = 0.005
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        for storm, count in ((kills, given.kills), (flips, given.flips)):
            for what, times in sorted(storm(count, chance, Path(folder) / storm.__name__).items() if count else ()):
                print(f"{storm.__name__}: {what}: {times}", flush=True)
    for width in (5, 20_000) if given.fits else ():
        steps = ", ".join(f"{memory:.0f}" for memory in fits(given.fits, width)[9::10])
        print(f"fits: {width} wide, MB after each tenth: {steps}", flush=True)


if __name__ == "__main__":
    with quietly():
        main()
