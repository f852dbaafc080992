"""Federations from YAML files: training, scoring, predicting, and what is written."""

import math
from pathlib import Path

import pytest
import torch
import yaml

import lightning_fedbayes as fb
from lightning_fedbayes.cli import main
from lightning_fedbayes.cli.federation import FederationCLI
from lightning_fedbayes.cli.results import METRICS, read_curves
from lightning_fedbayes.data import DiabetesDataModule
from lightning_fedbayes.fusion import Reliability
from tests.cli.commands import CONFIGS, DIGITS, QUICK, lightnings_warnings

pytestmark = lightnings_warnings


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "diabetes", "untrusted", "calibrated"])
def test_an_example_trains_and_leaves_its_figures_and_configuration(name, elsewhere, capsys):
    assert main(["fit", "--config", str(CONFIGS / f"{name}.yaml"), *QUICK]) == 0
    folder = elsewhere / "outputs" / "fedbayes" / "version_0"
    assert str(folder.relative_to(elsewhere)) in capsys.readouterr().out
    assert all(math.isfinite(each[-1]) for name, each in read_curves(folder / METRICS).items() if name[:4] == "val/")
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["trainer"]["max_epochs"] == 1
    assert not (elsewhere / "config.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "diabetes", "untrusted", "calibrated"])
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
    """Return whether every value of ``part`` is in ``whole``; classes may have their full path there."""
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part or (isinstance(part, str) and str(whole).endswith(f".{part}"))


def test_the_file_makes_the_federation_that_python_would():
    made = FederationCLI(["--config", str(CONFIGS / "untrusted.yaml"), *QUICK, "--seed_everything=5"], run=False)
    federation = next(each for each in made.trainer.callbacks if isinstance(each, fb.FederatedBayes))
    rule = Reliability("ivar_vb", then="reverse_kl_barycenter")
    by_hand = fb.FederatedBayes(fb.IIDPartition(10), fusion=rule, seed=5)
    assert federation.described() == by_hand.described()
    assert isinstance(made.model, fb.HybridBayesianClassifier)
    assert [layer.out_features for layer in made.model.network if hasattr(layer, "out_features")] == [50, 10]


@pytest.mark.parametrize(("given", "labels"), [("diagnosis", "diagnosis"), ("[0, 1, 1]", (0, 1, 1))])
def test_a_file_can_say_where_the_labels_are(given, labels):
    made = FederationCLI(["--config", DIGITS, *QUICK, f"--federation.partition.init_args.labels={given}"], run=False)
    federation = next(each for each in made.trainer.callbacks if isinstance(each, fb.FederatedBayes))
    assert federation.settings.partition.labels == labels


@pytest.mark.slow
def test_one_seed_decides_everything():
    def made(seed):
        command = ["--config", DIGITS, "--trainer.logger=false", f"--seed_everything={seed}"]
        cli = FederationCLI(command, run=False)
        federation = next(each for each in cli.trainer.callbacks if isinstance(each, fb.FederatedBayes))
        return federation.settings.seed, next(cli.model.parameters())

    (seed, first), (_, again), (other, different) = made(1), made(1), made(2)
    assert (seed, other) == (1, 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, different)


@pytest.mark.slow
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
    data = DiabetesDataModule()
    data.setup()
    assert sum(len(batch["mean"]) for batch in batches) == len(data.validation)
    for batch in batches:  # of a bootstrap, the clients' networks are the samples
        torch.testing.assert_close(batch["samples"].mean(0), batch["mean"])
        torch.testing.assert_close(batch["aleatoric"] + batch["epistemic"], batch["variance"])


@pytest.mark.slow
def test_calibration_from_a_file_is_scored_and_used_with_the_checkpoint(elsewhere, capsys):
    config = ["--config", str(CONFIGS / "calibrated.yaml"), *QUICK]
    assert main(["fit", *config]) == 0
    assert "val/scaled/temperature" in capsys.readouterr().out
    checkpoint = elsewhere / "outputs" / "fedbayes" / "version_0" / "checkpoints" / "last.ckpt"
    assert main(["test", *config, "--ckpt_path", str(checkpoint)]) == 0
    scores = figures_of(capsys.readouterr().out)
    assert {"test/scaled/ece", "test/scaled/nll", "test/lac_95/coverage", "test/lac_95/set_size"} <= set(scores)
    assert main(["predict", *config, "--ckpt_path", str(checkpoint)]) == 0
    (file,) = elsewhere.glob("outputs/fedbayes/*/predictions.pt")
    kept = torch.load(checkpoint, weights_only=False)["callbacks"]
    threshold = next(state["threshold"] for key, state in kept.items() if "FederatedConformal" in key)
    for batch in torch.load(file, weights_only=True):
        assert torch.equal(batch["lac_95"], 1 - batch["probs"].double() <= threshold)


def figures_of(printed):
    """Name → value in the table that Lightning prints for a stage."""
    rows = [line.split() for line in printed.replace("│", " ").replace("|", " ").splitlines()]
    return {row[0]: float(row[1]) for row in rows if len(row) == 2 and "/" in row[0]}


def test_a_run_without_a_folder_of_its_own_leaves_the_users_files_alone(elsewhere):
    mine = elsewhere / "config.yaml"
    mine.write_text(Path(DIGITS).read_text())
    options = ("--trainer.logger=false", "--trainer.enable_checkpointing=false", "--federation.fraction=0.3")
    assert main(["fit", "--config", str(mine), *QUICK, *options]) == 0
    assert mine.read_text() == Path(DIGITS).read_text()
