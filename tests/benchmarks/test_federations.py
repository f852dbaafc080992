"""The study of federations: a small table from its file to its page, and figures against their definitions."""

import csv
import math

import pytest
import torch

import lightning_fedbayes as fb
from benchmarks.federations import methods, run
from benchmarks.federations.data import FEDERATIONS, Examples, Federation, Parts, cut, from_csv
from benchmarks.federations.methods import KINDS, METHODS, WEIGHTS, Prediction, personal_weights, summary
from benchmarks.federations.report import brief, gains, tables
from lightning_fedbayes.modules import mlp


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


def test_a_table_becomes_clients_with_three_parts_each(table):
    federation = from_csv(table, "town", "ill", seed=0, drop=("row", "cost"))
    assert (federation.task, federation.outputs, list(federation.clients)) == ("classification", 2, ["a", "b", "c"])
    train, validation, test = federation.clients["a"]
    assert [len(each.targets) for each in (train, validation, test)] == [18, 6, 6]
    assert train.inputs.shape == (18, 2)
    together = torch.cat([own.train.inputs for own in federation.clients.values()])
    assert together.isfinite().all()
    assert together.mean(0).abs().max() < 0.05  # one value is missing
    again = from_csv(table, "town", "ill", seed=0, drop=("row", "cost"))
    other = from_csv(table, "town", "ill", seed=1, drop=("row", "cost"))
    assert torch.equal(again.clients["a"].test.inputs, test.inputs)
    assert not torch.equal(other.clients["a"].test.inputs, test.inputs)
    assert from_csv(table, "town", "cost", seed=0, drop=("row", "ill")).task == "regression"


def test_the_task_of_a_table_can_be_said(table):
    options = {"client": "town", "seed": 0, "drop": ("ill",)}
    numbers = from_csv(table, target="row", task="regression", **options)
    assert (numbers.task, numbers.outputs) == ("regression", 1)
    assert from_csv(table, target="cost", task="classification", **options).outputs == 92
    network = methods.network_of(from_csv(table, target="cost", hidden=(7,), **options))
    assert [tuple(each.shape) for each in network.parameters()] == [(7, 3), (7,), (1, 7), (1,)]
    with pytest.raises(SystemExit, match=r"'sex' is not a number in every row, which regression needs"):
        from_csv(table, target="sex", task="regression", **options)


def test_times_and_events_of_a_table_are_survival(tmp_path):
    path = tmp_path / "patients.csv"
    lines = [f"{'ab'[n % 2]},{n},{100 - n},{int(n % 3 > 0)}" for n in range(60)]
    path.write_text("\n".join(["ward,age,time,died", *lines]))
    federation = from_csv(path, "ward", "time", seed=0, event="died")
    assert (federation.task, federation.outputs, federation.batch) == ("survival", 1, 512)
    targets = torch.cat([part.targets for own in federation.clients.values() for part in own])
    assert targets[:, 0].sum() == 40
    assert (targets[:, 1] > 40).all()
    assert federation.clients["a"].train.inputs.shape == (18, 1)
    found = methods.train(federation, METHODS["FedAvg"], {"rate": 0.03}, 5, seed=0)
    every = methods.scores(federation, found.module, found.posteriors[0.0], "test")
    assert every["pooled"] > 0.9  # the old die first
    with pytest.raises(SystemExit, match=r"events of 0 or 1 \('age'\)"):
        from_csv(path, "ward", "time", seed=0, event="age")


def test_survival_needs_a_column_of_events(table, tmp_path):
    arguments = ["--csv", str(table), "--client", "town", "--target", "cost", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        run.main([*arguments, "--task", "survival"])
    with pytest.raises(SystemExit):
        run.main([*arguments, "--task", "regression", "--event", "ill"])


def test_the_command_goes_on_where_it_stopped_and_writes_a_page(table, tmp_path, capsys):
    arguments = ["--csv", str(table), "--client", "town", "--target", "ill", "--drop", "row", "cost", "--seeds", "1",
                 "--rounds", "1", "--workers", "1", "--out", str(tmp_path / "out")]
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


def test_the_committed_pages_show_the_committed_cells():
    results = run.in_order(run.read(run.HERE / "results" / "cells.jsonl"), list(FEDERATIONS))
    assert tables(results) in (run.HERE / "README.md").read_text()
    assert brief(results) in (run.ROOT / "README.md").read_text()


def federation_of(task, targets, outputs=2):
    """Clients whose parts are all the same."""
    clients = {name: Parts(*[Examples(torch.zeros(len(y), 1), y)] * 3) for name, y in targets.items()}
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


def test_pairs_of_survival_are_compared_within_clients():
    targets = {"a": torch.tensor([[1.0, 1.0], [1.0, 2.0]]), "b": torch.tensor([[1.0, 9.0], [0.0, 10.0]])}
    federation = federation_of("survival", targets, 1)
    risk = torch.tensor([2.0, 1.0])  # the right order within each client, and the same risks at both
    scores = summary(federation, {name: (Prediction(risk), y) for name, y in targets.items()})
    assert scores["metric"] == 1
    assert scores["pooled"] < 1


def test_a_client_chooses_the_posterior_that_predicts_its_own_part():
    targets = {"zeros": torch.zeros(40).long(), "ones": torch.ones(40).long()}
    federation = federation_of("classification", targets)
    module = fb.HybridBayesianClassifier(mlp(1, 2, []), bayesian_last=0)

    def posterior(logit):
        names = [name for name, _ in module.named_parameters()]
        return fb.GaussianPosterior.point_mass(dict(zip(names, [torch.zeros(2, 1), torch.tensor([0.0, logit])])))

    both = {weight: {"zeros": posterior(-weight), "ones": posterior(weight)} for weight in WEIGHTS}
    assert all(own == {"zeros": 1.0, "ones": 1.0} for own in personal_weights(federation, module, both).values())
    one = {weight: {"zeros": posterior(-weight), "ones": posterior(-4 * weight)} for weight in WEIGHTS}
    chosen = personal_weights(federation, module, one)
    assert chosen["own choice"] == {"zeros": 1.0, "ones": 0.0}
    assert chosen["one weight"]["zeros"] == chosen["one weight"]["ones"] == 0.0


def test_parts_keep_their_order_and_gains_are_paired():
    parts = cut(Examples(torch.arange(10.0)[:, None], torch.arange(10)))
    assert [own.targets.tolist() for own in parts] == [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9]]
    own = {"global": {0: {"clients": 2.0}, 1: {"clients": 2.0}}, "local": {0: {"clients": 3.0}, 1: {"clients": 3.0}},
           "one weight": {0: {"clients": 1.5}, 1: {"clients": 2.5}}}
    assert gains(own, "one weight", "clients") == [0.5, -0.5]


def test_every_method_of_every_task_has_settings_to_choose_from():
    for method in METHODS.values():
        for hidden in ((), (8,)):
            federation = federation_of("classification", {"a": torch.zeros(5).long()})._replace(hidden=hidden)
            found = methods.settings_of(method, federation)
            assert found
            assert all(found.count(each) == 1 for each in found)
