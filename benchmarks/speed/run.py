"""Federated rounds of lightning_fedbayes side by side with the field: a Markdown table of ratios.

    python -m benchmarks.speed.run [--only dense-50k] [--repeats 7] [--peers none] [--device cuda]

Every side runs in a process of its own and answers in turn: in each repeat every opponent and we run the same number of
rounds, and the ratio is the median of the repeats' ratios. Start-up is not in it: two rounds are run before the first
that is timed. Environments of the peer frameworks are made with pip at the first run and kept in --cache.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.speed.settings import OPPONENTS, SEED, TOLERANCE, WARM_UP, WORKLOADS, Order, Workload
from benchmarks.speed.side import REQUIREMENTS, NotInstalledError, Side, SideError, interpreter

MODULES = {
    "ours": "ours",
    "dataloader": "loop",
    "loop": "loop",
    "lightning": "ours",
    "pfl": "peers.pfl_research",
    "flower": "peers.flower",
}

COLUMNS = (
    "workload",
    "opponent",
    "opponent ms/round",
    "ours ms/round",
    "times faster",
    "bar",
    "met",
    "peak MiB ours / theirs",
    "final loss ours / theirs",
)


@dataclass
class Measurement:
    """Measurements of one side of a workload.

    Args:
        start_up: seconds from the start of the interpreter to the end of the first round.
        seconds: per round, of every repeat.
        facts: answer of the worker when it was ready.
        report: its answer at the end.
    """

    start_up: float
    seconds: list[float]
    facts: dict[str, Any]
    report: dict[str, Any]


def main() -> int:
    """Run the chosen workloads; return 1 if one of our own sides failed."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise stopped workers would survive
    pythons, notes = environments(arguments)
    results: dict[str, dict[str, Measurement]] = {}
    for name in arguments.only:
        results[name] = measure(name, arguments, pythons, notes)
    results = {name: sides for name, sides in results.items() if "ours" in sides}
    if results:
        print("\n\n".join([*heading(arguments, results), "\n".join(table(results)), start_ups(results)]))
    print("\n".join(["", *(f"* {note}" for note in notes)]))
    return int(len(results) < len(arguments.only))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=WORKLOADS,
        default=list(WORKLOADS),
        metavar="NAME",
        help=f"workloads, of {', '.join(WORKLOADS)}",
    )
    parser.add_argument("--repeats", type=int, default=7, help="bursts of every side, in turn (7)")
    parser.add_argument("--rounds", type=int, help="rounds in a burst, in place of the workload's own number")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=["none", *REQUIREMENTS],
        default=list(REQUIREMENTS),
        help="frameworks to compare with beside the plain loops",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--engine", default="auto", help="FederatedBayes(engine=...) (auto)")
    parser.add_argument("--data", help="directory with FashionMNIST's train-*-ubyte.gz; without it images are made")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("outputs/peers"),
        help="folder that keeps the environments of the peers (outputs/peers)",
    )
    return parser.parse_args()


