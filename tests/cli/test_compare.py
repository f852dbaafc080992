"""Comparisons: what is run, what is skipped, what comes out."""

from __future__ import annotations

import csv
import json
import math
import statistics
from pathlib import Path

import pytest

from lightning_fedbayes.callbacks.pictures import markdown_table
from lightning_fedbayes.cli import compare as module
from lightning_fedbayes.cli import main, results
from lightning_fedbayes.cli.curves import read_curves, validated
from lightning_fedbayes.cli.plot import curves_of
from lightning_fedbayes.cli.results import Run
from lightning_fedbayes.errors import FedBayesError, FusionError

CONFIG = str(Path(__file__).parents[2] / "examples" / "configs" / "digits.yaml")
NAN = math.nan


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trained(monkeypatch):
    """Stands in for training: keeps (rule, seed) of each run; a rule named dwc fails."""
    runs = []

    def train(settings, fusion, seed, folder):
        runs.append((fusion, seed))
        if fusion == "distributed_weight_consolidation":
            raise FusionError("not positive")
        return Run(fusion, seed, {"val/nll": [1.0 + seed, len(runs) / 8], "federation/seconds": [3.0, 1.0]})

    monkeypatch.setattr(module, "_train", train)
    return runs


def test_a_comparison_from_start_to_end(elsewhere, capsys):
    quick = ["--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--federation.fraction=0.3",
             "--trainer.enable_checkpointing=false", "--federation.local_epochs=1"]
    assert main(["compare", CONFIG, "--fusion=fedavg,rklb", *quick, "--output=here"]) == 0
    shown = capsys.readouterr().out
    folder = elsewhere / "here"
    table = (folder / "table.md").read_text()
    assert table.strip() in shown
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == [
        "weighted_average", "reverse_kl_barycenter"
    ]
    assert (folder / "val_nll_by_round.png").stat().st_size > 5000
    configuration, runs = results.load(folder)
    assert configuration["trainer"]["max_epochs"] == 2
    assert [(run.fusion, run.seed) for run in runs] == [("weighted_average", 0), ("reverse_kl_barycenter", 0)]
    first, second = runs
    # same clients, same order, same noise; only the fusion differs
    assert first.curves["federation/train_loss"][0] == second.curves["federation/train_loss"][0]
    assert first.curves["val/nll"] != second.curves["val/nll"]
    assert len(first.curves["val/nll"]) == 2
    assert first.curves == read_curves(folder / "runs" / "weighted_average" / "seed_0" / "metrics.csv")

    assert main(["plot", "here"]) == 0
    drawn = capsys.readouterr().out.split()
    assert "here/val_accuracy_by_round.png" in drawn
    assert all((elsewhere / file).is_file() for file in drawn)
    assert main(["plot", "here/runs/weighted_average/seed_0"]) == 0
    alone = curves_of(folder / "runs" / "weighted_average" / "seed_0")
    assert alone["val/nll"] == {"nll": first.curves["val/nll"]}
    assert main(["plot", "here/runs"]) == 2
    assert "did you mean here/runs/weighted_average/seed_0?" in capsys.readouterr().err


def test_what_is_done_is_skipped_and_what_is_new_is_added(trained, elsewhere):
    command = ["compare", CONFIG, "--output=here", "--seeds=2"]
    assert main([*command, "--fusion=fedavg"]) == 0
    assert trained == [("weighted_average", 0), ("weighted_average", 1)]
    assert main([*command, "--fusion=eaa,rklb"]) == 0  # eaa is fedavg by another name
    assert trained[2:] == [("reverse_kl_barycenter", 0), ("reverse_kl_barycenter", 1)]
    before = (elsewhere / "here" / "results.json").read_text()
    assert main([*command, "--fusion=llp,nwa,rklb"]) == 0
    assert len(trained) == 4
    assert (elsewhere / "here" / "results.json").read_text() == before


def test_an_interrupted_comparison_goes_on_where_it_was(trained, monkeypatch):
    train = module._train

    def interrupted(settings, fusion, seed, folder):
        if fusion == "conflation":
            raise KeyboardInterrupt
        return train(settings, fusion, seed, folder)

    command = ["compare", CONFIG, "--fusion=fedavg,conflation", "--output=here"]
    monkeypatch.setattr(module, "_train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(command)
    monkeypatch.setattr(module, "_train", train)
    assert main(command) == 0
    assert trained == [("weighted_average", 0), ("conflation", 0)]


def test_another_configuration_needs_another_folder(trained, capsys):
    command = ["compare", CONFIG, "--fusion=fedavg", "--output=here"]
    assert main(command) == 0
    assert main([*command, "--trainer.max_epochs=3"]) == 2
    assert "another configuration" in capsys.readouterr().err
    assert main([*command, "--federation.fusion=conflation"]) == 0  # it is compared, so it is no part of it
    assert len(trained) == 1


def test_a_rule_that_fails_is_said_and_the_others_go_on(trained, capsys):
    assert main(["compare", CONFIG, "--fusion=dwc,auto", "--output=here"]) == 1
    shown = capsys.readouterr()
    assert "fedbayes: distributed_weight_consolidation, seed 0: not positive" in shown.err
    assert "| auto | 1 |" in shown.out
    main(["compare", CONFIG, "--fusion=dwc", "--output=here"])
    assert trained.count(("distributed_weight_consolidation", 0)) == 2  # not taken for done


def test_the_picture_is_of_the_metric_that_is_asked_for(trained, elsewhere, capsys):
    command = ["compare", CONFIG, "--fusion=fedavg", "--output=here"]
    assert main([*command, "--metric=val/nlll"]) == 2
    assert "--metric val/nlll: no run has it; did you mean 'val/nll'?" in capsys.readouterr().err
    assert main([*command, "--metric=val/nll"]) == 0
    assert (elsewhere / "here" / "val_nll_by_round.png").is_file()
    assert len(trained) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([CONFIG, "--fusion=fedavgg"], "did you mean 'fedavg'?"),
        ([CONFIG, "--fusion=fedavg", "--sedes=3"], "unknown argument '--sedes=3': did you mean '--seeds'?"),
        ([CONFIG, "--fusion=fedavg", "--seeds=0"], "--seeds 0: give at least 1"),
        ([CONFIG, "--fusion=fedavg", "--seeds=x"], "invalid int value: 'x'"),
        ([CONFIG, "--fusion=fedavg", "--federation.fractoin=1"], "did you mean 'federation.fraction'?"),
        ([CONFIG, "--fusion=,"], "no fusion rule"),
        ([CONFIG], "required: --fusion"),
        (["nowhere.yaml", "--fusion=fedavg"], "File does not exist"),
    ],
)
def test_mistakes_are_found_before_anything_runs(arguments, expected, trained, capsys):
    assert main(["compare", *arguments]) == 2
    assert expected in capsys.readouterr().err
    assert not trained
    assert not Path("outputs").exists()


