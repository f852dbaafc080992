"""Real federations and usual skews: every method on every federation, scored for each client on its own test part.

    python -m benchmarks.federations.run --data DIR [--only NAME ...] [--seeds 3] [--out FOLDER]
    python -m benchmarks.federations.run --csv FILE --client COLUMN --target COLUMN [--drop COLUMN ...] --out FOLDER

DIR holds, in any folders below it: processed.*.data (UCI Heart Disease), brca.csv and train_test_split.csv (FLamby's
Fed-TCGA-BRCA), hapt_int16.npz, exam.csv, contraception.csv, and FashionMNIST's files. A federation without its files is
left out; those of scikit-learn need none. Each finished cell is one line of FOLDER/cells.jsonl, and no cell is run
twice: a run that was killed goes on where it stopped. The tables are written into README.md, or with --out into
FOLDER/tables.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmarks.federations import published
from benchmarks.federations.data import FEDERATIONS, Federation, from_csv
from benchmarks.federations.methods import METHODS, result_of, tuned
from benchmarks.federations.report import Results, figures, tables
from benchmarks.page import write
from lightning_fedbayes.quiet import quietly

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
    repeated = [Cell(study, method, seed) for study in published.STUDIES if study.split(",")[0] in names
                for method in published.STUDIES[study].methods for seed in published.SEEDS]
    return found + repeated


def read(file: Path) -> Results:
    """Return the finished cells of a file, none if there is no file."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {Cell(**line.pop("cell")): line for line in lines}


def keep(file: Path, cell: Cell, result: dict[str, Any]) -> None:
    """Append a finished cell as one line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps({"cell": cell._asdict(), **short(result)}, separators=(",", ":")) + "\n")


def short(value: Any) -> Any:
    """Round numbers to five digits; NaN becomes None."""
    if isinstance(value, dict):
        return {key: short(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [short(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if value == value else None
    return value


def run(todo: Sequence[Cell], makers: Makers, folder: Path, file: Path) -> None:
    """Run cells, and leave out federations whose files are missing."""
    make = lru_cache(maxsize=2)(lambda name, seed: makers[name](folder, max(seed, 0)))
    done, missing = dict(read(file)), {}
    with tqdm(todo) as bar:
        for cell in bar:
            name = cell.federation.split(",")[0] if cell.federation in published.STUDIES else cell.federation
            if cell in done or name in missing:
                continue
            bar.set_postfix_str(f"{cell.federation}, {cell.method}, seed {cell.seed}")
            try:
                if cell.federation in published.STUDIES:
                    result = published.run(folder, cell.federation, cell.method, cell.seed)
                elif cell.seed == TUNING:
                    result = tuned(make(cell.federation, cell.seed), METHODS[cell.method], 0)
                else:
                    choice = done[Cell(cell.federation, cell.method, TUNING)]
                    result = result_of(make(cell.federation, cell.seed), METHODS[cell.method], choice, cell.seed)
            except FileNotFoundError as error:
                missing[name] = str(error)
                continue
            done[cell] = short(result)
            keep(file, cell, result)
    for name, what in missing.items():
        print(f"{name} is left out: there is no {what} below {folder}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the files")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(FEDERATIONS),
                        help=f"some of the federations: {', '.join(FEDERATIONS)}")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", choices=list(METHODS), default=list(METHODS),
                        help=f"some of the methods: {', '.join(METHODS)}")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--csv", type=Path, help="a table, in place of the federations")
    parser.add_argument("--client", help="its column that names the client")
    parser.add_argument("--target", help="its column to predict")
    parser.add_argument("--drop", nargs="*", default=[], help="its columns that are no features")
    parser.add_argument("--rounds", type=int, nargs="+", help="numbers of rounds to choose from, for a table")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the fastest for models this small
    makers: Makers = dict(FEDERATIONS)
    if options.csv is not None:
        if not (options.client and options.target):
            parser.error("--csv needs --client and --target")
        if options.out == HERE / "results":
            parser.error("--csv needs --out: the page of this folder is of the known federations")
        sizes = {"rounds": tuple(options.rounds)} if options.rounds else {}
        makers = {options.csv.stem: lambda folder, seed: from_csv(
            options.csv, options.client, options.target, seed, options.drop, **sizes)}
    names = options.only or list(makers)
    file = options.out / "cells.jsonl"
    todo = cells(names, options.seeds, options.methods)
    run(todo, makers, options.data, file)
    known = read(file)
    order = cells(list(makers), max((cell.seed for cell in known), default=0) + 1)
    results = {cell: known[cell] for cell in order if cell in known}
    text = tables(results)
    figures(results, options.out)
    write(text, options.out, HERE)


if __name__ == "__main__":
    with quietly():
        main()
