"""Real Flower on loopback: a SuperLink with TLS and SuperNodes that authenticate themselves; or a simulation."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
LOOPBACK = "127.0.0.1"
TLS = ("--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key", "--ssl-ca-certfile", "server.pem")
CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -nodes -days 365 -subj /CN=localhost "
    "-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout server.key -out server.pem"
)
KEY = "ssh-keygen -q -t ecdsa -b 384"
"""As in docs/flower.md."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def make_key(folder: Path, number: int) -> None:
    """Make the key by which a SuperNode proves its identity, and its public half."""
    subprocess.run([*KEY.split(), "-N", "", "-f", f"node{number}"], cwd=folder, check=True)


def descendants(process: int) -> list[int]:
    """Processes that ``process`` has started, and those that they have started, the youngest last."""
    return [each.pid for each in psutil.Process(process).children(recursive=True)]


def kill(processes: Sequence[subprocess.Popen]) -> None:
    """End processes and all that they have started by SIGKILL, also what has outlived the one that has started it."""
    for process in processes:
        if process.returncode is None:  # otherwise its number may be another's
            started = descendants(process.pid)  # Ray's have groups of their own
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for child in started:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


class Deployment:
    """A SuperLink, what it reaches the clients by, and ``nodes``: number → the process of the SuperNode."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._processes: list[subprocess.Popen] = []
        self.nodes: dict[int, subprocess.Popen] = {}
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }

    def start_nodes(self, count: int) -> None:
        """A deployment: every node is a process of its own, registered by its public key."""
        subprocess.run(CERTIFICATE.split(), cwd=self.folder, check=True, capture_output=True)
        self._configure(f'root-certificates = "{self.folder}/server.pem"')
        self.start_link()
        for number in range(count):
            self.add_node(number)

    def start_link(self) -> None:
        """Start the SuperLink of a deployment, for the first time or again."""
        self._start_link("--enable-supernode-auth", "--database", "superlink.db", *TLS)

    def add_node(self, number: int, **environment: str) -> None:
        """Make and register a key, and start its SuperNode."""
        make_key(self.folder, number)
        self.flwr("supernode", "register", f"node{number}.pub", "loopback")
        self.start_node(number, **environment)

    def start_node(self, number: int, **environment: str) -> None:
        """Start the SuperNode of a registered key, for the first time or again."""
        link = ("--superlink", f"{LOOPBACK}:{self.port}", "--root-certificates", "server.pem")
        own = ("--host", LOOPBACK, "--port", str(free_port()), "--node-config", f"partition-id={number}")
        key = ("--auth-supernode-private-key", f"node{number}")
        self.nodes[number] = self._spawn(f"node{number}", "flower-supernode", *link, *key, *own, *TLS, **environment)

    def start_simulation(self, count: int) -> None:
        """A simulation: all nodes share two processes."""
        self._configure(
            f"insecure = true\noptions.num-supernodes = {count}\noptions.backend.init-args.num-cpus = 2\n"
            "options.backend.client-resources.num-cpus = 1\noptions.backend.client-resources.num-gpus = 0"
        )
        self._start_link("--insecure", "--simulation")

    def flwr(self, *arguments: str) -> str:
        """Run the command line and return its output."""
        options = {"env": self.environment, "cwd": self.folder, "timeout": 1200}
        done = subprocess.run([BIN / "flwr", *arguments], capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done.stdout + done.stderr

    def run(self, app: Path, config: str) -> str:
        """Run an app to its end and return its log."""
        return self.flwr("run", str(app), "loopback", "--run-config", config, "--stream")

    def stop(self) -> None:
        """End every process and all that they have started, as a power cut would."""
        kill(self._processes)

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def _configure(self, connection: str) -> None:
        """Write the SuperLink's address for the command line."""
        home = self.folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\naddress = "{LOOPBACK}:{self.port}"\n'
            f"{connection}\n"
        )

    def _start_link(self, *options: str) -> None:
        self.link = self._spawn("superlink", "flower-superlink", "--host", LOOPBACK, "--port", str(self.port), *options)
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex((LOOPBACK, self.port)) == 0:
                    return
            time.sleep(0.1)
        raise TimeoutError(self.logs())

    def _spawn(self, name: str, command: str, *arguments: str, **environment: str) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("a") as log:
            options = {"env": {**self.environment, **environment}, "cwd": self.folder, "start_new_session": True}
            self._processes.append(subprocess.Popen([BIN / command, *arguments], stdout=log, stderr=log, **options))
        return self._processes[-1]


@contextmanager
def deployed(folder: Path) -> Iterator[Deployment]:
    """A deployment to start, whose every process is gone afterwards."""
    deployment = Deployment(folder)
    try:
        yield deployment
    finally:
        deployment.stop()
