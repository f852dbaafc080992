"""The study of federations: a small table from its file to its page, and figures against their definitions."""

import csv
import math

import pytest
import torch

import lightning_fedbayes as fb
from benchmarks import cells as study
from benchmarks.federations import methods, run
from benchmarks.federations.data import FEDERATIONS, Examples, Federation, Parts, cut, from_csv, halves
from benchmarks.federations.methods import KINDS, METHODS, WEIGHTS, Prediction, personal_weights, summary
from benchmarks.federations.report import tables
from lightning_fedbayes.modules import mlp

ONE = ("--seeds", "1", "--rounds", "1", "--workers", "1")


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


def test_the_task_of_a_table_can_be_said(table):
    options = {"client": "town", "seed": 0, "drop": ("ill",)}
    numbers = from_csv([table], target="row", task="regression", **options)
    assert (numbers.task, numbers.outputs) == ("regression", 1)
    assert from_csv([table], target="cost", task="classification", **options).outputs == 92
    network = methods.network_of(from_csv([table], target="cost", hidden=(7,), **options))
    assert [tuple(each.shape) for each in network.parameters()] == [(7, 3), (7,), (1, 7), (1,)]
    with pytest.raises(SystemExit, match=r"'sex' is not a number in every row, which regression needs"):
        from_csv([table], target="sex", task="regression", **options)


def test_times_and_events_of_a_table_are_survival(tmp_path):
    path = tmp_path / "patients.csv"
    lines = [f"{'ab'[n % 2]},{n},{100 - n},{int(n % 3 > 0)}" for n in range(60)]
    path.write_text("\n".join(["ward,age,time,died", *lines]))
    federation = from_csv([path], "ward", "time", seed=0, event="died")
    assert (federation.task, federation.outputs, federation.batch) == ("survival", 1, 512)
    targets = torch.cat([part.targets for own in federation.clients.values() for part in own])
    assert targets[:, 0].sum() == 40
    assert (targets[:, 1] > 40).all()
    assert federation.clients["a"].train.inputs.shape == (18, 1)
    found = methods.train(federation, METHODS["FedAvg"], {"rate": 0.03}, 5, seed=0)
    every = methods.scores(federation, found.module, found.posteriors[0.0], "test")
    assert every["pooled"] > 0.9  # the old die first
    with pytest.raises(SystemExit, match=r"events of 0 or 1 \('age'\)"):
        from_csv([path], "ward", "time", seed=0, event="age")


def test_several_files_are_one_federation(table, tmp_path):
    head, *lines = table.read_text().splitlines()
    files = [tmp_path / "first.csv", tmp_path / "second.csv"]
    for file, own in zip(files, (lines[:60], lines[60:]), strict=True):
        file.write_text("\n".join([head, *own]))
    options = {"target": "ill", "seed": 0, "drop": ("row", "cost")}
    together, apart = from_csv([table], "town", **options), from_csv(files, "town", **options)
    for name, parts in together.clients.items():
        assert all(map(torch.equal, parts.test, apart.clients[name].test))
    each = from_csv(files, None, **options)
    assert [sum(len(part.targets) for part in parts) for parts in each.clients.values()] == [60, 32]


def test_the_command_goes_on_where_it_stopped_and_writes_a_page(table, tmp_path, capsys):
    arguments = [*f"--csv {table} --client town --target ill --drop row cost --out {tmp_path / 'out'}".split(), *ONE]
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
    results = run.in_order(study.read(run.HERE / "results" / "cells.jsonl", run.Cell), list(FEDERATIONS))
    assert tables(results) in (run.HERE / "README.md").read_text()


def federation_of(task, targets, outputs=2):
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

    both = {weight: {"zeros": constant(module, -weight), "ones": constant(module, weight)} for weight in WEIGHTS}
    assert all(own == {"zeros": 1.0, "ones": 1.0} for own in personal_weights(federation, module, both).values())
    one = {weight: {"zeros": constant(module, -weight), "ones": constant(module, -4 * weight)} for weight in WEIGHTS}
    chosen = personal_weights(federation, module, one)
    assert chosen["own choice"] == {"zeros": 1.0, "ones": 0.0}
    assert chosen["one weight"]["zeros"] == chosen["one weight"]["ones"] == 0.0


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


