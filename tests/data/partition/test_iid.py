"""Partitions that ignore labels: sizes are those that were promised."""

import pytest
import torch

from lightning_fedbayes.core.errors import PartitionError
from lightning_fedbayes.data.partition import DirichletPartition, IIDPartition, SizesPartition


def test_iid_sizes_differ_by_at_most_one_and_seeds_differ():
    first, second = IIDPartition(7).split(None, 0, 100), IIDPartition(7).split(None, 1, 100)
    assert max(first.sizes) - min(first.sizes) <= 1
    assert not torch.equal(first.indices[0], second.indices[0])
    assert first.counts is None
    assert first.classes == ()


def test_regression_targets_can_be_dealt_iid_but_not_by_label():
    target = torch.randn(30)
    assert IIDPartition(3).split(target, 0).counts is None
    with pytest.raises(PartitionError, match=r"float32.*integer class.*bin"):
        DirichletPartition(3, 1.0).split(target, 0)


def test_fractions_that_sum_to_one_use_all_examples():
    assert sum(SizesPartition([1 / 3, 1 / 3, 1 / 3]).split(None, 0, 100).sizes) == 100


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: IIDPartition(0), "clients=0.*at least 1"),
        (lambda: IIDPartition(5).split(None, 0, 4), "5 clients cannot share 4.*fewer clients"),
        (lambda: IIDPartition(5).split(None, 0), "pass one of them"),
        (lambda: IIDPartition(5).split(torch.zeros(7), 0, 8), "num_examples is 8.*7 labels"),
        (lambda: SizesPartition(()), r"sizes=\(\)"),
        (lambda: SizesPartition((3, 0.5)), "mix"),
        (lambda: SizesPartition((3, 0)), "above 0"),
        (lambda: SizesPartition((0.7, 0.5)), "sum to 1.2"),
        (lambda: SizesPartition((7, 5)).split(None, 0, 10), "sum to 12.*10 examples"),
        (lambda: SizesPartition((0.99, 0.01)).split(None, 0, 10), "client 1 of 2 would get none"),
    ],
)
def test_errors_name_value_rule_and_remedy(build, says):
    with pytest.raises(PartitionError, match=says):
        build()