def test_the_table_has_moments_over_seeds_of_the_last_round():
    scores = [0.2, 0.5, 0.9]
    runs = [Run("a", seed, {"val/nll": [5.0, score, NAN], "val/retained_area_entropy": [1.0],
                            "federation/seconds": [9.0, 1.0, 2.0],
                            "federation/megabytes_up": [1.0, 2.0, 3.0], "federation/megabytes_down": [4.0, 4.0, 4.0]})
            for seed, score in enumerate(scores)]
    columns, rows = results.table([*runs, Run("b", 0, {"val/ece": [0.125]})])
    assert columns == ["fusion", "seeds", "ece", "nll", "s per round", "MB per round"]
    moments = f"{statistics.fmean(scores):.4g} ± {statistics.stdev(scores):.2g}"
    assert rows[0] == ["a", "3", "nan", moments, "2", "6"]
    assert rows[1] == ["b", "1", "0.125", "nan", "nan", "0"]
    assert markdown_table(columns, rows).count("\n") == 3


def test_curves_are_means_over_seeds():
    runs = [Run("a", 0, {"x": [1.0, NAN]}), Run("b", 0, {"x": [7.0]}), Run("a", 1, {"x": [2.0, 4.0]})]
    curves = results.mean_curves(runs, "x")
    assert curves["a"][0] == 1.5
    assert math.isnan(curves["a"][1])
    assert curves["b"] == [7.0]


def test_results_come_back_from_their_file_with_nan(elsewhere):
    runs = [Run("a", 3, {"x": [0.1, NAN, 1e-12], "y": []})]
    results.save(elsewhere, {"trainer": {"max_time": None}}, runs)
    json.loads((elsewhere / results.FILE).read_text(), parse_constant=pytest.fail)  # JSON knows no NaN
    configuration, again = results.load(elsewhere)
    assert configuration == {"trainer": {"max_time": None}}
    assert repr(again) == repr(runs)
    assert [each.name for each in elsewhere.iterdir()] == [results.FILE]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"configuration": 1, "runs": [{}]}'])
def test_another_file_of_that_name_is_refused(content, elsewhere, capsys):
    (elsewhere / results.FILE).write_text(content)
    with pytest.raises(FedBayesError, match="not written by 'fedbayes compare'"):
        results.load(elsewhere)
    assert main(["plot", str(elsewhere)]) == 2


# -- the figures of one run --------------------------------------------------------------------------------------------


def write(file, *rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(file, "w", newline="") as lines:
        writer = csv.DictWriter(lines, names)
        writer.writeheader()
        writer.writerows(rows)


def test_the_last_value_of_an_epoch_is_its_rounds(elsewhere):
    file = elsewhere / "metrics.csv"
    write(file, {"epoch": 0, "step": 3, "val/nll": 2.0}, {"epoch": 0, "step": 4, "train/nll": 9.0, "round": 1.0},
          {"epoch": 0, "step": 5, "val/nll": 1.5}, {"epoch": 2, "step": 9, "val/nll": 0.5}, {"step": 9, "val/nll": 7})
    curves = read_curves(file)
    assert set(curves) == {"val/nll", "train/nll"}
    assert repr(curves["val/nll"]) == "[1.5, nan, 0.5]"
    assert repr(curves["train/nll"]) == "[9.0, nan, nan]"
    assert validated(curves) == ["val/nll"]


@pytest.mark.parametrize("rows", [(), ({"epoch": 0, "train/nll": 1.0},)])
def test_a_run_without_validation_has_nothing_to_draw(rows, elsewhere, capsys):
    write(elsewhere / "metrics.csv", *rows)
    assert main(["plot", str(elsewhere)]) == 2
    assert "no validation metrics" in capsys.readouterr().err


def test_anything_else_cannot_be_drawn(elsewhere, capsys):
    for place in (elsewhere, elsewhere / "nowhere"):
        assert main(["plot", str(place)]) == 2
        assert f"neither metrics.csv nor results.json in {place}" in capsys.readouterr().err
