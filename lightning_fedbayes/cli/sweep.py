"""``fedbayes sweep``: a W&B sweep file that runs one configuration under several values of its keys."""

from pathlib import Path
from typing import Any

import yaml

from lightning_fedbayes.cli.messages import Options, check_file
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.core.quiet import quietly

DESCRIPTION = """\
Print a sweep file for W&B: every combination of the values that you give for keys of CONFIG, as in
--federation.fusion fedavg,sites --model.learning_rate 0.01,0.03. Put it into a file: 'wandb sweep FILE' prints the
command of an agent, which runs 'fedbayes fit' for one combination after the other.
"""
LOGGER = ("--trainer.logger=WandbLogger", "--trainer.logger.init_args.name=null")
"""Options of each run. W&B names it."""


def sweep(arguments: list[str]) -> int:
    """Print the sweep file. Raise FedBayesError if a value cannot be used."""
    options = Options("sweep", DESCRIPTION)
    options.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, as for 'fedbayes fit --config'")
    options.add_argument("--metric", metavar="NAME", default="val/nll", help="figure to compare (default: val/nll)")
    values, changes = options.parse_known_args(arguments)
    check_file(values.config)
    parameters: dict[str, dict[str, list[Any]]] = {}
    pairs = [part for each in changes for part in (each.split("=", 1) if each.startswith("--") else [each])]
    for key, text in zip(pairs[::2], pairs[1::2]):
        if not key.startswith("--") or "." not in key:
            options.refuse(key)
        parameters[key[2:]] = {"values": [yaml.safe_load(each) for each in text.split(",")]}
    if not parameters or len(pairs) % 2:
        raise FedBayesError("give keys with values, separated by commas, such as --federation.fusion fedavg,sites")
    from lightning_fedbayes.callbacks.loggers import best_of
    from lightning_fedbayes.cli.federation import DescribedFederation

    file, best = str(values.config), best_of(values.metric)
    if best is None:
        raise FedBayesError(f"--metric {values.metric}: its best value is not known; give val/nll or val/accuracy")
    for key, known in parameters.items():
        for value in known["values"]:
            with quietly():
                DescribedFederation(["--config", file, f"--{key}={value}"], run=False)
    content = {
        "program": "fedbayes",
        "command": ["fedbayes", "fit", "--config", file, *LOGGER, "${args}"],
        "method": "grid",
        "metric": {"name": f"{values.metric}.{best}", "goal": f"{best}imize"},
        "parameters": parameters,
    }
    print(yaml.safe_dump(content, sort_keys=False), end="")
    return 0
