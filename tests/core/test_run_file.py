"""The file of a run: what is written comes back, and what cannot be read is said by file, line and remedy."""

import json
import math
from pathlib import Path

import pytest

from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.core.run_file import FILE, append, read

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


@pytest.mark.parametrize("damaged", ["{", "[]", "3", "{}", '{"round": 1, "figures": {"a": "b"}}', "\x00"])
def test_a_damaged_line_is_named(tmp_path, damaged):
    (tmp_path / FILE).write_text(f"{json.dumps(ROUND)}\n{damaged}\n{json.dumps(ROUND)}\n")
    with pytest.raises(FedBayesError, match=r"federation.jsonl: line 2 of 3 is damaged .*remove it"):
        read(tmp_path / FILE)
