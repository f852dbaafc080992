"""Commands: the overview, what is refused, what is imported and installed."""

import importlib.util
import os
import subprocess
import sys
import tomllib

import pytest

from lightning_fedbayes.cli import federation, main
from lightning_fedbayes.cli.main import COMMANDS, EXTRA
from tests.cli.commands import DIGITS, QUICK, ROOT, lightnings_warnings, refusal

pytestmark = lightnings_warnings


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_overview_names_every_command(arguments, capsys):
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert all(f"  {command} " in shown for command in COMMANDS)
    assert "examples/configs/digits.yaml" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_of_one_page(command, capsys):
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: fedbayes {command}")
    sections = shown.split("\n\n")  # those of classes name all that are imported, those of other tests, too
    assert sum(len(each.splitlines()) + 1 for each in sections if " CLASS, " not in each) < 85
    assert max(map(len, shown.splitlines())) <= 115


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rule"], "unknown command 'rule': did you mean 'rules'?"),
        (["fitt"], "did you mean 'fit'?"),
        (["rules", "--all"], "unknown argument '--all'"),
        (["fit"], "data and model missing: give --config FILE"),
        (["fit", "--config", "nowhere.yaml"], "config: File does not exist"),
        (["validate", "--config", DIGITS, "--ckpt_path=nowhere.ckpt", *QUICK], "not found: nowhere.ckpt"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, expected, capsys):
    assert expected in refusal(capsys, *arguments)


@pytest.mark.parametrize("missing", EXTRA)
@pytest.mark.parametrize("command", ["fit", "compare"])
def test_without_the_extra_the_remedy_is_said(command, missing, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    assert "pip install lightning-fedbayes[cli]" in refusal(capsys, command, "--config", DIGITS)


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "rules --help",
        "compare --help",
        "plot --help",
        "fitt",
        "fit --config nowhere.yaml",
        "plot nowhere",
        "compare nowhere.yaml --fusion rklb",
    ],
)
def test_help_and_simple_mistakes_take_less_than_a_second(command):
    code = (
        "import sys, time; from lightning_fedbayes.cli import main; main(sys.argv[1:]);"
        "print(time.process_time() < 1, {'torch', 'lightning', 'matplotlib'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.splitlines()[-1] == "True set()", run.stdout[-300:] + run.stderr[-300:]


def test_the_list_of_rules_needs_neither_lightning_nor_jsonargparse():
    code = (
        "import sys; from lightning_fedbayes.cli import main;"
        "print(main(['rules']), {'jsonargparse', 'lightning'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.splitlines()[-1] == "0 set()", run.stdout[-300:] + run.stderr[-300:]


@pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="an installed package has no pyproject.toml")
def test_the_command_is_installed_as_fedbayes():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["fedbayes"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


@pytest.mark.parametrize(("given", "found"), [(None, "validate"), ("mine", "mine")])
def test_runs_of_wandb_have_the_stage_as_their_type_unless_the_user_has_set_one(given, found, monkeypatch):
    monkeypatch.setenv("WANDB_JOB_TYPE", given or "")
    if given is None:
        monkeypatch.delenv("WANDB_JOB_TYPE")
    types = []
    monkeypatch.setattr(federation, "FederationCLI", lambda arguments: types.append(os.environ["WANDB_JOB_TYPE"]))
    assert main(["validate"]) == 0
    assert types == [found]
