"""Data sets and labels of all sorts, dealt out by every partition."""

import warnings
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.data import clients_of
from tests.fuzz import assert_all_ran, many, only_own_errors
from tests.fuzz.doors import POOL

COUNTS = st.integers(0, 30)
PARTITIONS = st.one_of(
    st.builds(fb.IIDPartition, st.integers(1, 5)),
    st.builds(fb.ClassPartition, st.integers(1, 5), st.integers(1, 3)),
    st.builds(
        fb.DirichletPartition,
        st.integers(1, 4),
        st.sampled_from([1e-3, 0.5, 1e9]),
        st.sampled_from(["label", "client"]),
    ),
    st.just(fb.SizesPartition((1, 2))),
    st.just(fb.SizesPartition((0.5, 0.25))),
    st.none(),
)
LABELS = st.one_of(
    st.lists(st.integers(-3, 4), max_size=12),
    st.lists(st.floats(), max_size=12),
    st.lists(st.text(max_size=2)),
    st.lists(st.lists(st.integers(0, 2), max_size=2), max_size=12),
    st.none(),
    st.sampled_from(POOL),
    st.lists(st.integers(0, 2), max_size=12).map(np.array),
    st.lists(st.booleans(), max_size=12).map(torch.tensor),
)


class Examples:
    """A map-style data set of any examples."""

    def __init__(self, examples, **attributes):
        self.examples = examples
        vars(self).update(attributes)

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, number):
        return self.examples[number]


@st.composite
def data_sets(draw):
    """Tensors, dicts, graphs, sequences, parts of them and things that are no data set."""
    count = draw(COUNTS)
    label = draw(st.sampled_from([0, 1.5, "a", None, torch.tensor([1]), torch.tensor([1, 2]), [3], np.int64(2)]))
    plain = draw(
        st.sampled_from(
            [
                TensorDataset(torch.zeros(count, 2), torch.arange(count) % 3),
                TensorDataset(torch.zeros(count, 2)),
                Examples([{"x": 1.0, "label": label}] * count),
                Examples([SimpleNamespace(x=1.0, label=label)] * count),
                Examples([(1.0, label)] * count),
                Examples([1.0] * count, targets=[label] * count),
                Examples([1.0] * count, label=draw(LABELS)),
                [1, 2, 3],
                *POOL,
            ]
        )
    )
    wrap = draw(st.sampled_from(["plain", "plain", "subset", "parts", "clients"]))
    if wrap == "subset" and count and isinstance(plain, Examples | TensorDataset):
        return Subset(plain, list(range(0, count, 2)))
    if wrap == "parts" and count and isinstance(plain, Examples | TensorDataset):
        return ConcatDataset([plain, plain])
    if wrap == "clients" and isinstance(plain, Examples | TensorDataset):
        return fb.ClientDatasets({"north": plain, "south": plain})
    return plain


@given(dataset=data_sets(), partition=PARTITIONS, source=st.sampled_from([None, "label", "x", "nothing", "targets"]))
@many("data sets")
def any_data(dataset, partition, source):
    with only_own_errors("data sets"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that nobody has
        if isinstance(partition, fb.ClassPartition):
            partition = fb.ClassPartition(partition.clients, partition.classes_per_client, labels=source)
        clients_of(dataset, partition, seed=0)


@given(labels=LABELS, partition=PARTITIONS, count=st.one_of(st.none(), COUNTS))
@many("labels")
def any_labels(labels, partition, count):
    with only_own_errors("labels"):
        if partition is not None:
            str(partition.split(labels, 0, count))


def test_data_sets_are_dealt_out_or_refused_with_errors_of_the_package():
    any_data()
    any_labels()
    assert_all_ran("data sets", "labels")