def constant(module, logit):
    """Return a point mass whose logits of the two classes differ by ``logit`` everywhere."""
    names = [name for name, _ in module.named_parameters()]
    return fb.GaussianPosterior.point_mass(dict(zip(names, [torch.zeros(2, 1), torch.tensor([0.0, logit])])))


def test_validation_parts_are_not_flattered_by_the_choice_of_lambda():
    """Fair coins: the better of two posteriors with logit ±c gains c |k/n − 1/2|, k binomial; both cost the same."""
    count, n, logit = 800, 6, 2.0
    clients = {}
    for number in range(count):
        coins = Examples(torch.zeros(2 * n, 1), torch.randint(2, (2 * n,)))
        clients[str(number)] = Parts(coins, *halves(coins, number), coins)
    federation = Federation("classification", clients, 2)
    module = fb.HybridBayesianClassifier(mlp(1, 2, []), bayesian_last=0)
    posteriors = {weight: dict.fromkeys(clients, constant(module, logit if weight else -logit)) for weight in WEIGHTS}
    chosen = personal_weights(federation, module, posteriors)["own choice"]
    mixed = {name: posteriors[weight][name] for name, weight in chosen.items()}
    every = math.log1p(math.exp(logit)) - logit / 2
    gain = logit * sum(math.comb(n, k) * abs(k / n - 0.5) for k in range(n + 1)) / 2**n
    error = logit / 2 / math.sqrt(n * count)
    parts = {part: methods.scores(federation, module, mixed, part)["clients"] for part in ("tuning", "validation")}
    assert parts["validation"] == pytest.approx(every, abs=4 * error)
    assert parts["tuning"] == pytest.approx(every - gain, abs=4 * error)
    assert gain > 20 * error


def test_a_client_without_an_example_has_no_score_and_takes_the_others_choice():
    targets = {"some": torch.ones(10).long(), "none": torch.zeros(0).long()}
    federation = federation_of("classification", targets)
    module = fb.HybridBayesianClassifier(mlp(1, 2, []), bayesian_last=0)
    posteriors = {weight: dict.fromkeys(targets, constant(module, weight)) for weight in WEIGHTS}
    found = methods.scores(federation, module, posteriors[1.0], "validation")
    assert found["clients"] == found["nll"] == pytest.approx(math.log1p(math.exp(-1)))
    assert math.isnan(found["nlls"][1])
    chosen = personal_weights(federation, module, posteriors)
    assert [chosen[kind]["none"] for kind in KINDS] == [0.0, 1.0, 1.0]
    predicted = methods.predictions(federation, module, posteriors[1.0], "tuning")
    assert methods.conformal_size(federation, predicted, predicted)["set_coverage"] == 1
    survival = federation_of("survival", {"one": torch.tensor([[1.0, 1.0]]), "none": torch.zeros(0, 2)}, 1)
    risks = {
        name: (Prediction(torch.zeros(len(own.test.targets))), own.test.targets)
        for name, own in survival.clients.items()
    }
    scores = summary(survival, risks)
    assert scores["clients"] == 0
    assert math.isnan(scores["worst_metric"])


def test_parts_keep_their_order():
    assert [own.targets.tolist() for own in cut(numbered(10), 0)] == [[0, 1, 2, 3, 4, 5], [6], [7], [8, 9]]
    assert [own.targets.tolist() for own in cut(numbered(15), 1)] == [[*range(9)], [9], [10, 11], [12, 13, 14]]


@pytest.mark.parametrize("size", [1, 2, 3, 10, 11])
def test_halves_are_of_one_size_over_two_clients(size):
    both = [halves(numbered(size), number) for number in range(2)]
    assert sum(len(tuning.targets) for tuning, _ in both) == sum(len(validation.targets) for _, validation in both)
    for parts in both:
        assert torch.cat([part.targets for part in parts]).tolist() == list(range(size))
