"""Commands: the overview, what is refused, what is imported and installed."""

import importlib.util
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

import lightning_fedbayes as fb
from lightning_fedbayes.cli import doctor, main
from lightning_fedbayes.cli.main import EXTRA
from tests.cli.commands import DIGITS, QUICK, ROOT, lightnings_warnings, refusal

pytestmark = lightnings_warnings


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rule"], "unknown command 'rule': did you mean 'rules'?"),
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
        "report --help",
        "fitt",
        "fit --config nowhere.yaml",
        "report nowhere",
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--federation.fuson=a"], "unknown option 'federation.fuson': did you mean 'federation.fusion'?"),
        (["--federation.fusion=rklbb"], "unknown fusion rule 'rklbb': did you mean 'rklb'?"),
        (["--federation.engine=vectorised"], "engine: unknown choice 'vectorised': did you mean 'vectorized'?"),
        (["--federation.seed=3"], 'must be given via "seed_everything"'),
        (["--seed_everything=-3"], "seed_everything=-3: give at least 0"),
        (["--seed_everything=4294967296"], "seed_everything=4294967296: give "),
        (["--federation.local_epochs=two"], "federation.local_epochs: Expected a <class 'int'>. Got value: two"),
        (["--federation.partition=DirchletPartition"], "did you mean 'DirichletPartition'? Known: ClassPartition, "),
        (["--federation.partition.cliens=3"], "unknown argument 'cliens': did you mean 'clients'?"),
        (["--federation.partition.clients=0"], "clients=0: give at least 1"),
        (
            ["--federation.fusion.class_path=Reliability", "--federation.fusion.init_args.by=ivar_v"],
            "unknown fusion rule 'ivar_v': did you mean 'ivar_vb'?",
        ),
        (["--model=HybridBayesianClasifier"], "unknown class 'HybridBayesianClasifier': did you mean 'HybridBayesian"),
        (["--model.network=lightning_fedbayes.modules.mpl"], "model.network: unknown name 'mpl': did you mean 'mlp'?"),
        (["--model.network.featurs=3"], "unknown argument 'featurs': did you mean 'features'? Known: features, "),
    ],
)
def test_a_mistake_in_an_option_gets_one_line_with_the_nearest(arguments, expected, capsys):
    assert expected in refusal(capsys, "fit", "--config", DIGITS, *arguments)


def test_all_that_is_installed_works(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert f"lightning-fedbayes {fb.__version__}, Python 3." in said
    assert f"torch {version('torch')}" in said
    assert re.findall(r"engine (\w+): works", said) == ["sequential", "vectorized"]
    for extra in doctor.EXTRAS:
        assert re.search(rf"^{extra}( \(.*\), .*: works|: not installed; .*\[{extra}\])$", said, re.MULTILINE)


def test_what_is_missing_or_broken_is_named(capsys, monkeypatch):
    def found(package):
        if package in ("flwr", "scipy"):
            raise PackageNotFoundError(package)
        return "1.0"

    def refuses(engine):
        raise RuntimeError(f"no {engine}\nhere")

    monkeypatch.setattr(doctor, "version", found)
    monkeypatch.setattr(doctor, "_round", refuses)
    monkeypatch.setattr(doctor, "EXTRAS", {**doctor.EXTRAS, "privacy": ("privacy", "opacus", "no_such_module")})
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "scipy missing" in said
    assert "engine vectorized: does not work: RuntimeError: no vectorized here" in said
    assert "flower: not installed; for a federation over Flower: pip install lightning-fedbayes[flower]" in said
    assert "privacy (opacus 1.0), privacy: does not work: ModuleNotFoundError" in said
