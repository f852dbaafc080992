"""The command line as a user meets it: what runs, what is printed, and one line for every mistake."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

import lightning_fedbayes as fb
from lightning_fedbayes.cli import main
from lightning_fedbayes.cli.federation import FederationCLI
from lightning_fedbayes.cli.main import COMMANDS, EXTRA

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
DIGITS = str(CONFIGS / "digits.yaml")
QUICK = ("--trainer.max_epochs=1", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false",
         "--trainer.accelerator=cpu", "--trainer.num_sanity_val_steps=0")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*dirpath has changed.*",  # of checkpoints that another run wrote
    "ignore::DeprecationWarning:lightning.pytorch.cli",  # Lightning against newer jsonargparse
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(capsys, *arguments):
    """What a command that must be refused prints: one line on stderr."""
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    return error[-1]


# -- what is asked of it -----------------------------------------------------------------------------------------------


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
    assert len(shown.splitlines()) < 85
    assert max(map(len, shown.splitlines())) <= 115


def test_the_help_of_fit_names_every_argument_of_the_federation_and_every_class(capsys):
    main(["fit", "--help"])
    shown = capsys.readouterr().out
    for name in ("partition", "fusion", "weighting", "adversaries", "local_epochs", "max_failed_rounds"):
        assert f"--federation.{name} " in shown
    assert "--federation.seed" not in shown  # there is one seed, seed_everything
    for name in ("HybridBayesianClassifier", "DigitsDataModule", "max_epochs", "--seed_everything"):
        assert name in shown
    assert ":class:" not in shown
    assert "``" not in shown


def test_the_help_of_a_class_lists_its_arguments(capsys):
    assert main(["fit", "--federation.partition.help", "DirichletPartition"]) == 0
    shown = capsys.readouterr().out
    assert "arguments of lightning_fedbayes.DirichletPartition:" in shown
    assert "--federation.partition.alpha " in shown


# -- federations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["digits", "diabetes", "untrusted"])
def test_an_example_trains_and_leaves_its_figures_and_configuration(name, elsewhere, capsys):
    assert main(["fit", "--config", str(CONFIGS / f"{name}.yaml"), *QUICK]) == 0
    folder = elsewhere / "outputs" / "fedbayes" / "version_0"
    assert str(folder.relative_to(elsewhere)) in capsys.readouterr().out
    assert (folder / "metrics.csv").is_file()
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["trainer"]["max_epochs"] == 1
    assert not (elsewhere / "config.yaml").exists()


@pytest.mark.parametrize("name", ["digits", "diabetes", "untrusted"])
def test_what_print_config_prints_describes_the_same_federation(name, elsewhere, capsys):
    def printed(file):
        assert main(["fit", "--config", str(file), "--print_config"]) == 0
        return capsys.readouterr().out

    first = printed(CONFIGS / f"{name}.yaml")
    (elsewhere / "again.yaml").write_text(first)
    assert printed(elsewhere / "again.yaml") == first
    given, whole = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), yaml.safe_load(first)
    assert contains(whole, given)


def contains(whole, part):
    """Whether every value of ``part`` is in ``whole``; classes may have got their full path."""
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    return whole == part or (isinstance(part, str) and str(whole).endswith(f".{part}"))


def test_the_file_makes_the_federation_that_python_would():
    made = FederationCLI(["--config", str(CONFIGS / "untrusted.yaml"), *QUICK, "--seed_everything=5"], run=False)
    federation = next(each for each in made.trainer.callbacks if isinstance(each, fb.FederatedBayes))
    by_hand = fb.FederatedBayes(fb.IIDPartition(10), fusion=fb.Reliability("ivar_vb", then="reverse_kl_barycenter"),
                                adversaries=fb.GaussianVector(clients=0.3), seed=5)
    assert federation.settings() == by_hand.settings()
    assert isinstance(made.model, fb.HybridBayesianClassifier)
    assert [layer.out_features for layer in made.model.network if hasattr(layer, "out_features")] == [50, 10]


def test_one_seed_decides_everything():
    def made(seed):
        command = ["--config", DIGITS, "--trainer.logger=false", f"--seed_everything={seed}"]
        cli = FederationCLI(command, run=False)
        federation = next(each for each in cli.trainer.callbacks if isinstance(each, fb.FederatedBayes))
        return federation.seed, next(cli.model.parameters())

    (seed, first), (_, again), (other, different) = made(1), made(1), made(2)
    assert (seed, other) == (1, 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, different)


def test_options_win_over_the_file_and_a_name_replaces_a_rule_object():
    config = str(CONFIGS / "untrusted.yaml")
    made = FederationCLI(["--config", config, "--federation.fusion=rklb", "--trainer.logger=false"], run=False)
    federation = next(each for each in made.trainer.callbacks if isinstance(each, fb.FederatedBayes))
    assert federation.settings()["fusion"] == "reverse_kl_barycenter"


def test_a_checkpoint_is_scored_and_its_predictions_are_kept(elsewhere, capsys):
    config = ["--config", str(CONFIGS / "diabetes.yaml"), *QUICK]
    assert main(["fit", *config]) == 0
    checkpoint = elsewhere / "outputs" / "fedbayes" / "version_0" / "checkpoints" / "last.ckpt"
    assert checkpoint.is_file()
    for stage in ("validate", "test"):
        capsys.readouterr()
        assert main([stage, *config, "--ckpt_path", str(checkpoint)]) == 0
        assert "rmse" in capsys.readouterr().out
    assert main(["predict", *config, "--ckpt_path", str(checkpoint)]) == 0
    (file,) = elsewhere.glob("outputs/fedbayes/*/predictions.pt")
    batches = torch.load(file, weights_only=True)
    data = fb.DiabetesDataModule()
    data.setup()
    assert sum(len(batch["mean"]) for batch in batches) == len(data.validation)
    for batch in batches:  # of a bootstrap, the clients' networks are the samples
        torch.testing.assert_close(batch["samples"].mean(0), batch["mean"])
        torch.testing.assert_close(batch["aleatoric"] + batch["epistemic"], batch["variance"])


def test_a_run_without_a_folder_of_its_own_leaves_the_users_files_alone(elsewhere):
    mine = elsewhere / "config.yaml"
    mine.write_text(Path(DIGITS).read_text())
    options = ("--trainer.logger=false", "--trainer.enable_checkpointing=false", "--federation.fraction=0.3")
    assert main(["fit", "--config", str(mine), *QUICK, *options]) == 0
    assert mine.read_text() == Path(DIGITS).read_text()


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--federation.fuson=a"], "unknown option 'federation.fuson': did you mean 'federation.fusion'?"),
        (["--trainer.max_epoch=1"], "did you mean 'trainer.max_epochs'?"),
        (["--optimzer=Adam"], "did you mean 'optimizer'?"),
        (["--federation.fusion=rklbb"], "unknown fusion rule 'rklbb': did you mean 'rklb'?"),
        (["--federation.weighting=equall"], "did you mean 'equal'?"),
        (["--federation.engine=vectorised"], "federation.engine: unknown choice 'vectorised': did you mean "
                                             "'vectorized'?"),
        (["--federation.seed=3"], 'must be given via "seed_everything"'),
        (["--federation.local_epochs=two"], "federation.local_epochs: Expected a <class 'int'>. Got value: two"),
        (["--federation.clients_at_once=two"], "federation.clients_at_once: Expected a <class 'int'>"),
        (["--federation.partition=DirchletPartition"], "did you mean 'DirichletPartition'? Known: ClassPartition, "
                                                       "DirichletPartition, IIDPartition, SizesPartition"),
        (["--federation.partition.cliens=3"], "has no argument 'cliens': did you mean 'clients'?"),
        (["--federation.partition.clients=0"], "clients is 0; a federation has a whole number of clients"),
        (["--federation.adversaries=SignFlp"], "did you mean 'SignFlip'?"),
        (["--federation.adversaries=SignFlip"], "federation.adversaries: clients missing"),
        (["--federation.fusion.class_path=Reliability", "--federation.fusion.init_args.by=ivar_v"],
         "unknown fusion rule 'ivar_v': did you mean 'ivar_vb'?"),
        (["--model=HybridBayesianClasifier"], "model: unknown class 'HybridBayesianClasifier': did you mean "
                                              "'HybridBayesianClassifier'?"),
        (["--model.estimater=flipout"], "has no argument 'estimater': did you mean 'estimator'?"),
        (["--model.estimator=flipot"], "model.estimator: unknown choice 'flipot': did you mean 'flipout'?"),
        (["--model.network=lightning_fedbayes.modules.mpl"], "model.network: 'lightning_fedbayes.modules' has no "
                                                             "'mpl': did you mean 'mlp'?"),
        (["--model.network.featurs=3"], "mlp has no argument 'featurs': did you mean 'features'? Known: features, "),
        (["--data=DigitDataModule"], "did you mean 'DigitsDataModule'?"),
        (["--trainer.logger=WandLogger"], "did you mean 'WandbLogger'? Known: CSVLogger, "),
        (["--seed_everything=true"], "seed_everything: Expected a <class 'int'>"),
    ],
)
def test_a_mistake_in_an_option_gets_one_line_with_the_nearest(arguments, expected, capsys):
    assert expected in refusal(capsys, "fit", "--config", DIGITS, *arguments)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (("federation:", "federaton:"), "unknown option 'federaton': did you mean 'federation'?"),
        (("local_epochs", "local_epoch"), "did you mean 'federation.local_epochs'?"),
        (("bayesian_last", "bayesian_lst"), "has no argument 'bayesian_lst': did you mean 'bayesian_last'?"),
        (("federation:", "federation: ["), "config"),
    ],
)
@pytest.mark.parametrize("command", [["fit", "--config"], ["compare", "--fusion=rklb"]], ids=["fit", "compare"])
def test_a_mistake_in_the_file_does_too(command, wrong, expected, elsewhere, capsys):
    file = elsewhere / "wrong.yaml"
    file.write_text(Path(DIGITS).read_text().replace(*wrong))
    assert expected in refusal(capsys, *command, str(file))


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


def test_the_package_and_its_list_of_rules_import_neither_jsonargparse_nor_more_than_the_package():
    code = (
        "import sys, time; import lightning_fedbayes; before = set(sys.modules); start = time.process_time()\n"
        "from lightning_fedbayes.cli import main; code = main(['rules']); seconds = time.process_time() - start\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(code, 'jsonargparse' in sys.modules, sorted(new), seconds < 0.5)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.splitlines()[-1] == "0 False ['lightning_fedbayes'] True", run.stdout[-300:] + run.stderr[-300:]


@pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="an installed package has no pyproject.toml")
def test_the_command_is_installed_as_fedbayes():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["fedbayes"].partition(":")
    assert getattr(importlib.import_module(module), name) is main
