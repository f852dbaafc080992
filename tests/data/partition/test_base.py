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
from tests.data.partition.labels import balanced, labels_with_gaps, seeds

any_partition = st.one_of(
    st.builds(IIDPartition, st.integers(1, 10)),
    st.builds(
        DirichletPartition, st.integers(1, 4), st.floats(0.5, 50), min_examples=st.just(1), balance=st.booleans()
    ),
    st.builds(DirichletPartition, st.integers(1, 10), st.floats(1e-3, 1e6), st.just("client")),
    st.builds(SizesPartition, st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)),
    st.builds(SizesPartition, st.lists(st.floats(0.1, 0.25), min_size=1, max_size=4).map(tuple)),
)


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


def test_table_is_aligned_and_abbreviated():
    long = str(IIDPartition(50).split(torch.arange(500) % 30, 0)).splitlines()
    assert len(long) == 22
    assert "…" in long[17]
    assert long[-1].endswith("500")
    assert len({line.index("|") for line in long}) == 1 == len({len(line) for line in long})
    assert str(IIDPartition(2).split(None, 0, 5)).splitlines() == [
        "client | total",
        "     0 |     3",
        "     1 |     2",
        " total |     5",
    ]


def test_plot_is_a_figure_with_one_cell_per_client_and_class():
    figure = IIDPartition(3).split(balanced(4, 5), 0).plot()
    assert figure.axes[0].images[0].get_array().shape == (3, 4)
    assert IIDPartition(3).split(None, 0, 9).plot().axes[0].images[0].get_array().shape == (3, 1)


def test_split_of_own_indices_is_sorted():
    split = Split.from_indices([np.array([4, 1]), [0]], torch.tensor([1, 1, 1, 1, 2]))
    assert split.indices[0].tolist() == [1, 4]
    assert split.counts.tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize("convert", [list, tuple, np.array, torch.tensor])
def test_labels_may_be_lists_arrays_and_tensors(convert):
    labels = [0, 1, 2] * 20
    splits = [DirichletPartition(4, 0.5).split(each, seed=0) for each in (torch.tensor(labels), convert(labels))]
    for first, second in zip(splits[0].indices, splits[1].indices, strict=True):
        assert torch.equal(first, second)


def test_labels_that_are_no_numbers_are_refused():
    with pytest.raises(PartitionError, match=r"labels of type list cannot be read as numbers.*one integer per example"):
        IIDPartition(2).split(["cat", "dog"], seed=0)


def test_labels_that_are_no_classes_are_not_counted():
    with pytest.raises(PartitionError, match="one integer per example"):
        counts_table((torch.tensor([0]),), torch.tensor([0.5]))


def test_repr_is_one_line_and_a_notebook_shows_the_table():
    split = DirichletPartition(30, 0.5).split(balanced(), seed=0)
    assert repr(split).startswith("Split(30 clients, 6,000 examples of 10 classes, ")
    assert len(repr(split)) < 100
    table = split._repr_html_()
    assert table.count("<tr>") == len(str(split).splitlines())
    assert table.startswith("<table><tr><th>client</th><th>0</th>")
