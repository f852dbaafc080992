"""Comparisons: runs, repeated starts, mistakes, and the files that are written."""

import json
import math
import statistics
from pathlib import Path

import pytest
import wandb
import yaml

from lightning_fedbayes.cli import compare as module
from lightning_fedbayes.cli import main, results
from lightning_fedbayes.cli.results import Run, metrics_of, read_curves
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.fusion import unregister_fusion
from lightning_fedbayes.methods import unregister_method
from tests.callbacks.wandb_file import go_offline, read_run
from tests.cli.commands import DIGITS, QUICK, lightnings_warnings

pytestmark = lightnings_warnings


@pytest.fixture
def trained(monkeypatch):
    """Stands in for training: keeps (rule, seed) of each run; a rule named dwc fails."""
    runs = []

    def train(settings, fusion, seed, folder, project):
        runs.append((fusion, seed))
        if fusion == "distributed_weight_consolidation":
            raise FusionError("not positive")
        return Run(fusion, seed, {"val/nll": [1.0 + seed, len(runs) / 8], "federation/seconds": [3.0, 1.0]})

    monkeypatch.setattr(module, "_train", train)
    return runs


@pytest.mark.slow
def test_a_comparison_from_start_to_end(elsewhere, capsys, monkeypatch):
    go_offline(monkeypatch, elsewhere)
    quick = [*QUICK, "--trainer.max_epochs=2", "--federation.fraction=0.3", "--trainer.enable_checkpointing=false"]
    assert main(["compare", DIGITS, "--fusion=fedavg,rklb", *quick, "--output=here", "--wandb=trial"]) == 0
    shown = capsys.readouterr().out
    folder = elsewhere / "here"
    table = (folder / "table.md").read_text()
    assert table.strip() in shown
    names = ["weighted_average", "reverse_kl_barycenter"]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == names
    assert (folder / "learning_curves.png").stat().st_size > 20000
    runs = [read_run(path) for path in (folder / "runs" / "wandb").glob("offline-run-*/run-*.wandb")]
    expected = [("here", "fit", f"{name}-seed_0") for name in sorted(names)]
    assert sorted((run.group, run.job_type, run.name) for run in runs) == expected
    configuration, runs = results.load(folder)
    assert configuration["trainer"]["max_epochs"] == 2
    assert [(run.fusion, run.seed) for run in runs] == [(name, 0) for name in names]
    first, second = runs
    # same clients, same order, same noise; only the fusion differs
    assert first.curves["federation/train_loss"][0] == second.curves["federation/train_loss"][0]
    assert first.curves["val/nll"] != second.curves["val/nll"]
    assert len(first.curves["val/nll"]) == 2
    assert first.curves == read_curves(folder / "runs" / "weighted_average" / "seed_0" / "metrics.csv")


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on_where_it_was(trained, monkeypatch):
    train = module._train

    def interrupted(settings, fusion, seed, folder, project):
        if fusion == "conflation":
            raise KeyboardInterrupt
        return train(settings, fusion, seed, folder, project)

    command = ["compare", DIGITS, "--fusion=fedavg,conflation", "--output=here"]
    monkeypatch.setattr(module, "_train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(command)
    monkeypatch.setattr(module, "_train", train)
    assert main(command) == 0
    assert trained == [("weighted_average", 0), ("conflation", 0)]


MINE = """
import lightning_fedbayes as fb
from lightning_fedbayes.fusion import register_fusion
from lightning_fedbayes.methods import register_method

@register_fusion("first_client")
def first(posteriors, weights, previous):
    return posteriors[0]

@register_method("near")
class Near(fb.methods.FedProx):
    pass

class Net(fb.HybridBayesianClassifier):
    pass
"""


def test_methods_count_and_what_a_module_in_the_present_folder_registers(trained, elsewhere):
    (elsewhere / "my_module.py").write_text(MINE)
    (elsewhere / "my.yaml").write_text(Path(DIGITS).read_text().replace("HybridBayesianClassifier", "my_module.Net"))
    try:
        assert main(["compare", "my.yaml", "--fusion=sites,population,first_client,near,rklb"]) == 0
        names = ["sites", "population", "first_client", "near", "reverse_kl_barycenter"]
        assert trained == [(name, 0) for name in names]
        assert main(["fit", "--config", "my.yaml", *QUICK, "--federation.fusion=near"]) == 0
    finally:
        unregister_fusion("first_client")
        unregister_method("near")


SWEEP = ["sweep", DIGITS, "--federation.fusion=sites,rklb", "--model.learning_rate", "0.01,0.03"]


@pytest.mark.slow
def test_a_sweep_runs_as_an_agent_runs_it(elsewhere, capsys, monkeypatch):
    from wandb.sdk.launch.sweeps import utils

    assert main(SWEEP) == 0
    content = yaml.safe_load(capsys.readouterr().out)
    assert content["metric"] == {"name": "val/nll.min", "goal": "minimize"}
    rates = content["parameters"]["model.learning_rate"]["values"]
    assert (content["method"], rates) == ("grid", [0.01, 0.03])
    chosen = {key: {"value": known["values"][-1]} for key, known in content["parameters"].items()}
    words = utils.create_sweep_command(content["command"])
    arguments = utils.create_sweep_command_args({"args": chosen})["args"]
    command = [each for word in words for each in (arguments if word == "${args}" else [word])]
    go_offline(monkeypatch, elsewhere)
    assert command[0] == content["program"] == "fedbayes"
    assert main([*command[1:], *QUICK, f"--trainer.logger.init_args.save_dir={elsewhere}"]) == 0
    (path,) = elsewhere.glob("wandb/offline-run-*/run-*.wandb")
    wandb.finish()
    recorded = read_run(path)
    assert "min" in recorded.defined["val/nll"]
    assert recorded.name != "fedbayes"
    assert recorded.config["federation"]["fusion"] == "reverse_kl_barycenter"
    assert recorded.config["learning_rate"] == 0.03


@pytest.mark.slow
def test_a_rule_that_fails_is_said_and_the_others_go_on(trained, capsys):
    assert main(["compare", DIGITS, "--fusion=dwc,auto", "--output=here"]) == 1
    shown = capsys.readouterr()
    assert "fedbayes: distributed_weight_consolidation, seed 0: not positive" in shown.err
    assert "| auto | 1 |" in shown.out
    main(["compare", DIGITS, "--fusion=dwc", "--output=here"])
    assert trained.count(("distributed_weight_consolidation", 0)) == 2  # not taken for done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([DIGITS, "--fusion=fedavgg"], "did you mean 'fedavg'?"),
        ([DIGITS, "--fusion=fedavg", "--sedes=3"], "unknown argument '--sedes=3': did you mean '--seeds'?"),
        ([DIGITS, "--fusion=fedavg", "--seeds=0"], "--seeds 0: give at least 1"),
        ([DIGITS, "--fusion=fedavg", "--federation.fractoin=1"], "did you mean 'federation.fraction'?"),
        ([DIGITS, "--fusion=,"], "no fusion rule"),
        ([DIGITS], "required: --fusion"),
        (["sweep", DIGITS, "--federation.fusoin=sites"], "did you mean 'federation.fusion'"),
        (["sweep", DIGITS, "--model.learning_rate=0.1,fast"], "Got value: fast"),
        (["sweep", DIGITS, "--metric=federation/seconds", "--seed.x=1"], "its best value is not known"),
        (["sweep", DIGITS], "give keys with values"),
    ],
)
def test_mistakes_are_found_before_anything_runs(arguments, expected, trained, capsys):
    assert main(arguments if arguments[0] == "sweep" else ["compare", *arguments]) == 2
    assert expected in capsys.readouterr().err
    assert not trained
    assert not Path("outputs").exists()


