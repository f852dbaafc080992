"""The study of federations: a small table from its file to its page, and figures against their definitions."""

import csv
import math

import pytest
import torch

from benchmarks.federations import methods, run
from benchmarks.federations.data import Examples, Federation, Parts, from_csv, halves
from benchmarks.federations.methods import KINDS, METHODS, Prediction, summary

pytestmark = pytest.mark.slow


@pytest.fixture
def table(tmp_path):
    """Three towns of thirty people each, and one of two, who are left out."""
    torch.manual_seed(0)
    path = tmp_path / "towns.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "town", "age", "sex", "ill", "cost"])
        for number in range(92):
            age, sex = torch.randn(2).tolist()
            town = "abcd"[min(number // 30, 3)]
            cells = [number, town, "" if number == 5 else age, "FM"[sex > 0], "yes" if age > 0 else "no", 2 * age + 5]
            writer.writerow(cells)
    return path


def test_a_table_becomes_clients_with_four_parts_each(table):
    federation = from_csv([table], "town", "ill", seed=0, drop=("row", "cost"))
    assert (federation.task, federation.outputs, list(federation.clients)) == ("classification", 2, ["a", "b", "c"])
    train, tuning, validation, test = federation.clients["a"]
    assert [len(each.targets) for each in (train, tuning, validation, test)] == [18, 3, 3, 6]
    assert train.inputs.shape == (18, 2)
    together = torch.cat([own.train.inputs for own in federation.clients.values()])
    assert together.isfinite().all()
    assert together.mean(0).abs().max() < 0.05  # one value is missing
    again = from_csv([table], "town", "ill", seed=0, drop=("row", "cost"))
    other = from_csv([table], "town", "ill", seed=1, drop=("row", "cost"))
    assert torch.equal(again.clients["a"].test.inputs, test.inputs)
    assert not torch.equal(other.clients["a"].test.inputs, test.inputs)
    assert from_csv([table], "town", "cost", seed=0, drop=("row", "ill")).task == "regression"


def test_the_command_goes_on_where_it_stopped_and_writes_a_page(table, tmp_path, capsys):
    arguments = [
        "--csv",
        str(table),
        "--client",
        "town",
        "--target",
        "ill",
        "--drop",
        "row",
        "cost",
        "--seeds",
        "1",
        "--rounds",
        "1",
        "--workers",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    run.main([*arguments, "--methods", "FedAvg"])
    before = (tmp_path / "out" / "cells.jsonl").read_text()
    run.main([*arguments, "--methods", "FedAvg", "IVON, personal"])
    after = (tmp_path / "out" / "cells.jsonl").read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) == 4
    page = (tmp_path / "out" / "tables.md").read_text()
    for name in ("FedAvg", *(f"IVON, personal, {kind}" for kind in KINDS)):
        assert f"| {name} |" in page
    assert (tmp_path / "out" / "towns.png").exists()


def federation_of(task, targets, outputs=2):
    """Clients whose parts are all the same."""
    clients = {name: Parts(*[Examples(torch.zeros(len(y), 1), y)] * 4) for name, y in targets.items()}
    return Federation(task, clients, outputs)


def test_scores_of_known_probabilities():
    targets = {"a": torch.tensor([0, 0]), "b": torch.tensor([1, 1, 1, 1])}
    federation = federation_of("classification", targets)
    probs = torch.tensor([[0.8, 0.2]])
    found = {name: (Prediction(probs.expand(len(y), 2)), y) for name, y in targets.items()}
    scores = summary(federation, found)
    right, wrong = -math.log(0.8), -math.log(0.2)
    assert scores["metric"] == pytest.approx(1 / 3)
    assert scores["nll"] == pytest.approx((right + 2 * wrong) / 3)
    assert scores["clients"] == pytest.approx((right + wrong) / 2)
    assert scores["worst_nll"] == pytest.approx(wrong)
    assert scores["worst_metric"] == 0
    assert scores["calibration"] == pytest.approx(0.8 - 1 / 3)


def numbered(size):
    return Examples(torch.arange(float(size))[:, None], torch.arange(size))


@pytest.mark.parametrize("name", ["FedAvg", "IVON, personal", "hierarchical linear"])
def test_a_method_is_tuned_without_a_look_at_validation_and_test_parts(table, name):
    target = "cost" if METHODS[name].linear else "ill"
    federation = from_csv([table], "town", target, seed=0, drop=("row", "cost", "ill"), rounds=(1, 2))

    def without(*parts):
        other = dict.fromkeys(parts, Examples(torch.zeros(3, 2), federation.clients["b"].test.targets[:3]))
        return federation._replace(clients={name: own._replace(**other) for name, own in federation.clients.items()})

    seen = methods.tuned(federation, METHODS[name], seed=0)
    assert methods.tuned(without("validation", "test"), METHODS[name], seed=0) == seen
    assert methods.tuned(without("tuning"), METHODS[name], seed=0)["tuning"] != seen["tuning"]


@pytest.mark.parametrize("size", [1, 2, 3, 10, 11])
def test_halves_are_of_one_size_over_two_clients(size):
    both = [halves(numbered(size), number) for number in range(2)]
    assert sum(len(tuning.targets) for tuning, _ in both) == sum(len(validation.targets) for _, validation in both)
    for parts in both:
        assert torch.cat([part.targets for part in parts]).tolist() == list(range(size))
