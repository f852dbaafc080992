"""Real federations and usual skews: every method on every federation, scored for each client on its own test part.

    python -m benchmarks.federations.run --data DIR [--only NAME ...] [--seeds 3] [--out FOLDER]
    python -m benchmarks.federations.run --csv FILE ... --target COLUMN [--client COLUMN] [--drop COLUMN ...]
        [--task TASK] [--event COLUMN] [--hidden WIDTH ...] --out FOLDER

DIR holds, in any folders below it: processed.*.data (UCI Heart Disease), brca.csv and train_test_split.csv (FLamby's
Fed-TCGA-BRCA), hapt_int16.npz, exam.csv, contraception.csv, and FashionMNIST's files. A federation without its files is
left out; those of scikit-learn need none. Each finished cell is one line of FOLDER/cells.jsonl, and no cell is run
twice: a run that was killed goes on where it stopped. The tables are written into README.md, or with --out into
FOLDER/tables.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from tqdm import tqdm

from benchmarks import cells as study
from benchmarks.federations import published
from benchmarks.federations.data import FEDERATIONS, Federation, Task, from_csv
from benchmarks.federations.methods import METHODS, result_of, tuned
from benchmarks.federations.report import Results, figures, tables
from benchmarks.page import write
from lightning_fedbayes.core.quiet import quietly

HERE = Path(__file__).parent
TUNING = -1
"""Seed that stands for the choice of the settings, which takes the data of seed 0."""
Makers = dict[str, Callable[[Path, int], Federation]]


class Cell(NamedTuple):
    """One method on one federation with one seed."""

    federation: str
    method: str
    seed: int


def cells(names: Sequence[str], seeds: int, methods: Sequence[str] = tuple(METHODS)) -> list[Cell]:
    """Return all cells, each method's settings first."""
    found = [Cell(name, method, seed) for name in names for method in methods for seed in range(TUNING, seeds)]
    repeated = [
        Cell(study, method, seed)
        for study in published.STUDIES
        if study.split(",")[0] in names
        for method in published.STUDIES[study].methods
        for seed in published.SEEDS
    ]
    return found + repeated


def run(todo: Sequence[Cell], makers: Makers, folder: Path, file: Path, workers: int) -> None:
    """Run cells in some processes, one method on one federation at a time, and leave out those without files."""
    done, jobs = study.read(file, Cell), dict[tuple[str, str], list[Cell]]()
    for cell in todo:
        jobs.setdefault((cell.federation, cell.method), []).append(cell)
    waiting = [own for own in jobs.values() if not done.keys() >= set(own)]
    calls = [
        partial(job, own, makers.get(own[0].federation), folder, {cell: done[cell] for cell in own if cell in done})
        for own in waiting
    ]
    missing = set()
    with tqdm(finished(calls, workers), total=len(calls)) as bar:
        for found, lacks in bar:
            missing |= {lacks} - {""}
            for cell, each in found.items():
                study.keep(file, cell, each)
    for what in sorted(missing):
        print(f"A federation is left out: there is no {what} below {folder}")


def finished(calls: Sequence[Callable[[], Any]], workers: int) -> Iterator[Any]:
    """Yield the results of calls as they come: in this process, or in several of one thread each."""
    if workers == 1:
        for call in calls:
            yield call()
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        try:
            for result in as_completed([pool.submit(call) for call in calls]):
                yield result.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)  # an error is shown at once, not after all other calls
            raise


def job(
    own: Sequence[Cell], make: Callable[[Path, int], Federation] | None, folder: Path, done: Results
) -> tuple[dict[Cell, dict[str, Any]], str]:
    """Return the results of one method's cells that are not done, in order, and the name of a missing file."""
    found: dict[Cell, dict[str, Any]] = {}
    with quietly():
        for cell in own:
            if cell in done:
                continue
            try:
                if make is None:
                    found[cell] = published.run(folder, cell.federation, cell.method, cell.seed)
                    continue
                federation, method = make(folder, max(cell.seed, 0)), METHODS[cell.method]
            except FileNotFoundError as error:
                return found, str(error)
            if not method.suits(federation):
                break
            if cell.seed == TUNING:
                found[cell] = study.short(tuned(federation, method, 0))
            else:
                choice = {**done, **found}[Cell(cell.federation, cell.method, TUNING)]
                found[cell] = result_of(federation, method, choice, cell.seed)
    return found, ""


def table(folder: Path, seed: int, **options: Any) -> Federation:
    """Make the federation of a table, which is not below ``folder``."""
    return from_csv(seed=seed, **options)


def in_order(known: Results, names: Sequence[str]) -> Results:
    """Return finished cells in the order of the tables."""
    order = cells(names, max((cell.seed for cell in known), default=0) + 1)
    return {cell: known[cell] for cell in order if cell in known}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the files")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=list(FEDERATIONS),
        help=f"some of the federations: {', '.join(FEDERATIONS)}",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        choices=list(METHODS),
        default=list(METHODS),
        help=f"some of the methods: {', '.join(METHODS)}",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument(
        "--csv",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="a table, in place of the federations; in several files, whose heads are alike",
    )
    parser.add_argument("--client", help="its column that names the client; of several files each is one without")
    parser.add_argument("--target", help="its column to predict")
    parser.add_argument("--drop", nargs="*", default=[], help="its columns that are no features")
    parser.add_argument(
        "--task",
        choices=get_args(Task),
        help="of a table; else by its target: up to 20 whole values, or text, are classes",
    )
    parser.add_argument("--event", help="its column of 0 and 1, for survival, whose target is the time")
    parser.add_argument(
        "--hidden",
        type=int,
        nargs="*",
        default=[],
        help="widths of hidden layers for a table, whose models are linear without",
    )
    parser.add_argument("--rounds", type=int, nargs="+", help="numbers of rounds to choose from, for a table")
    parser.add_argument("--workers", type=int, default=2, help="number of processes, of one thread each")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the fastest for models this small
    makers: Makers = dict(FEDERATIONS)
    if options.csv is not None:
        if not options.target or not (options.client or len(options.csv) > 1):
            parser.error("--csv needs --target, and --client unless each of several files is a client")
        if options.out == HERE / "results":
            parser.error("--csv needs --out: the page of this folder is of the known federations")
        if options.task == "survival" and options.event is None:
            parser.error("--task survival needs --event")
        if options.event is not None and options.task not in (None, "survival"):
            parser.error(f"--event is of survival, not of --task {options.task}")
        sizes = {"rounds": tuple(options.rounds)} if options.rounds else {}
        first = options.csv[0]
        makers = {
            first.stem if len(options.csv) == 1 else first.resolve().parent.name: partial(
                table,
                files=options.csv,
                client=options.client,
                target=options.target,
                drop=options.drop,
                task=options.task,
                event=options.event,
                hidden=tuple(options.hidden),
                **sizes,
            )
        }
    names = options.only or list(makers)
    file = options.out / "cells.jsonl"
    todo = cells(names, options.seeds, options.methods)
    run(todo, makers, options.data, file, options.workers)
    results = in_order(study.read(file, Cell), list(makers))
    text = tables(results)
    figures(results, options.out)
    write(text, options.out, HERE)


if __name__ == "__main__":
    main()
