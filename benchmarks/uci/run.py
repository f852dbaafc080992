"""Tables of [FedAG] on UCI regression data beside the published values.

    python -m benchmarks.uci.run --data DIR [--datasets bostonHousing ...] [--methods network ...] [--splits N]
                                 [--rounds 5] [--local-epochs 40] [--learning-rate RATE] [--out FOLDER]
    python -m benchmarks.uci.run --data DIR --tune [--datasets ...] [--methods linear network] [--splits 5]

DIR holds a folder per data set, as in README.md. All splits and clients of a data set train at once, as one stack of
networks. Scores are kept in FOLDER/scores.json, so that a later run of other rows adds to the tables.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.uci.data import read_splits
from benchmarks.uci.methods import ADAM_RATE, METHODS
from benchmarks.uci.rates import ROW, chosen, tune
from benchmarks.uci.report import Store, machine, write
from benchmarks.uci.scores import scores_of
from benchmarks.uci.training import Plan
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.data import available_datasets

WIDE = ("protein", "year")
"""Data sets with 100 hidden units in the paper."""


def main() -> None:
    arguments = parse()
    datasets = arguments.datasets or list(available_datasets(arguments.data))
    bar = tqdm(desc="rounds", unit="round", total=0)
    store = Store(arguments.out)
    for dataset in datasets:
        for method in arguments.methods or (list(ROW) if arguments.tune else list(METHODS)):
            rounds = 0 if method == "blr" else 1 if method == "linear" else arguments.rounds
            bar.set_postfix_str(f"{dataset} {method}")
            bar.total += rounds
            bar.refresh()
            rate = arguments.learning_rate or chosen(dataset, method)
            hidden = 100 if dataset.lower().startswith(WIDE) else 50
            plan = Plan(rate, arguments.rounds, arguments.local_epochs, hidden, arguments.seed, bar.update)
            torch.manual_seed(arguments.seed)
            if arguments.tune:
                tqdm.write(tune(arguments.data, dataset, method, plan, arguments.splits or 5) + "\n")
            else:
                run(store, arguments.data, dataset, method, plan, arguments.splits)
    bar.close()
    if not arguments.tune:
        print(f"\n{write(store)}\n\nWritten to {arguments.out}: tables.md, settings.md, scores.json")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with a folder per data set")
    parser.add_argument("--datasets", nargs="+", help="names of folders; all by default")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--splits", type=int, help="the first N splits in place of all (of five with --tune)")
    parser.add_argument("--rounds", type=int, default=5, help="communication rounds of networks (5)")
    parser.add_argument("--local-epochs", type=int, default=40, help="passes over a client's data per round (40)")
    parser.add_argument("--learning-rate", type=float, help="of SGD, in place of the chosen one")
    parser.add_argument("--seed", type=int, default=0, help="of shards, initial values and orders (0)")
    parser.add_argument("--tune", action="store_true", help="print the choice of the learning rate")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    arguments = parser.parse_args()
    if arguments.tune and not set(arguments.methods or ROW) <= set(ROW):
        parser.error(f"--tune chooses the rate of SGD, for the methods {' and '.join(ROW)} alone")
    return arguments


def run(store: Store, directory: Path, dataset: str, method: str, plan: Plan, limit: int | None) -> None:
    """Train one method on one data set and put its rows into ``store``."""
    splits = read_splits(directory, dataset, limit)
    outcome = METHODS[method](splits, plan)
    rates = {"blr": "", "linear": f"SGD {plan.rate:g}", "network": f"SGD {plan.rate:g}"}
    for row, (mean, variance) in outcome.predictions.items():
        scores = scores_of(mean, variance, splits.test[1], splits.target_std)
        store.put(dataset, row, {
            "scores": {name: [float(f"{value:.6g}") for value in values] for name, values in scores.items()},
            "examples": len(splits.train[1]), "rounds": outcome.rounds, "local_epochs": plan.local_epochs,
            "seed": plan.seed, "rate": rates.get(method, f"Adam {ADAM_RATE:g}"),
            "hidden": 0 if method in ("blr", "linear") else plan.hidden,
            "engine": outcome.engine, "seconds": round(outcome.seconds, 2), "upload": outcome.upload,
            "command": command(), "machine": machine(),
        })
        tqdm.write(f"{dataset} {row}: NLL {sum(scores['nll']) / splits.number:.3f}, RMSE "
                   f"{sum(scores['rmse']) / splits.number:.3f}, {outcome.seconds:.1f} s")


def command() -> str:
    """Return the command line without the folders of this machine."""
    arguments, folders = sys.argv[1:], {"--data": "DIR", "--out": "FOLDER"}
    shown = [folders.get(before, each) for before, each in zip(["", *arguments], arguments)]
    return " ".join(["python -m benchmarks.uci.run", *shown])


if __name__ == "__main__":
    with quietly():
        main()
