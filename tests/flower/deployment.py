"""Real Flower on loopback: a SuperLink with TLS and SuperNodes that authenticate themselves; or a simulation."""

import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

BIN = Path(sys.executable).parent
LOOPBACK = "127.0.0.1"
TLS = ("--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key", "--ssl-ca-certfile", "server.pem")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def make_certificate(folder: Path) -> None:
    """A certificate for loopback that signs itself: ``server.pem``, and its key, ``server.key``."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(LOOPBACK))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    (folder / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    write_key(folder / "server.key", key, serialization.PrivateFormat.PKCS8)


def make_node_key(path: Path) -> None:
    """Write the key by which a SuperNode proves its identity, ``path``, and its public half beside it, ``path.pub``."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_key(path, key, serialization.PrivateFormat.OpenSSH)
    path.with_name(path.name + ".pub").write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )


def write_key(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def descendants(process: int) -> list[int]:
    """Processes that ``process`` has started, and those that they have started."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = dict(map(int, line.split()) for line in table.splitlines())
    found = [process]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


def kill(processes: Sequence[subprocess.Popen]) -> None:
    """End processes and all that they have started by SIGKILL."""
    started = [child for process in processes for child in descendants(process.pid)]
    for process in processes:
        process.kill()
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
        make_certificate(self.folder)
        self._configure(f'root-certificates = "{self.folder}/server.pem"')
        self._start_link("--enable-supernode-auth", *TLS)
        for number in range(count):
            make_node_key(self.folder / f"node{number}")
            self.flwr("supernode", "register", f"node{number}.pub", "loopback")
            self.start_node(number)

    def start_node(self, number: int) -> None:
        """Start the SuperNode of a registered key, for the first time or again."""
        link = ("--superlink", f"{LOOPBACK}:{self.port}", "--root-certificates", "server.pem")
        own = ("--host", LOOPBACK, "--port", str(free_port()), "--node-config", f"partition-id={number}")
        key = ("--auth-supernode-private-key", f"node{number}")
        self.nodes[number] = self._spawn(f"node{number}", "flower-supernode", *link, *key, *own, *TLS)

    def start_simulation(self, count: int) -> None:
        """A simulation: all nodes share two processes."""
        self._configure(
            f"insecure = true\noptions.num-supernodes = {count}\noptions.backend.init-args.num-cpus = 2\n"
            "options.backend.client-resources.num-cpus = 1\noptions.backend.client-resources.num-gpus = 0"
        )
        self._start_link("--insecure", "--simulation")

    def flwr(self, *arguments: str) -> str:
        """Run the command line and return its output."""
        options = {"env": self.environment, "cwd": self.folder, "timeout": 250}
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
        self._spawn("superlink", "flower-superlink", "--host", LOOPBACK, "--port", str(self.port), *options)
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex((LOOPBACK, self.port)) == 0:
                    return
            time.sleep(0.1)
        raise TimeoutError(self.logs())

    def _spawn(self, name: str, command: str, *arguments: str) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("a") as log:
            options = {"env": self.environment, "cwd": self.folder, "start_new_session": True}
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
