"""How far a federation ends from the posterior of the pooled data: fusion rules × prior, and sites.

    python -m benchmarks.posterior.run [--only logistic|digits|fashion_mnist] [--data DIR] [--out FOLDER]

Two of the data sets ship with scikit-learn; FashionMNIST lies in DIR or is downloaded into it, and without --data its
cells are left out. Each finished cell is one line of FOLDER/cells.jsonl, and no cell is run twice: a run that was
killed goes on where it stopped. The tables are written into README.md, or with --out into FOLDER/tables.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import lightning_fedbayes as fb
from benchmarks import cells as study
from benchmarks.page import write
from benchmarks.posterior import images, logistic
from benchmarks.posterior.report import BAR_SPLIT, curves, tables
from lightning_fedbayes import GaussianPosterior
from lightning_fedbayes.core.quiet import quietly

HERE = Path(__file__).parent
ROUNDS = 50
"""Of logistic regression."""
RULES = ("weighted_average", "reverse_kl_barycenter", "conflation")
MORE_RULES = (
    "linear_pool",
    "weighted_average",
    "wasserstein_barycenter",
    "log_variance_average",
    "conflation",
    "weighted_conflation",
    "weighted_sum",
    "distributed_weight_consolidation",
)
"""Those of the images. ``gaussian_fit`` has no variance where clients agree, and so no prior="global"; the last one
refuses to fuse where clients are less certain than the global posterior, as with a KL weight of 0.1."""
DEFAULT = "reverse_kl_barycenter"
PRIORS = ("fixed", "global")


class Reset(fb.Sites):
    """Sites whose clients begin every round with a new optimizer."""

    keeps_optimizer = False


VARIANTS: dict[str, dict[str, Any]] = {
    "sites, reset": {"fusion": Reset()},
    f"{DEFAULT}, keep": {"fusion": DEFAULT, "keep": ["optimizer"]},
    "fedavg, keep": {"fusion": "fedavg", "keep": ["optimizer"]},
    "pooled": {"partition": images.POOLED},
    "pooled, short": {"partition": images.POOLED, "batches": 31},
    "pooled, short, keep": {"partition": images.POOLED, "batches": 31, "keep": ["optimizer"]},
}
"""Rows of the images' tables that are more than a rule: its options, what clients do with their optimizers' state, or
rounds of one client with all data, in "short" ones of as many batches as those of the average client."""


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
    for split in logistic.SPLITS:
        found += of("logistic", split, ["sites"], ["fixed"], 5)
        found += of("logistic", split, RULES, PRIORS, 1)
    found += of("digits", "none", ["pooled"], ["fixed"], 5)
    for split in images.SPLITS:
        found += of("digits", split, ["sites"], ["fixed"], 5 if split == BAR_SPLIT else 3)
        found += of("digits", split, RULES, PRIORS, 1)
    found += of("digits_hybrid", "Dirichlet(0.1)", ["sites"], ["fixed"], 3)
    found += of("fashion_mnist", "none", ["pooled", "pooled, short", "pooled, short, keep"], ["fixed"], 3)
    for split in images.SPLITS:
        each = 1 if split == "IID" else 3
        found += of("fashion_mnist", split, ["sites", "fedavg"], ["fixed"], each)
        found += of("fashion_mnist", split, [DEFAULT], ["global"], each)
        if split != "IID":
            found += of("fashion_mnist", split, ["sites, reset", "fedavg, keep"], ["fixed"], 1)
            found += of("fashion_mnist", split, [f"{DEFAULT}, keep", *MORE_RULES], ["global"], 1)
            found += of("fashion_mnist", split, [DEFAULT, "gaussian_fit"], ["fixed"], 1)
    found += of("fashion_mnist_tempered", "none", ["pooled"], ["fixed"], 3)
    for split in ("Dirichlet(0.5)", "Dirichlet(0.1)"):
        found += of("fashion_mnist_tempered", split, ["sites"], ["fixed"], 3)
        found += of("fashion_mnist_tempered", split, [DEFAULT], ["global"], 3)
        found += of("fashion_mnist_tempered", split, MORE_RULES[:-1], ["global"], 1)
        found += of("fashion_mnist_tempered", split, [DEFAULT, "gaussian_fit"], ["fixed"], 1)
    return found


def of(study: str, split: str, rules: Sequence[str], priors: Sequence[str], seeds: int) -> list[Cell]:
    """Return the cells of all combinations."""
    return [Cell(study, split, rule, prior, seed) for rule in rules for prior in priors for seed in range(seeds)]


@cache
def breast_cancer() -> tuple[logistic.TensorDataset, GaussianPosterior]:
    """Return the examples and their pooled posterior."""
    data = logistic.breast_cancer()
    return data, logistic.pooled_posterior(data)


def result_of(cell: Cell, folder: Path | None = None) -> dict[str, Any]:
    """Run a cell, with the files of images in ``folder``."""
    options = dict(VARIANTS.get(cell.rule, {"fusion": cell.rule}))
    if cell.prior == "global":
        options["fusion"] = fb.methods.Averaging(options["fusion"], "global")
    if cell.study == "logistic":
        return logistic.run(*breast_cancer(), logistic.SPLITS[cell.split], ROUNDS, cell.seed, **options)
    partition = options.pop("partition", images.SPLITS.get(cell.split))
    bayesian = not cell.rule.startswith("fedavg")
    return images.run(images.STUDIES[cell.study], partition, cell.seed, folder, bayesian=bayesian, **options)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("logistic", *images.STUDIES), help="one of the studies")
    parser.add_argument("--data", type=Path, help="folder of FashionMNIST's files, which are downloaded if missing")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the fastest for models this small
    file = options.out / "cells.jsonl"
    done = study.read(file, Cell)
    todo = [cell for cell in cells() if cell not in done and options.only in (None, cell.study)]
    if options.data is None:
        todo = [cell for cell in todo if not cell.study.startswith("fashion_mnist")]
    todo = sorted(todo, key=lambda cell: cell.seed)  # a run that is killed leaves whole tables
    study.run(file, todo, lambda cell: result_of(cell, options.data))
    results = study.in_order(study.read(file, Cell), cells())
    text = tables(results)
    curves(results, options.out / "kl.png")
    write(text, options.out, HERE)


if __name__ == "__main__":
    with quietly():
        main()
