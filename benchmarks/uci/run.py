"""Tables of [FedAG] on UCI regression data beside the published values.

    python -m benchmarks.uci.run --data DIR [--datasets bostonHousing ...] [--methods network ...] [--splits N]
                                 [--rounds 5] [--local-epochs 40] [--learning-rate RATE] [--again] [--out FOLDER]
    python -m benchmarks.uci.run --data DIR --tune [--datasets ...] [--methods linear network] [--splits 5]
                                 [--learning-rate RATE ...]

DIR holds a folder per data set, as in README.md. All splits and clients of a data set train at once, as one stack of
networks. Scores are kept in FOLDER/scores.json after every cell (a data set and a method): a command that was stopped
goes on where it was, and one of other cells adds to the tables. Without ``--datasets`` and ``--methods`` it is the
whole study, with the reduced cells of ``plans.py``.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.uci.data import read_splits
from benchmarks.uci.methods import METHODS, ROWS
from benchmarks.uci.plans import plan_of, study
from benchmarks.uci.rates import SGD, optimizer, tune
from benchmarks.uci.report import Store, machine, write
from benchmarks.uci.scores import scores_of
from benchmarks.uci.sets import UCIDataModule, available_datasets
from benchmarks.uci.training import Plan
from lightning_fedbayes.core.quiet import quietly


def main() -> None:
    arguments = parse()
    datasets = arguments.datasets or list(available_datasets(arguments.data))
    methods = arguments.methods or (list(SGD) if arguments.tune else None)
    bar = tqdm(desc="rounds", unit="round")
    store = Store(arguments.out)
    for dataset, method in study(datasets, methods):
        plan, splits = plan_of(dataset, method, arguments.rounds, arguments.local_epochs, arguments.splits)
        plan = plan._replace(seed=arguments.seed, on_round=bar.update, rate=(arguments.learning_rate or [plan.rate])[0])
        bar.set_postfix_str(f"{dataset} {method}")
        torch.manual_seed(arguments.seed)
        if arguments.tune:
            text = tune(arguments.data, dataset, method, plan, arguments.splits or 5, arguments.learning_rate)
            store.add_rates(command(), text)
            continue
        number = UCIDataModule(arguments.data, dataset).num_splits
        wanted = settings(method, plan, min(splits or number, number))
        if arguments.again or not all(store.holds(dataset, row, wanted) for row in ROWS.get(method, (method,))):
            run(store, arguments.data, dataset, method, plan, wanted)
    bar.close()
    if not arguments.tune:
        print(f"\n{write(store)}\n\nWritten to {arguments.out}")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with a folder per data set")
    parser.add_argument("--datasets", nargs="+", help="names of folders; all by default")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--splits", type=int, help="the first N splits in place of all (of five with --tune)")
    parser.add_argument("--rounds", type=int, default=5, help="communication rounds of networks (5)")
    parser.add_argument("--local-epochs", type=int, help="passes over a client's data per round (40, or as plans.py)")
    parser.add_argument("--learning-rate", type=float, nargs="+", help="in place of the chosen; with --tune the grid")
    parser.add_argument("--seed", type=int, default=0, help="of shards, initial values and orders (0)")
    parser.add_argument("--again", action="store_true", help="run cells that are there already, too")
    parser.add_argument("--tune", action="store_true", help="choose learning rates, and add to FOLDER/rates.md")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    arguments = parser.parse_args()
    if arguments.tune and "blr" in (arguments.methods or ()):
        parser.error("--tune chooses learning rates, and 'blr' has none")
    if not arguments.tune and len(arguments.learning_rate or ()) > 1:
        parser.error("several rates are for --tune")
    return arguments


def settings(method: str, plan: Plan, splits: int) -> dict[str, Any]:
    """Return the settings of a cell, by which it is recognised."""
    is_linear = method in ("blr", "linear")
    return {
        "splits": splits,
        "rounds": 1 if is_linear else plan.rounds,
        "local_epochs": 0 if method == "blr" else plan.local_epochs,
        "seed": plan.seed,
        "rate": f"{optimizer(method)} {plan.rate:g}" if optimizer(method) else "",
        "hidden": 0 if is_linear else plan.hidden,
    }


def run(store: Store, directory: Path, dataset: str, method: str, plan: Plan, wanted: dict[str, Any]) -> None:
    """Train one method on one data set and put its rows into ``store``."""
    splits = read_splits(directory, dataset, wanted["splits"])
    outcome = METHODS[method](splits, plan)
    for row in outcome.predictions:
        by_round = [scores_of(*rows[row], splits.test[1], splits.target_std) for rows in outcome.by_round]
        store.put(
            dataset,
            row,
            {
                "scores": {name: [float(f"{value:.6g}") for value in values] for name, values in by_round[-1].items()},
                "by_round": {
                    name: [float(f"{statistics.fmean(each[name]):.4g}") for each in by_round]
                    for name in ("nll", "rmse")
                },
                "examples": len(splits.train[1]),
                **wanted,
                "engine": outcome.engine,
                "seconds": round(outcome.seconds, 2),
                "upload": outcome.upload,
                "command": command(),
                "machine": machine(),
            },
        )
        found = ", ".join(f"{name} {statistics.fmean(by_round[-1][name]):.3f}" for name in ("nll", "rmse"))
        tqdm.write(f"{dataset} {row}: {found}, {outcome.seconds:.1f} s")


def command() -> str:
    """Return the command line without the folders of this machine."""
    arguments, folders = sys.argv[1:], {"--data": "DIR", "--out": "FOLDER"}
    shown = [folders.get(before, each) for before, each in zip(["", *arguments], arguments)]
    return shlex.join(["python", "-m", "benchmarks.uci.run", *shown])


if __name__ == "__main__":
    with quietly():
        main()
