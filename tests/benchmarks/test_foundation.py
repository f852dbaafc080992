"""The smallest runs of the benchmarks of heads and adapters: methods on made-up features, and the tables."""

import pytest
import torch

from benchmarks.foundation import adapters, curves, peers, run
from lightning_fedbayes.core.quiet import quietly


def made_up():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 10
    centres = 3 * torch.randn(10, 6, generator=generator)
    features = centres[labels] + torch.randn(120, 6, generator=generator)
    genres = torch.arange(120) % 3
    return {
        "train_features": features,
        "train_labels": labels,
        "test_features": features.flip(0),
        "test_labels": labels.flip(0),
        "outside": torch.randn(30, 6, generator=generator),
        "features": features,
        "genres": genres,
        "plays": genres,
        "names": ["a", "b", "c"],
    }


def test_every_method_is_scored_and_tabulated(monkeypatch):
    monkeypatch.setattr(run, "ROUNDS", 2)
    cells = [run.Cell("CIFAR-10", 60, "any", method, 0.0, 0) for method in run.EXACT]
    cells += [run.Cell("plays", 0, "a play per client", method, run.RATES[method][0], 0) for method in run.TUNED]
    cells.append(run.Cell("CIFAR-10", 60, "one class per client", "FedAvg", 0.1, 0))
    with quietly():
        done = {cell: run.run(cell, made_up()) for cell in cells}
    for scores in done.values():
        assert scores["scaled_nll"] <= scores["nll"] + 0.5
        assert 0 <= scores["worst_class"] <= scores["accuracy"] <= 1
    assert done[cells[0]]["accuracy"] > 0.8
    text = run.tables(done)
    assert text.count("exact head") == 3
    assert "| FedAvg | one class per client |" in text


@pytest.mark.parametrize("method", [curves.EXACT, curves.ALL, "sites on the head"])
def test_a_curve_goes_on_by_exchange_and_byte(monkeypatch, method):
    monkeypatch.setattr(curves, "SCORED", (1, 2, 4))
    cell = curves.Cell("10 clients, one class each", method, curves.RATES[method][0], 0, images=100)
    with quietly():
        points = curves.run(cell, made_up())
    sent = [point.megabytes for point in points]
    assert sent == sorted(sent)
    assert all(point.scaled_nll <= point.nll + 0.1 for point in points)
    if method == curves.EXACT:  # a tenth of ten clients: each new one brings its class
        assert points[0].accuracy <= 0.2 < points[-1].accuracy
    if method == curves.ALL:  # the sums are worth a step
        assert all(point.accuracy > 0.8 for point in points)
        other = cell._replace(split="100 clients, one class each")
        again = curves.of_another_split(other, {cell: points})
        assert [each.megabytes for each in again] == pytest.approx([10 * each for each in sent])
        assert [each[2:] for each in again] == [each[2:] for each in points]


def test_the_ridge_of_the_clients_sums_is_that_of_the_pooled_data():
    found = made_up()
    task = run.cifar(found, run.Cell("CIFAR-10", 90, "one class per client", run.AFL, 0.0, 0))
    x, y = task.train[0].double(), torch.nn.functional.one_hot(task.train[1], 10).double()
    number = len(task.clients.unique())
    rows = (number * peers.RIDGE) ** 0.5 * torch.eye(6).double()
    pooled = torch.linalg.lstsq(torch.cat([x, rows]), torch.cat([y, torch.zeros(6, 10).double()]))
    assert torch.allclose(peers.ours(task), pooled.solution)


def test_adapters_share_no_example_between_seeds_and_hold_a_third_of_each_client():
    size = adapters.SEEDS * (adapters.TRAINED + adapters.HELD_OUT + adapters.TESTED)
    numbers = torch.arange(3 * size)
    found = {"inputs": numbers, "labels": numbers % 3, "clients": numbers // size}
    seen = [adapters.parts_of(found, adapters.Cell("plays", "", "", seed)) for seed in range(2)]
    every = torch.cat([part.inputs for parts in seen for part in parts])
    assert len(every.unique()) == len(every)
    images = torch.arange(2 * adapters.IMAGES)
    pictures = {"train": images, "train_labels": images % 10, "test": images[:10], "test_labels": images[:10] % 10}
    train, held, _ = adapters.parts_of(pictures, adapters.Cell("CIFAR-10", "", "", 1))
    assert torch.equal(torch.cat([train.inputs, held.inputs]).sort().values, images[adapters.IMAGES :].float())
    for client in range(10):
        sizes = [int((part.clients == client).sum()) for part in (train, held)]
        assert sizes[1] == sum(sizes) // 3


class Top(torch.nn.Module):
    """Stands for the last layers of a pretrained network."""

    def __init__(self):
        super().__init__()
        self.width = 8
        self.query = torch.nn.Linear(6, 8)

    def forward(self, x):
        return self.query(x).relu()


def test_adapters_are_scored_and_tabulated(monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setattr(adapters, "ROUNDS", 2)
    monkeypatch.setattr(adapters, "IMAGES", 200)
    monkeypatch.setattr(adapters, "TOPS", {"CIFAR-10": Top})
    monkeypatch.setattr(adapters, "TARGETS", {"CIFAR-10": ["query"]})
    x, y = torch.randn(200, 6), torch.arange(200) % 10
    found = {"train": x, "train_labels": y, "test": x, "test_labels": y}
    done = {}
    with quietly():
        for cell in adapters.cells_of("CIFAR-10", 1, done):
            done[cell] = adapters.run(cell, found)
    trained = {cell.choice.split(", ")[-1]: scores["trained"] for cell, scores in done.items()}
    assert trained["B"] == 8 * 8 + 90
    assert trained["A and B"] == 8 * 6 + 8 * 8 + 90
    assert trained["temperature 1"] == trained["B"]
    assert adapters.table(done, "CIFAR-10").count("its mean") == 1
    assert adapters.tries(done, "CIFAR-10").count("rate") == 12


def test_draws_are_averaged_in_probability():
    module = torch.nn.Linear(1, 2, bias=False)
    weights = [torch.tensor([[0.0], [4.0]]), torch.tensor([[0.0], [-2.0]])]
    found = adapters.averaged(module, [{"weight": each} for each in weights], torch.ones(3, 1))
    expected = torch.stack([each[:, 0].softmax(0) for each in weights]).mean(0).log()
    assert torch.allclose(found, expected.expand(3, 2))
