"""Worker processes of the benchmark, and the environments of the peer frameworks that some of them need."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from benchmarks.speed.settings import Order

REQUIREMENTS: dict[str, str] = {"pfl": "pfl[pytorch]>=0.6,<0.7", "flower": "flwr[simulation]>=1.41,<1.43"}
"""Peer → requirement of its environment."""


class NotInstalledError(Exception):
    """A peer's environment could not be made; the message is why."""


def interpreter(name: str, root: Path) -> Path:
    """Return the Python of a peer's environment under ``root``, which the first call makes.

    After its own packages it finds those of this interpreter, so that both sides run the same torch if the peer
    permits it, and no second torch is downloaded.

    Raises:
        NotInstalledError: pip or venv failed.
    """
    home, requirement = root / name, REQUIREMENTS[name]
    python, done = home / "bin" / "python", home / "installed"
    if done.exists() and done.read_text() == requirement + sys.version:
        return python
    shutil.rmtree(home, ignore_errors=True)
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    try:
        venv.create(home, with_pip=True)
        site_packages = next(home.glob("lib/python3*/site-packages"))
        (site_packages / "shared.pth").write_text(str(Path(torch.origin).parents[1]))
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
        result = subprocess.run(pip, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        raise NotInstalledError(f"{type(error).__name__}: {error}") from error
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalledError((errors or [f"pip ended with {result.returncode}"])[0])
    done.write_text(requirement + sys.version)
    return python


ROOT = Path(__file__).parents[2]
PATIENCE = 300.0
"""Seconds until a worker that does not answer counts as failed."""


class SideError(Exception):
    """A worker ended or does not answer; the message is the end of what it printed."""


class Side:
    """One side of a comparison in a process of its own (see ``gate.py`` for the other end).

    Its processes are stopped between its turns: Ray's, for example, are busy between two rounds too.

    Args:
        python: interpreter of the worker.
        module: name of the worker's module in this folder.
        order: the order for the worker.

    Raises:
        SideError: it did not get ready.
    """

    def __init__(self, python: str, module: str, order: Order) -> None:
        self.start = time.perf_counter()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the worker)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.speed.{module}", order.dumps()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        self.facts = self._answer()

    def run(self, rounds: int) -> float:
        """Run ``rounds`` rounds; return their seconds."""
        self._order(rounds)
        seconds = self._answer()["seconds"]
        self._signal(signal.SIGSTOP)
        return seconds

    def report(self) -> dict[str, Any]:
        """End the worker; return its "loss", "peak_mib" and "facts"."""
        self._order(0)
        return self._answer()

    def close(self) -> None:
        """Wait for the worker to end after its report, or kill it after 30 seconds."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def _signal(self, number: int) -> None:
        """Send a signal to the worker and every process that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _order(self, rounds: int) -> None:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            print(rounds, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise SideError(self._last_words()) from None

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], PATIENCE)[0]:
            raise SideError(f"no answer in {PATIENCE:.0f} s; {self._last_words()}")
        line = stdout.readline()
        if not line:
            raise SideError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return lines[-1] if lines else "it ended without a message"
