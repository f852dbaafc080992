"""What happens to deployments of the example over Flower: TLS, keys of nodes, a process for each message.

    python -m tests.flower.hardening [SCENARIO ...]

Prints a line for each scenario, and ends with 1 if one fails. Half an hour on two cores. Two scenarios take as much as
fits into half of the free memory, and say how much that is.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from runpy import run_path

import psutil

import lightning_fedbayes as fb
from lightning_fedbayes.transport.flower import ServerState
from tests.federations import assert_close, trainer
from tests.flower.deployment import LOOPBACK, Deployment, deployed, descendants, kill, make_key

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "flower"
BEFORE = "22bd53ba"
"""The last commit whose messages do not tell a version."""
FREE = psutil.virtual_memory().available // 2**21  # half of it, in MB
SLOTS = """import fcntl, os, sys
if "clientapp" in sys.argv[0]:  # two of all clients' processes compute at a time
    slot = open(f"{folder}/slot{{os.getpid() % 2}}", "w")
    fcntl.flock(slot, fcntl.LOCK_EX)
"""
CLOCK = """import datetime
import flwr.supercore.date as date
now = date.now
date.now = lambda: now() + datetime.timedelta(hours={hours})
"""


@contextmanager
def federation(nodes: int = 2, parts: int = 4, hidden: str = "", before: str = "") -> Iterator[Deployment]:
    """Nodes of the example, whose clients keep posteriors. ``before`` is code that its processes begin with."""
    with tempfile.TemporaryDirectory() as name, deployed(Path(name)) as deployment:
        folder = deployment.folder
        shutil.copytree(EXAMPLE, folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "state").mkdir()
        kept = f'local_epochs=2, keep=["posterior"], state_folder="{folder}/state",'
        text = (EXAMPLE / "digits_app.py").read_text().replace("local_epochs=2,", kept)
        text = text.replace("fb.DirichletPartition(clients=2, alpha=0.5)", f"fb.IIDPartition({parts})")
        text = text.replace("mlp(64, 10)", f"mlp(64, 10{hidden})")
        (folder / "app" / "digits_app.py").write_text(before.format(folder=folder) + text)
        deployment.environment["PYTHONPATH"] = str(ROOT)
        deployment.start_nodes(nodes)
        yield deployment


def run(deployment: Deployment, rounds: int = 2, clients: int = 2, timeout: int = 300) -> str:
    """Run it to its end, and return the log."""
    config = f"rounds={rounds} clients={clients} timeout={timeout} evaluate=false"
    return deployment.run(deployment.folder / "app", f'{config} checkpoint="{deployment.folder}/federation.pt"')


def begun(deployment: Deployment, timeout: int = 300) -> "Future[str]":
    """Begin three rounds, and return when clients train in the second."""
    future = ThreadPoolExecutor(1).submit(run, deployment, 3, timeout=timeout)
    while "Start `flwr-clientapp`" not in (deployment.folder / "node1.log").read_text().partition("ROUND 2]")[2]:
        assert not future.done(), future.result()
        time.sleep(0.2)
    time.sleep(4)
    return future


def rounds(deployment: Deployment, name: str = "valid_clients") -> list[int]:
    """A figure of each round."""
    path = deployment.folder / "federation.pt"
    return [round(row[name]) for row in ServerState.load(path).history] if path.exists() else []


def failures() -> str:
    """A client's disk full in round 1; in round 2 its process killed, and the server's disk full"""
    with federation() as deployment:
        (deployment.folder / "state" / "client-1.pt.new").symlink_to("/dev/full")
        future = begun(deployment)
        (deployment.folder / "federation.pt.new").symlink_to("/dev/full")
        os.kill(descendants(deployment.nodes[1].pid)[-1], signal.SIGKILL)
        begin, log = time.monotonic(), future.result()
        seconds, told = time.monotonic() - begin, re.search(r"Round 2: client 1 is left out: (.*)", log)
        assert told is not None
        assert "federation.pt cannot be written" in log
        assert rounds(deployment) == [1]
        run(deployment, 3)
        assert rounds(deployment) == [1, 2, 2]
    return f"{told[1]} ({seconds:.0f} s); the run ends, and when it is submitted again goes on from round 1"


def slow() -> str:
    """400 connections that send a byte a second, and a client that stops in round 2, with timeout=60"""
    over = threading.Event()
    with federation() as deployment:
        opened = [socket.create_connection((LOOPBACK, deployment.port)) for _ in range(400)]

        def drip() -> None:
            while not over.wait(1):
                for each in opened:
                    with suppress(OSError):
                        each.send(b"\x16")

        threading.Thread(target=drip, daemon=True).start()
        future = begun(deployment, timeout=60)
        stopped = [deployment.nodes[1].pid, *descendants(deployment.nodes[1].pid)]
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        future.result()
        assert rounds(deployment) == [2, 1, 1]
        for process in stopped:
            os.kill(process, signal.SIGCONT)
        run(deployment, 4)
        over.set()
        assert rounds(deployment) == [2, 1, 1, 2]
        return f"rounds 2 and 3 without the client, which counts again in round 4; {rounds(deployment, 'seconds')} s"


def restart() -> str:
    """SuperLink and ServerApp killed while clients train in round 2, and started again"""
    with federation(parts=2) as deployment:
        future = begun(deployment)
        kill([deployment.link])
        with suppress(AssertionError):
            future.result()
        deployment.start_link()
        run(deployment, 3)
        assert rounds(deployment) == [2, 2, 2]
        made = fb.FederatedBayes(fb.IIDPartition(2), fusion="rklb", local_epochs=2, engine="sequential")
        network = run_path(f"{deployment.folder}/app/digits_app.py")["network"]()
        trainer(3, [made], limit_val_batches=0).fit(network, datamodule=fb.DigitsDataModule())
        found = ServerState.load(deployment.folder / "federation.pt").posterior
        assert any(bool((variance > 0).any()) for variance in found.variance.values())
        assert_close(found, made.posterior, rtol=1e-6, atol=1e-7)
    return "the nodes wait; the run that is submitted again ends at the posterior of one process"


def outsiders() -> str:
    """Clocks an hour ahead and behind, a client of the version before, and a key that is not registered"""
    with federation(parts=6) as deployment:
        folder = deployment.folder
        archive = subprocess.check_output(["git", "-C", ROOT, "archive", "--prefix=4/", BEFORE, "lightning_fedbayes"])
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        for number, hours in ((2, 1), (3, -1)):
            (folder / str(number)).mkdir()
            (folder / str(number) / "sitecustomize.py").write_text(CLOCK.format(hours=hours))
        for number in (2, 3, 4):
            deployment.add_node(number, PYTHONPATH=f"{folder}/{number}{os.pathsep}{ROOT}")
        make_key(folder, 5)
        deployment.start_node(5)
        assert "its message is of lightning_fedbayes None" in run(deployment)
        assert rounds(deployment) == [2, 2]
        assert not any("SuperNode ID" in (folder / f"node{number}.log").read_text() for number in (2, 3, 5))
    return "do not take part, two others go on"


def large() -> str:
    """A network of 1 GB, or as much as fits at 24 times its size, from and to one client"""
    width = min(1000, FREE // 24) * 10**6 // 4 // 85
    with federation(1, 50, f", hidden=[{width}]") as deployment:
        run(deployment, 1, clients=1, timeout=900)
        down, up, seconds = (rounds(deployment, name)[0] for name in ("megabytes_down", "megabytes_up", "seconds"))
    return f"{down} MB there and {up} MB back in {seconds} s"


def nodes() -> str:
    """50 nodes, or 8 for each core and 200 MB for each node, of whose clients two compute at a time"""
    count = min(50, FREE // 200, 8 * (os.cpu_count() or 1))
    with federation(count, count, before=SLOTS) as deployment:
        run(deployment, 1, clients=count, timeout=900)
        assert rounds(deployment) == [count], rounds(deployment)
        return f"all {count} count, in a round of {rounds(deployment, 'seconds')[0]} s"


SCENARIOS = {each.__name__: each for each in (nodes, outsiders, slow, large, restart, failures)}


if __name__ == "__main__":
    failed = False
    for name in sys.argv[1:] or SCENARIOS:
        begin = time.monotonic()
        try:
            happened = SCENARIOS[name]()
        except Exception:
            happened, failed = f"FAILED: {traceback.format_exc()}", True
        print(f"{name}: {SCENARIOS[name].__doc__}: {happened} ({time.monotonic() - begin:.0f} s)", flush=True)
    sys.exit(failed)
