"""``fedbayes compare``: train one configuration with several methods or fusion rules.

Slow imports stand where they are needed: help and mistakes in the options do without.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from lightning_fedbayes.cli import results
from lightning_fedbayes.cli.messages import Options, check_file
from lightning_fedbayes.cli.results import METRICS, Run, read_curves
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.core.quiet import quietly

DESCRIPTION = """\
Run CONFIG once per method or fusion rule, and seed. Prints a Markdown table of the last round, and saves it
(table.md), all metrics of all rounds (results.json, learning_curves.png), and the CSV files of every run. Runs that are
there already are not repeated. Any other option with a dot in its name, such as --trainer.max_epochs 5, changes the
configuration.
"""


def compare(arguments: list[str]) -> int:
    """Run what is missing, then write table, metrics and picture. Return 1 if a run failed, otherwise 0."""
    options = Options("compare", DESCRIPTION)
    options.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, as for 'fedbayes fit --config'")
    options.add_argument("--fusion", metavar="A,B,C", required=True, help="methods and rules by name, or 'auto'")
    options.add_argument("--seeds", metavar="N", type=int, default=1, help="seeds per rule, from seed_everything on")
    options.add_argument("--output", metavar="FOLDER", type=Path, help="default: outputs/compare/NAME OF CONFIG")
    options.add_argument("--wandb", metavar="PROJECT", help="a W&B run each, too, in a group")
    values, changes = options.parse_known_args(arguments)
    for change in changes:
        if change.startswith("-") and "." not in change:
            options.refuse(change)
    if values.seeds < 1:
        raise FedBayesError(f"--seeds {values.seeds}: give at least 1")
    check_file(values.config)
    names = [name.strip() for name in values.fusion.split(",") if name.strip()]
    if not names:
        raise FedBayesError("--fusion names no fusion rule: give some, separated by commas, such as fedavg,rklb")
    settings = ["--config", str(values.config), *changes]
    folder = values.output or Path("outputs", "compare", values.config.stem)

    with quietly():
        seed, configuration = _described(settings)  # imports the file's modules, which may register methods and rules
    from lightning_fedbayes.methods import get_method

    fusions = list(dict.fromkeys(name if name == "auto" else get_method(name).name for name in names))
    earlier, runs = results.load(folder) if (folder / results.FILE).is_file() else (configuration, [])
    if earlier != configuration:
        raise FedBayesError(f"{folder} has a comparison of another configuration: give another --output, or remove it")
    known = {(run.fusion, run.seed) for run in runs}
    wanted = [(fusion, seed + extra) for fusion in fusions for extra in range(values.seeds)]
    missing = [each for each in wanted if each not in known]
    failures = []
    with tqdm(missing, unit="run", disable=None) as bar, quietly():
        for fusion, each_seed in bar:
            bar.set_description(f"{fusion}, seed {each_seed}")
            try:
                runs.append(_train(settings, fusion, each_seed, folder / "runs", values.wandb))
            except FedBayesError as error:
                failures.append(f"fedbayes: {fusion}, seed {each_seed}: {error}")
            else:
                results.save(folder, configuration, runs)
    if runs:
        from lightning_fedbayes.core.tables import markdown_table

        text = markdown_table(*results.table(runs))
        (folder / "table.md").write_text(f"{text}\n")
        print(f"{text}\n\nResults: {folder}")
        results.draw(folder, runs)
    print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
    return 1 if failures else 0


def _described(settings: list[str]) -> tuple[int, dict[str, Any]]:
    """Return the first seed, and the configuration that all runs of a comparison share, with every default."""
    from lightning_fedbayes.cli.federation import DescribedFederation

    cli = DescribedFederation(settings, run=False)
    configuration = yaml.safe_load(cli.parser.dump(cli.config, format="yaml"))
    del configuration["federation"]["fusion"], configuration["trainer"]["logger"]
    return configuration.pop("seed_everything"), configuration


def _train(settings: list[str], fusion: str, seed: int, folder: Path, project: str | None) -> Run:
    """Train one federation. Its loggers write below ``folder``, to W&B too if there is a ``project``."""
    from lightning_fedbayes.cli.federation import FederationCLI

    files = {"save_dir": str(folder), "name": fusion, "version": f"seed_{seed}"}
    logger = [{"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": files}]
    if project is not None:
        run = {
            "project": project,
            "save_dir": str(folder.resolve()),  # W&B's process keeps the working folder that it began in
            "name": f"{fusion}-seed_{seed}",
            "group": folder.parent.name,
            "job_type": "fit",
        }
        logger.append({"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": run})
    home = folder / fusion / f"seed_{seed}"
    shutil.rmtree(home, ignore_errors=True)  # left by an interrupted run
    given = {
        "federation.fusion": fusion,
        "seed_everything": seed,
        "trainer.logger": json.dumps(logger),
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
    }
    cli = FederationCLI([*settings, *(f"--{key}={value}" for key, value in given.items())], run=False)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    if project is not None:
        cli.trainer.loggers[1].experiment.finish()  # pyright: ignore[reportAttributeAccessIssue]
    return Run(fusion, seed, read_curves(home / METRICS))
