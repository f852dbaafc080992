"""The file of a run: what is written comes back, and what cannot be read is said by file, line and remedy."""

import json
import math
from pathlib import Path

import pytest

from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.core.run_file import FILE, append, file_of, home_of, read

ROUND = {"round": 1, "figures": {"val/nll": 0.5, "val/ece": math.nan}}


def test_what_is_written_comes_back(tmp_path):
    curve = {"curve": "val/retained_curve", "columns": ["x", "y"], "rows": [[0.5, 1.0]]}
    table = {"table": "federation/clients", "columns": ["client"], "rows": [["Zürich <1>"]]}
    for entry in (
        {"round": 0, "settings": {"fusion": "sites", "path": Path("a/b")}},
        ROUND,
        {"round": 2, **curve},
        {"round": 1, **table, "rows": []},
        {"round": 2, **table},
        {"round": 2, "figures": {"val/nll": 0.25}},
    ):
        append(tmp_path / "run", entry)
    record = read(tmp_path / "run" / FILE)
    assert record.settings == {"fusion": "sites", "path": "a/b"}
    assert record.figures["val/nll"] == {1: 0.5, 2: 0.25}
    assert math.isnan(record.figures["val/ece"][1])
    assert record.curves["val/retained_curve"][2]["rows"] == [[0.5, 1.0]]
    assert record.tables["federation/clients"]["rows"] == [["Zürich <1>"]]
    assert not record.torn


def test_a_run_that_goes_on_replaces_its_rounds_and_a_new_one_everything(tmp_path):
    for entry in (
        {"round": 0, "settings": {"seed": 1}},
        ROUND,
        {"round": 2, "figures": {"val/nll": 9.0}},
        {"round": 1, "settings": {"seed": 1}},
        {"round": 2, "figures": {"val/nll": 0.1}},
    ):
        append(tmp_path, entry)
    assert read(tmp_path / FILE).figures["val/nll"] == {1: 0.5, 2: 0.1}
    append(tmp_path, {"round": 0, "settings": {"seed": 2}})
    append(tmp_path, {"round": 1, "figures": {"val/nll": 7.0}})
    record = read(tmp_path / FILE)
    assert (record.settings, record.figures) == ({"seed": 2}, {"val/nll": {1: 7.0}})


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    append(tmp_path, ROUND)
    append(tmp_path, {"round": 2, "figures": {"val/nll": 0.25}})
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-9])
    record = read(file)
    assert record.torn
    assert record.figures["val/nll"] == {1: 0.5}


@pytest.mark.parametrize("damaged", ["{", "[]", "3", "{}", '{"round": 1, "figures": {"a": "b"}}', "\x00"])
def test_a_damaged_line_is_named(tmp_path, damaged):
    (tmp_path / FILE).write_text(f"{json.dumps(ROUND)}\n{damaged}\n{json.dumps(ROUND)}\n")
    with pytest.raises(FedBayesError, match=r"federation.jsonl: line 2 of 3 is damaged .*remove it"):
        read(tmp_path / FILE)


@pytest.mark.parametrize("content", ["", '{"round": 0, "settings": {}}\n'])
def test_a_run_without_a_round_is_refused(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(FedBayesError, match="holds no round: the run ended before its first one"):
        read(tmp_path / FILE)


def test_the_file_is_found_in_the_folders_of_loggers(tmp_path):
    csv, wandb = tmp_path / "csv" / "version_0", tmp_path / "wandb" / "offline-run-1"
    append(csv, ROUND)
    append(wandb / "files", ROUND)
    assert file_of(csv) == csv / FILE
    assert file_of(wandb) == wandb / "files" / FILE
    assert [home_of(file_of(run)) for run in (csv, wandb)] == [csv, wandb]
    with pytest.raises(FedBayesError, match=r"is not the folder of a federation's run.*did you mean .*offline-run-1\?"):
        file_of(tmp_path)
    with pytest.raises(FedBayesError, match=r"nowhere is not the folder .*give that of a CSVLogger"):
        file_of(tmp_path / "nowhere")
