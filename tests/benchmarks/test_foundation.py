"""The smallest runs of the benchmarks of heads and adapters: methods on made-up features, and the tables."""

import pytest
import torch

from benchmarks.foundation import curves, peers, run
from lightning_fedbayes.core.quiet import quietly

pytestmark = pytest.mark.slow


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


def test_a_temperature_is_that_of_least_nll():
    logits = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.multinomial(logits.softmax(1), 1, generator=torch.Generator().manual_seed(1)).squeeze(1)
    assert run.temperature(logits * 4, labels) == pytest.approx(4, rel=0.25)


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
