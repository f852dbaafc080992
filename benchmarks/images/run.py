"""A study of fusion rules on images: every cell of a YAML file, its table and its figures.

    python -m benchmarks.images.run CONFIG.yaml [--data DIR] [--budget NAME] [--seeds N] [--out FOLDER]
                                        [--only KEY=VALUE,VALUE ...] [--wandb PROJECT]

DIR holds a folder per data set (fashion_mnist, mnist, cifar10); without it, the study runs on scikit-learn's
digits. Each finished cell is one line of FOLDER/cells.jsonl, and no cell is run twice: a study that was killed goes on
where it stopped, and cells that several commands have run come into one table.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.loggers import WandbLogger
from tqdm import tqdm

from benchmarks.images.cell import check
from benchmarks.images.federation import run_cell
from benchmarks.images.figures import draw, save
from benchmarks.images.report import Finished, choices, common_settings, failures, machine, table
from benchmarks.images.settings import Settings
from benchmarks.images.store import Store
from benchmarks.images.study import Study, only, read_study
from lightning_fedbayes.callbacks.loggers import prepare_wandb
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.core.quiet import quietly


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
    store = Store(out / "cells.jsonl")
    done = store.finished(wanted)
    train(study, [cell for cell in wanted if cell not in done], store, options, command(given))
    store.sort()
    print(f"\n{write(study, options.budget, store.finished(every), out)}\n\nWritten to {out}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
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


def train(study: Study, cells: Sequence[Settings], store: Store, options: argparse.Namespace, started: str) -> None:
    """Run the cells and keep each result at once; the error of a cell that fails while it trains is its result."""
    with tqdm(cells, unit="cell") as bar:
        for cell in bar:
            bar.set_postfix_str(slug(cell, study.factors))
            logger = wandb_run(study, cell, options, store.file.parent) if options.wandb else None
            try:
                result = run_cell(cell, options.data, logger)
            except FedBayesError as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            if logger is not None:
                logger.experiment.finish()
            store.put(cell, {**result, "command": started, "machine": machine()})


def wandb_run(study: Study, cell: Settings, options: argparse.Namespace, folder: Path) -> WandbLogger:
    """Start the W&B run of a cell, in the group of its study."""
    prepare_wandb()
    folder.mkdir(parents=True, exist_ok=True)
    group, name = f"{study.name}_{options.budget}", slug(cell, study.factors)
    logger = WandbLogger(project=options.wandb, group=group, job_type="fit", name=name, save_dir=folder)
    logger.log_hyperparams({"cell": cell.as_dict()})
    return logger


def write(study: Study, budget: str, finished: Finished, out: Path) -> str:
    """Write the report and the figures of all finished cells, and return the report."""
    factors = [name for name in study.factors if name != "dataset"]
    seeds = sorted({cell.seed for cell in finished})
    engines = sorted({result["engine"] for result in finished.values() if "engine" in result})
    minutes = sum(result.get("seconds", 0.0) for result in finished.values()) / 60
    changed = ", ".join(f"{name} {value}" for name, value in study.budgets[budget].items()) or "nothing"
    parts = [
        f"# {study.title}",
        "\n".join(["```console", *dict.fromkeys(result["command"] for result in finished.values()), "```"]),
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
        parts += [f"## {dataset}", table(of_one, factors, study.metrics, study.published_rows)]
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


def slug(cell: Settings, factors: Sequence[str]) -> str:
    """Return a short name of a cell for the progress bar and W&B."""
    parts = [str(getattr(cell, factor)) for factor in factors]
    return re.sub(r"[^a-zA-Z0-9_.]+", "-", "-".join([*parts, f"seed{cell.seed}"]))


def command(arguments: Sequence[str]) -> str:
    """Return the command line without the folders of this machine."""
    folders = {"--data": "DIR", "--out": "FOLDER"}
    shown = [folders.get(before, each) for before, each in zip(["", *arguments], arguments)]
    return " ".join(["python -m benchmarks.images.run", *map(shlex.quote, shown)])


if __name__ == "__main__":
    with quietly():
        main()
