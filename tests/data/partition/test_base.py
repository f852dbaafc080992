"""Every partition deals each example at most once; a split counts, prints and draws itself."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes.core.errors import PartitionError
from lightning_fedbayes.data.partition import (
    DirichletPartition,
    IIDPartition,
    SizesPartition,
    Split,
    counts_table,
)
from tests.data.partition.labels import labels_with_gaps, seeds

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