NAN = math.nan


def test_the_table_has_moments_over_seeds_of_the_last_round():
    scores = [0.2, 0.5, 0.9]
    cost = {"seconds": [9.0, 1.0, 2.0], "megabytes_up": [1.0, 2.0, 3.0], "megabytes_down": [4.0, 4.0, 4.0]}
    same = {"val/retained_area_entropy": [1.0], **{f"federation/{name}": value for name, value in cost.items()}}
    runs = [Run("a", seed, {"val/nll": [5.0, score, NAN], **same}) for seed, score in enumerate(scores)]
    columns, rows = results.table([*runs, Run("b", 0, {"val/ece": [0.125]})])
    assert columns == ["fusion", "seeds", "ece", "nll", "s per round", "MB per round"]
    moments = f"{statistics.fmean(scores):.4g} ± {statistics.stdev(scores):.2g}"
    assert rows[0] == ["a", "3", "nan", moments, "2", "6"]
    assert rows[1] == ["b", "1", "0.125", "nan", "nan", "0"]
    assert markdown_table(columns, rows).count("\n") == 3


def test_results_come_back_from_their_file_with_nan(elsewhere):
    runs = [Run("a", 3, {"x": [0.1, NAN, 1e-12], "y": []})]
    results.save(elsewhere, {"trainer": {"max_time": None}}, runs)
    json.loads((elsewhere / results.FILE).read_text(), parse_constant=pytest.fail)  # JSON knows no NaN
    configuration, again = results.load(elsewhere)
    assert configuration == {"trainer": {"max_time": None}}
    assert repr(again) == repr(runs)
    assert [each.name for each in elsewhere.iterdir()] == [results.FILE]


def test_the_last_value_of_an_epoch_is_its_rounds(elsewhere):
    file = elsewhere / "metrics.csv"
    rows = "epoch,step,val/nll,train/nll,round", "0,3,2.0,,", "0,4,,9.0,1.0", "0,5,1.5,,", "2,9,0.5,,", ",9,7,,"
    file.write_text("\n".join(rows))
    curves = read_curves(file)
    assert set(curves) == {"val/nll", "train/nll"}
    assert repr(curves["val/nll"]) == "[1.5, nan, 0.5]"
    assert repr(curves["train/nll"]) == "[9.0, nan, nan]"
    assert metrics_of([Run("conflation", 0, curves)]) == ["val/nll"]
