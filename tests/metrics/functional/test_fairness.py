"""Summaries of the clients' accuracies."""

import pytest
import torch

from lightning_fedbayes.metrics import functional as F


def test_the_average_is_weighted_and_the_worst_clients_are_rounded_up():
    accuracies = torch.tensor([0.9, 0.2, 0.5, 0.7])
    assert F.weighted_accuracy(accuracies, torch.tensor([1, 2, 3, 4])).item() == pytest.approx(0.56)
    assert F.weighted_accuracy(accuracies, torch.ones(4)) == F.worst_fraction_accuracy(accuracies, 1.0)
    assert F.worst_fraction_accuracy(accuracies).item() == pytest.approx(0.2)
    assert F.worst_fraction_accuracy(accuracies, 0.3).item() == pytest.approx(0.35)
    assert F.worst_fraction_accuracy(torch.arange(30.0), 0.1) == 1  # three clients, not four


def test_clients_without_examples_do_not_count():
    accuracies = torch.tensor([0.9, torch.nan, 0.5])
    assert F.weighted_accuracy(accuracies, torch.tensor([1, 9, 3])).item() == pytest.approx(0.6)
    assert F.worst_fraction_accuracy(accuracies, 0.5).item() == pytest.approx(0.5)
