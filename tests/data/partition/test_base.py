"""Every partition deals each example at most once; a split counts, prints and draws itself."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes.core.errors import PartitionError
from lightning_fedbayes.data.partition import DirichletPartition, IIDPartition, SizesPartition, Split, counts_table

labels_with_gaps = st.lists(st.sampled_from([-3, 0, 7, 40, 41]), min_size=20, max_size=120).map(torch.tensor)
seeds = st.integers(0, 2**31)
any_partition = st.one_of(
    st.builds(IIDPartition, st.integers(1, 10)),
    st.builds(
        DirichletPartition, st.integers(1, 4), st.floats(0.5, 50), min_examples=st.just(1), balance=st.booleans()
    ),
    st.builds(DirichletPartition, st.integers(1, 10), st.floats(1e-3, 1e6), st.just("client")),
    st.builds(SizesPartition, st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)),
    st.builds(SizesPartition, st.lists(st.floats(0.1, 0.25), min_size=1, max_size=4).map(tuple)),
)


@pytest.mark.slow
@given(any_partition, labels_with_gaps, seeds)
@settings(deadline=None, max_examples=200)
def test_every_example_at_most_once_and_same_seed_same_split(partition, labels, seed):
    split, again = partition.split(labels, seed), partition.split(labels, seed, num_examples=len(labels))
    assert all(torch.equal(a, b) for a, b in zip(split.indices, again.indices, strict=True))
    dealt = torch.cat(split.indices)
    assert len(dealt.unique()) == len(dealt)
    assert dealt.min() >= 0
    assert dealt.max() < len(labels)
    assert all(client.dtype == torch.int64 and (client.diff() > 0).all() for client in split.indices)
    assert len(split.indices) == partition.clients
    assert min(split.sizes) >= 1
    left_out = len(labels) - len(dealt)
    if isinstance(partition, IIDPartition) or getattr(partition, "per", None) == "label":
        assert left_out == 0
    elif isinstance(partition, DirichletPartition):
        assert set(split.sizes) == {len(labels) // partition.clients}
    elif not partition.fractional:
        assert split.sizes == partition.sizes


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool])
def test_integer_dtypes_give_the_same_split(dtype):
    labels = torch.arange(200) % 2
    a, b = (DirichletPartition(3, 1.0).split(y, 5) for y in (labels, labels.to(dtype)))
    assert all(torch.equal(x, y) for x, y in zip(a.indices, b.indices))


@given(labels_with_gaps, seeds)
@settings(deadline=None)
def test_counts_table_counts(labels, seed):
    split = IIDPartition(3).split(labels, seed)
    counts, classes = counts_table(split.indices, labels)
    assert classes == tuple(sorted(set(labels.tolist())))
    for client, row in zip(split.indices, counts):
        assert row.tolist() == [(labels[client] == c).sum() for c in classes]
    assert split.sizes == tuple(counts.sum(1).tolist())


def test_split_of_own_indices_is_sorted():
    split = Split.from_indices([np.array([4, 1]), [0]], torch.tensor([1, 1, 1, 1, 2]))
    assert split.indices[0].tolist() == [1, 4]
    assert split.counts.tolist() == [[1, 1], [1, 0]]


def test_labels_that_are_no_numbers_are_refused():
    with pytest.raises(PartitionError, match=r"labels of type list cannot be read as numbers.*one integer per example"):
        IIDPartition(2).split(["cat", "dog"], seed=0)


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
