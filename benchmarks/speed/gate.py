"""Worker's end of a measurement: a gate that every side calls between two rounds.

At the gate the worker writes one JSON object and reads the number of rounds that it shall run until it comes back, so
that the sides of a comparison can be timed in turn though each of them lives in a process, and some in an interpreter,
of its own.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.speed import workloads
from benchmarks.speed.settings import Order

MIB = 2**20


class Gate:
    """Timer of the rounds between two orders of the benchmark.

    Call it before every round; it returns False when there is no other. Its first answer is that the worker is ready,
    its last the report. Standard output and input belong to it: whatever else is printed goes to standard error.

    Args:
        order: the order that the worker was started with.
        versions: versions of the packages of this side, besides torch.
    """

    def __init__(self, order: Order, versions: dict[str, str]) -> None:
        self.order = order
        self._answers = os.fdopen(os.dup(1), "w")
        self._orders = os.fdopen(os.dup(0))
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        self._left = 0
        self._start = time.perf_counter()
        self._facts = {
            "versions": {"torch": torch.__version__, **versions},
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if order.device == "cuda" else "cpu",
        }

    def __call__(self, parameters: Callable[[], Sequence[Tensor]], facts: Callable[[], dict[str, str]] = dict) -> bool:
        """Return whether there is another round to run; wait for the next order after the last of a burst.

        Args:
            parameters: returns the parameters of the global network; called after the last round only.
            facts: returns further entries of the report; called after the last round only.
        """
        if self._left == 0:
            if self.order.device == "cuda":
                torch.cuda.synchronize()
            self._answer({"seconds": time.perf_counter() - self._start, **self._facts})
            self._left = int(self._orders.readline() or 0)
            if self._left == 0:
                self._report(parameters(), facts())
                return False
            self._start = time.perf_counter()
        self._left -= 1
        return True

    def _report(self, parameters: Sequence[Tensor], facts: dict[str, str]) -> None:
        peak = peak_mib(self.order.device)  # before the evaluation, which needs memory of its own
        final = workloads.final_loss(
            self.order.workload, [parameter.detach().cpu() for parameter in parameters], self.order.data
        )
        self._answer({"loss": final, "peak_mib": peak, "facts": facts})

    def _answer(self, answer: dict) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)


def start() -> Order:
    """Read the order of this worker from its command line."""
    torch.manual_seed(workloads.SEED)
    return Order.loads(sys.argv[1])


def peak_mib(device: str) -> float:
    """Peak memory: of the GPU's tensors, or resident in this process, plus the present memory of its descendants."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MIB if sys.platform == "darwin" else 1024) + _descendants_mib()


def _descendants_mib() -> float:
    """Memory of the descendants of this process; a page that n processes share counts 1/n; 0 outside Linux."""
    parents: dict[int, int] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(directory.name)] = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    total = 0.0
    for pid in family - {os.getpid()}:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    return total
