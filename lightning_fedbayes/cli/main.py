"""Entry point of ``fedbayes``: run a command, print mistakes in one line."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_fedbayes.cli.messages import Options, check_file
from lightning_fedbayes.core.errors import FedBayesError, nearest
from lightning_fedbayes.core.quiet import environment

OVERVIEW = """\
usage: fedbayes COMMAND ... | fedbayes COMMAND --help

Federated Bayesian deep learning from the command line.

one federation, from a YAML file:
  fit       train it, round by round
  validate  score a checkpoint on the validation data
  test      score a checkpoint on the test data
  predict   predict with a checkpoint

fusion rules:
  rules     list them
  compare   run one YAML file under several methods and rules: a table and a picture
  sweep     print a W&B sweep file: one YAML file under several values of its keys

results:
  report    write one page about a run: curves, calibration, clients, traffic

this computer:
  doctor    print versions, and which engines and extras work

Example: fedbayes fit --config examples/configs/digits.yaml --federation.fusion rklb
"""

STAGES = ("fit", "validate", "test", "predict")
COMMANDS = (*STAGES, "rules", "compare", "sweep", "report", "doctor")
EXTRA = ("jsonargparse", "docstring_parser")
"""Modules that LightningCLI needs, from ``pip install lightning-fedbayes[cli]``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Print one line on stderr if it cannot be run.

    Args:
        argv: arguments without the program's name. None: of the process.

    Returns: exit code: 0. 1 if a run of a comparison failed. 2 if command line, YAML file or federation are unusable.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except (FedBayesError, FileNotFoundError) as error:
        print(f"fedbayes: {error}", file=sys.stderr)
        return 2
    except SystemExit as finished:  # after --help and --print_config
        return finished.code if isinstance(finished.code, int) else 0


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(OVERVIEW, end="")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        raise FedBayesError(f"unknown command '{command}': {nearest(command, COMMANDS)}")
    # late imports: torch and Lightning take seconds, and jsonargparse is an optional dependency
    if command == "rules":
        Options("rules", "List every fusion rule: its name, its aliases, what it does, what it needs.").parse(rest)
        from lightning_fedbayes.cli.rules import listing

        print(listing())
        return 0
    reads_yaml = command not in ("report", "doctor")
    if reads_yaml and any(importlib.util.find_spec(module) is None for module in EXTRA):
        raise FedBayesError(f"'fedbayes {command}' reads YAML with jsonargparse: pip install lightning-fedbayes[cli]")
    if reads_yaml and not sys.flags.safe_path:  # classes of the present folder, as `python -m` finds them
        sys.path.insert(0, os.getcwd())
    if command not in STAGES:
        return getattr(importlib.import_module(f"lightning_fedbayes.cli.{command}"), command)(rest)
    for argument, following in zip(rest, [*rest[1:], ""]):  # before seconds of imports
        name, _, value = argument.partition("=")
        file = value or following
        if name == "--config" and file.endswith((".yaml", ".yml")):
            check_file(Path(file))
    from lightning_fedbayes.cli.federation import FederationCLI

    with environment(WANDB_JOB_TYPE=os.environ.get("WANDB_JOB_TYPE", command)):  # for a logger without one in the file
        FederationCLI(arguments)
    return 0
