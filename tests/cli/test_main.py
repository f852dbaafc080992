"""Commands: the overview, what is refused, what is imported and installed."""

import importlib.util
import subprocess
import sys

import pytest

from lightning_fedbayes.cli.main import EXTRA
from tests.cli.commands import DIGITS, QUICK, ROOT, lightnings_warnings, refusal

pytestmark = lightnings_warnings


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


@pytest.mark.slow
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
