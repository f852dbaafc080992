"""How far a federation ends from the posterior of the pooled data: fusion rules × prior, and sites.

    python -m benchmarks.posterior.run [--only logistic|digits] [--out FOLDER]

The data ship with scikit-learn. Each finished cell is one line of FOLDER/cells.jsonl, and no cell is run twice: a run
that was killed goes on where it stopped. The tables are written into README.md, or with --out into FOLDER/tables.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmarks.posterior import digits, logistic
from benchmarks.posterior.report import BEGIN, END, Results, curves, tables
from lightning_fedbayes import GaussianPosterior
from lightning_fedbayes.quiet import quietly

HERE = Path(__file__).parent
ROUNDS = 50
"""Of logistic regression."""
SEEDS = 5
"""Of sites and of pooled training."""
RULES = ("weighted_average", "reverse_kl_barycenter", "conflation")
FORMS = {"logistic": "pvi", "digits": "bayes_admm"}
"""The published form of sites for each study: each rule says what it is for."""


class Cell(NamedTuple):
    """One federation, or one training on pooled data."""

    study: str
    split: str
    rule: str
    prior: str
    seed: int


def cells() -> list[Cell]:
    """Return all cells, in the order of the tables."""
    found = []
    for study, splits in (("logistic", logistic.SPLITS), ("digits", digits.SPLITS)):
        for split in splits:
            if study == "digits":
                found += [Cell(study, split, "pooled", "fixed", seed) for seed in range(SEEDS)]
            found += [Cell(study, split, "sites", "fixed", seed) for seed in range(SEEDS)]
            found.append(Cell(study, split, FORMS[study], "fixed", 0))
            found += [Cell(study, split, rule, prior, 0) for rule in RULES for prior in ("fixed", "global")]
    return found


@cache
def breast_cancer() -> tuple[logistic.TensorDataset, GaussianPosterior]:
    """Return the examples and their pooled posterior."""
    data = logistic.breast_cancer()
    return data, logistic.pooled_posterior(data)


def result_of(cell: Cell) -> dict[str, Any]:
    """Run a cell."""
    options: dict[str, Any] = {"fusion": cell.rule, "prior": cell.prior}
    if cell.study == "logistic":
        return logistic.run(*breast_cancer(), logistic.SPLITS[cell.split], ROUNDS, cell.seed, **options)
    if cell.rule == "pooled":
        return digits.run(digits.POOLED, cell.seed)
    return digits.run(digits.SPLITS[cell.split], cell.seed, **options)


def read(file: Path) -> Results:
    """Return the finished cells of a file, none if there is no file."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {Cell(**line.pop("cell")): line for line in lines}


def keep(file: Path, cell: Cell, result: dict[str, Any]) -> None:
    """Append a finished cell as one line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    short = {key: [float(f"{each:.5g}") for each in value] if isinstance(value, list) else value
             for key, value in result.items()}
    with file.open("a") as out:
        out.write(json.dumps({"cell": cell._asdict(), **short}, separators=(",", ":")) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("logistic", "digits"), help="one of the two studies")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the fastest for models this small
    file = options.out / "cells.jsonl"
    done = read(file)
    todo = [cell for cell in cells() if cell not in done and options.only in (None, cell.study)]
    with tqdm(sorted(todo, key=lambda cell: cell.seed)) as bar:  # a run that is killed leaves whole tables
        for cell in bar:
            bar.set_postfix_str(f"{cell.study}, {cell.split}, {cell.rule}, {cell.prior}, seed {cell.seed}")
            keep(file, cell, result_of(cell))
    done = read(file)
    results = {cell: done[cell] for cell in cells() if cell in done}
    text = tables(results)
    curves(results, options.out / "kl.png")
    if options.out == HERE / "results":
        include(HERE / "README.md", text)
    else:
        (options.out / "tables.md").write_text(f"{text}\n")
    print(f"\n{text}\n\nWritten to {options.out}")


def include(page: Path, text: str) -> None:
    """Replace what stands between the marks of a page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    with quietly():
        main()
