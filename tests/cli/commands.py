"""Example files, options and warnings that the tests of the commands share."""

from pathlib import Path

import pytest

from lightning_fedbayes.cli import main

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
DIGITS = str(CONFIGS / "digits.yaml")
QUICK = (
    "--trainer.max_epochs=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.accelerator=cpu",
    "--trainer.num_sanity_val_steps=0",
)
lightnings_warnings = pytest.mark.filterwarnings(
    "ignore:.*dirpath has changed.*",  # of checkpoints that another run wrote
    "ignore::DeprecationWarning:lightning.pytorch.cli",  # Lightning against newer jsonargparse
)


def refusal(capsys, *arguments):
    """Return the last line on stderr of a command that must be refused."""
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    return error[-1]
