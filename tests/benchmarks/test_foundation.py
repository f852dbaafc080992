"""The smallest run of the benchmark of heads: every method on made-up features, and the table."""

import pytest
import torch

from benchmarks.foundation import run
from lightning_fedbayes.core.quiet import quietly


def made_up():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 10
    centres = 3 * torch.randn(10, 6, generator=generator)
    features = centres[labels] + torch.randn(120, 6, generator=generator)
    genres = torch.arange(120) % 3
    return {
        "train_features": features, "train_labels": labels, "test_features": features.flip(0),
        "test_labels": labels.flip(0), "outside": torch.randn(30, 6, generator=generator),
        "features": features, "genres": genres, "plays": genres, "names": ["a", "b", "c"],
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