def environments(arguments: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Return the interpreter of every side that can run, and a note for every peer that cannot."""
    pythons: dict[str, str] = dict.fromkeys(("ours", "dataloader", "loop", "lightning"), sys.executable)
    notes: list[str] = []
    wanted = {opponent for name in arguments.only for opponent in WORKLOADS[name].bars}
    for peer in [peer for peer in REQUIREMENTS if peer in arguments.peers and peer in wanted]:
        if peer == "flower" and arguments.device != "cpu":
            notes.append(f"{OPPONENTS[peer]} is left out: it is compared on the CPU alone.")
            continue
        progress(f"environment of {peer}")
        try:
            pythons[peer] = str(interpreter(peer, arguments.cache.resolve()))
        except NotInstalledError as error:
            notes.append(f"{OPPONENTS[peer]} is left out: {error}")
    return pythons, notes


def measure(
    name: str, arguments: argparse.Namespace, pythons: dict[str, str], notes: list[str]
) -> dict[str, Measurement]:
    """Measure every side of a workload in turn; a side that fails is left out, with a line in ``notes``."""
    workload = WORKLOADS[name]
    rounds = arguments.rounds or workload.rounds
    total = WARM_UP + arguments.repeats * rounds
    results: dict[str, Measurement] = {}
    with contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        for key in turns(workload, pythons):
            progress(f"{name}: {key} starts")
            order = Order(name, key, total, arguments.device, arguments.engine, arguments.data)
            with noting(f"{name}: {key}", notes):
                side = Side(pythons[key], MODULES[key], order)
                stack.callback(side.close)
                side.run(1)
                results[key] = Measurement(time.perf_counter() - side.start, [], side.facts, {})
                side.run(WARM_UP - 1)
                sides[key] = side
        if "ours" not in sides:
            return {}
        for repeat in range(arguments.repeats):
            progress(f"{name}: repeat {repeat + 1} of {arguments.repeats}")
            for key, side in list(sides.items()):
                with noting(f"{name}: {key}", notes):
                    results[key].seconds.append(side.run(rounds) / rounds)
        for key, side in sides.items():
            with noting(f"{name}: {key}", notes):
                results[key].report = side.report()
    return {key: result for key, result in results.items() if result.report}


def turns(workload: Workload, pythons: dict[str, str]) -> list[str]:
    """Return the sides of a workload in the order of a repeat; ours comes after the hand-written loop."""
    opponents = [key for key in OPPONENTS if key in workload.bars and key in pythons]
    place = opponents.index("loop") + 1
    return [*opponents[:place], "ours", *opponents[place:]]


@contextlib.contextmanager
def noting(what: str, notes: list[str]) -> Iterator[None]:
    """Turn the failure of a side into a line of ``notes``."""
    try:
        yield
    except SideError as error:
        notes.append(f"{what} failed: {error}")
        progress(notes[-1])


def table(results: dict[str, dict[str, Measurement]]) -> Iterator[str]:
    """The Markdown table, a row per workload and opponent."""
    yield row(COLUMNS)
    yield row(["---"] * len(COLUMNS))
    for name, sides in results.items():
        for key in OPPONENTS:
            if key in sides:
                yield row(cells(WORKLOADS[name], key, sides["ours"], sides[key]))


def row(entries: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(entries)} |"


def cells(workload: Workload, key: str, ours: Measurement, theirs: Measurement) -> list[str]:
    """One row: an opponent against us."""
    ratios = [t / o for t, o in zip(theirs.seconds, ours.seconds, strict=True)]
    ratio = statistics.median(ratios)
    bar = workload.bars[key]
    layers = " (bayesian-torch layers)" if workload.bayesian else ""
    return [
        workload.title,
        OPPONENTS[key] + layers,
        *(f"{1e3 * statistics.median(side.seconds):.1f}" for side in (theirs, ours)),
        f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        "" if bar is None else f"{bar:.2f}",
        "" if bar is None else "yes" if ratio >= bar else "no",
        " / ".join(f"{side.report['peak_mib']:.0f}" for side in (ours, theirs)),
        parity(ours.report["loss"], theirs.report["loss"]),
    ]


def parity(ours: float, theirs: float) -> str:
    """Return both final losses as text, marked where they differ by more than the tolerance."""
    apart = abs(ours - theirs) > TOLERANCE * abs(theirs)
    return f"{ours:.4f} / {theirs:.4f}" + (" **differ**" if apart else "")


def heading(arguments: argparse.Namespace, results: dict[str, dict[str, Measurement]]) -> Iterator[str]:
    """Paragraphs with the command, the machine, the versions and the settings."""
    sides = [side for each in results.values() for side in each.values()]
    versions = {name: version for side in sides for name, version in side.facts["versions"].items()}
    devices = {side.facts["device"] for side in sides}
    threads = {str(side.facts["threads"]) for side in sides}
    engines = [f"{name} {each['ours'].report['facts']['engine']}" for name, each in results.items()]
    given = [f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"] if "OMP_NUM_THREADS" in os.environ else []
    yield f"`{' '.join([*given, 'python -m benchmarks.speed.run', *sys.argv[1:]])}`"
    yield (
        f"{platform.machine()}, {os.cpu_count()} cores, device {', '.join(sorted(devices))}, "
        f"threads {', '.join(sorted(threads))}, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    )
    yield (
        f"Medians (and range of the ratio) of {arguments.repeats} repeats after {WARM_UP} rounds of warm-up, seed "
        f'{SEED}; losses are marked from {100 * TOLERANCE:.0f} % of difference on. engine="{arguments.engine}": '
        + ", ".join(engines)
        + "."
    )


def start_ups(results: dict[str, dict[str, Measurement]]) -> str:
    """Return the start-up times, which the table leaves out."""
    keys = dict.fromkeys(key for sides in results.values() for key in sides)
    medians = {key: statistics.median(s[key].start_up for s in results.values() if key in s) for key in keys}
    listed = ", ".join(f"{key} {seconds:.1f} s" for key, seconds in medians.items())
    return f"Not in the table: from starting the interpreter to the end of the first round, {listed} (medians)."


def progress(text: str) -> None:
    """Print a line to standard error."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
