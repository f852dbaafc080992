"""The example of four hospitals: encoding, missing values, splits of files made on the spot, and its table."""

import random
import sys

import pytest
import torch

from tests.test_examples import EXAMPLES, load

sys.path.insert(0, str(EXAMPLES))
from heart_disease import COLUMNS, HOSPITALS, INDICATORS, HospitalsDataModule, encode, indicators, read_patients

pytestmark = pytest.mark.slow

SIZES = {"cleveland": 30, "hungarian": 24, "switzerland": 13, "va": 20}
PATIENT = "63,1,4,145,233,1,2,150,0,2.3,3,0,6,2"


def patient(draw, hospital, number):
    """A line of a file; illness goes with age and chest pain, and two attributes are missing where a hospital says."""
    ill = number % 3 == 0 if hospital != "switzerland" else number < 11
    values = [
        draw.gauss(62 if ill else 48, 5),
        draw.choice([0, 1]),
        4 if ill else draw.choice([1, 2, 3]),
        draw.randint(100, 180),
        0 if hospital == "switzerland" else draw.randint(150, 350),
        draw.choice([0, 1]),
        draw.choice([0, 1, 2]),
        draw.randint(90, 190),
        int(ill),
        draw.gauss(1, 1),
        draw.choice([1, 2, 3]),
        draw.choice([0, 1, 2, 3]) if hospital == "cleveland" else "?",
        draw.choice([3, 6, 7, "?"]),
        draw.choice([1, 2, 3, 4]) if ill else 0,
    ]
    return ",".join(map(str, values))


@pytest.fixture
def folder(tmp_path):
    draw = random.Random(0)
    for hospital, size in SIZES.items():
        lines = [patient(draw, hospital, number) for number in range(size)]
        (tmp_path / f"processed.{hospital}.data").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_every_attribute_becomes_what_its_name_says(tmp_path):
    path = tmp_path / "processed.va.data"
    path.write_text(
        "\n".join([PATIENT, "51,0,1,?,0,?,?,-9,?,-1.5,?,?,?,0", "51,0,1,0,1,-9,0,9,-9.0,-9,1,3,3,1"]) + "\n"
    )
    attributes, labels = read_patients(path)
    assert labels.tolist() == [1, 0, 1]
    rows = [dict(zip(COLUMNS, row)) for row in encode(attributes).tolist()]
    assert rows[0] == dict(
        zip(COLUMNS, [63, 1, 0, 0, 0, 1, 145, 233, 1, 0, 0, 1, 150, 0, 2.3, 0, 0, 1, 0, 0, 1, 0], strict=True)
    )
    there = [{name: value for name, value in row.items() if value == value} for row in rows]
    assert there[1] == {"age": 51, "sex": 0, "cp=1": 1, "cp=2": 0, "cp=3": 0, "cp=4": 0, "oldpeak": -1.5}
    missing = [[name for name, flag in zip(INDICATORS, row) if flag] for row in indicators(attributes).tolist()]
    assert missing[0] == []
    assert missing[1] == [name for name in INDICATORS if name != "oldpeak missing"]
    assert missing[2] == ["trestbps missing", "fbs missing", "exang missing", "oldpeak missing"]


def test_inputs_are_standardised_over_the_training_patients_of_all_hospitals(folder):
    data = HospitalsDataModule(folder)
    data.setup("fit")
    assert tuple(data.train_sets) == tuple(data.test_sets) == data.train.names == HOSPITALS
    everything = [torch.cat([part.tensors[0] for part in sets.values()]) for sets in (data.train_sets, data.test_sets)]
    train, test = (inputs[:, : len(COLUMNS)] for inputs in everything)
    flags = everything[0][:, len(COLUMNS) :]
    assert everything[0].dtype == torch.float32
    assert everything[0].shape == (len(data.train), data.num_features)
    assert test.isfinite().all()
    assert set(flags.unique().tolist()) == {0.0, 1.0}
    assert train.mean(0).abs().max() < 1e-6
    of_attribute = {name.removesuffix(" missing"): flag.bool() for name, flag in zip(INDICATORS, flags.T)}
    for name, column in zip(COLUMNS, train.T):
        missing = of_attribute.get(name.split("=")[0], torch.zeros(len(train), dtype=torch.bool))
        assert (column[missing] == 0).all(), name
        assert column[~missing].square().mean() == pytest.approx(1, abs=1e-5), name
    assert of_attribute["chol"][-len(data.train_sets["va"]) - 5 : -len(data.train_sets["va"])].all()


def test_the_example_compares_the_methods(one_thread, folder, tmp_path, monkeypatch, capsys):
    example, output = load("hospitals"), tmp_path / "output"
    monkeypatch.setattr(
        sys, "argv", ["hospitals.py", "--data", str(folder), "--seeds", "2", "--rounds", "1", "--output", str(output)]
    )
    example.main()
    printed = capsys.readouterr().out
    assert (output / "hospitals.png").stat().st_size > 10_000
    assert (output / "table.md").read_text().strip() in printed
    assert all(f"| {score} | {method} | " in printed for score in example.SCORES for method in example.METHODS)
    assert "nan" not in printed
