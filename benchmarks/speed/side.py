"""The benchmark's end of a measurement: a worker process that runs rounds on demand."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from settings import Order

HERE = Path(__file__).parent
PATIENCE = 300.0
"""Seconds until a worker that does not answer counts as failed."""


class SideError(Exception):
    """A worker ended or does not answer; the message is the end of what it printed."""


class Side:
    """One side of a comparison in a process of its own (see ``gate.py`` for the other end).

    It is stopped when it is not its turn: Ray's processes, for one, are busy between two rounds too.

    Args:
        python: interpreter of the worker.
        script: name of the worker's file in this folder.
        order: what it is told.

    Raises:
        SideError: it did not get ready.
    """

    def __init__(self, python: str, script: str, order: Order) -> None:
        self.start = time.perf_counter()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the worker)
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [python, str(HERE / script), order.dumps()], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        )
        self.facts = self._answer()

    def run(self, rounds: int) -> float:
        """Seconds that ``rounds`` rounds take."""
        self._order(rounds)
        seconds = self._answer()["seconds"]
        self._signal(signal.SIGSTOP)
        return seconds

    def report(self) -> dict[str, Any]:
        """End it: "loss", "peak_mib" and "facts"."""
        self._order(0)
        return self._answer()

    def close(self) -> None:
        """Wait for the worker to end, which it does after the report, or see that it does."""
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
        return lines[-1] if lines else "it ended without a word"
