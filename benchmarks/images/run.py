"""A study of fusion rules on images: every cell of a YAML file, its table and its figures.

    python benchmarks/images/run.py CONFIG.yaml [--data DIR] [--budget NAME] [--seeds N] [--out FOLDER]
                                    [--only KEY=VALUE,VALUE ...] [--wandb PROJECT]

DIR holds a folder per data set (fashion_mnist, mnist, cifar10, svhn); without it, the study runs on scikit-learn's
digits. Each finished cell is one JSON file in FOLDER/cells, and no cell is run twice: a study that was killed goes on,
and cells that were run by several commands come into one table.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from federation import check, run_cell
from figures import draw, save
from lightning.pytorch.loggers import WandbLogger
from report import Finished, choices, common_settings, failures, machine, table
from settings import Settings
from store import Store, slug
from study import Study, only, read_study
from tqdm import tqdm

from lightning_fedbayes.callbacks.wandb_account import go_offline_without_account
from lightning_fedbayes.errors import FedBayesError
from lightning_fedbayes.quiet import quietly


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    try:
        study = read_study(options.study)
        every = study.cells(options.budget, options.seeds, offline=options.data is None)
        wanted = only(every, options.only)
        for cell in wanted:
            check(cell, options.data)
    except FedBayesError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    out = options.out or Path(__file__).parent / "results" / f"{study.name}_{options.budget}"
    store = Store(out / "cells", study.factors)
    train(study, [cell for cell in wanted if store.get(cell) is None], store, options, command(given))
    finished = {cell: result for cell in every if (result := store.get(cell)) is not None}
    print(f"\n{write(study, options.budget, finished, out)}\n\nWritten to {out}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, metavar="CONFIG.yaml", help="the study, see configs/")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with the data; digits without it")
    parser.add_argument("--budget", default="laptop", metavar="NAME", help="one of the study's budgets (laptop)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="number of repetitions (3)")
    parser.add_argument("--only", nargs="+", default=[], metavar="KEY=VALUE,VALUE", help="cells with these settings")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the results go (results/STUDY_BUDGET)")
    parser.add_argument("--wandb", metavar="PROJECT", help="one W&B run per cell, offline without an account")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error("--seeds: at least 1")
    return options


def train(
    study: Study, cells: Sequence[Settings], store: Store, options: argparse.Namespace, started: str
) -> None:
    """Run the cells and keep each result at once; a cell that the package refuses while it trains is kept as such."""
    with tqdm(cells, unit="cell") as bar:
        for cell in bar:
            bar.set_postfix_str(slug(cell, study.factors))
            logger = wandb_run(study, cell, options, store.folder.parent) if options.wandb else None
            try:
                result = run_cell(cell, options.data, logger)
            except FedBayesError as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            if logger is not None:
                logger.experiment.finish()
            store.put(cell, {**result, "command": started, "machine": machine()})


def wandb_run(study: Study, cell: Settings, options: argparse.Namespace, folder: Path) -> WandbLogger:
    """The W&B run of a cell, in the group of its study."""
    go_offline_without_account()
    folder.mkdir(parents=True, exist_ok=True)
    group, name = f"{study.name}_{options.budget}", slug(cell, study.factors)
    logger = WandbLogger(project=options.wandb, group=group, name=name, save_dir=folder)
    logger.log_hyperparams({"cell": cell.as_dict()})
    return logger


def write(study: Study, budget: str, finished: Finished, out: Path) -> str:
    """Write the report and the figures of all cells that are finished; returns the report."""
    factors = [name for name in study.factors if name != "dataset"]
    seeds = sorted({cell.seed for cell in finished})
    engines = sorted({result["engine"] for result in finished.values() if "engine" in result})
    minutes = sum(result.get("seconds", 0.0) for result in finished.values()) / 60
    changed = ", ".join(f"{name} {value}" for name, value in study.budgets[budget].items()) or "nothing"
    parts = [
        f"# {study.title}",
        "\n".join(f"`{line}`" for line in dict.fromkeys(result["command"] for result in finished.values())),
        f"Budget **{budget}**, which changes: {changed}. Seeds {', '.join(map(str, seeds))} (network, partition, order "
        "and noise); mean ± standard error over the seeds, of the test part.",
        f"Settings: {common_settings(finished, study.factors)}.",
        f"{'; '.join(dict.fromkeys(result['machine'] for result in finished.values()))}. {minutes:.1f} minutes for "
        f"{len(finished)} cells. Engine: {', '.join(engines)}.",
    ]
    if study.source:
        parts.append(f"Published: {study.source}")
    for dataset in dict.fromkeys(cell.dataset for cell in finished):
        of_one = {cell: result for cell, result in finished.items() if cell.dataset == dataset}
        parts += [f"## {dataset}", table(of_one, factors, study.metrics, study.published)]
        good = {cell: result for cell, result in of_one.items() if "scores" in result}
        for number, spec in enumerate(study.figures if good else ()):
            figure, file = draw(spec, good), f"{dataset}_{number}_{spec['kind']}.png"
            if figure is not None:
                save(figure, out / file)
                parts.append(f"![{spec['kind']}]({file})")
    parts += [part for part in (choices(finished), failures(finished, study.factors)) if part]
    text = "\n\n".join(parts)
    (out / "report.md").write_text(f"{text}\n")
    return text


def command(arguments: Sequence[str]) -> str:
    """How a study was started, without the folders of this machine."""
    folders = {"--data": "DIR", "--out": "FOLDER"}
    shown = [folders.get(before, each) for before, each in zip(["", *arguments], arguments)]
    return " ".join(["python benchmarks/images/run.py", *map(shlex.quote, shown)])


if __name__ == "__main__":
    with quietly():
        main()
