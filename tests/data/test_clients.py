"""Class labels without loading examples, and the clients that a partition or the parts of a data set make."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from lightning_fedbayes import ClassPartition, ClientDatasets, DirichletPartition, IIDPartition
from lightning_fedbayes.core.errors import FederationError, PartitionError
from lightning_fedbayes.data import clients_of, labels_of

FOUR_LABELS = [3, 1, 2, 1]


class Untouchable(Dataset):
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise AssertionError("an example was loaded")


@pytest.mark.parametrize("name", ["targets", "labels", "y"])
@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda v: np.array(v, dtype=np.int32)])
def test_attributes_of_any_kind(name, kind):
    assert labels_of(Untouchable(**{name: kind(FOUR_LABELS)})).tolist() == FOUR_LABELS


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b", "c", "d"],
        [0.5] * 4,
        torch.zeros(4),
        torch.zeros(4, 2).long(),
        [1, 2],
        [[1], [2, 3], [], []],
        None,
        print,
        torch.zeros(4, dtype=torch.complex64),
    ],
    ids=str,
)
def test_anything_but_one_integer_per_example_is_unknown(values):
    assert labels_of(Untouchable(targets=values)) is None


def test_last_tensor_if_it_holds_integers():
    inputs = torch.randn(4, 2)
    assert labels_of(TensorDataset(inputs, torch.tensor(FOUR_LABELS))).tolist() == FOUR_LABELS
    assert labels_of(TensorDataset(inputs, torch.randn(4))) is None
    assert labels_of(TensorDataset(inputs)) is None


class Column:
    """A column of a table: indexed by the labels of its rows, which have gaps and no 0, and not by position."""

    def __init__(self, values, dtype=None):
        self.rows = dict(zip((9, 5, 17, 8), np.asarray(values, dtype)))

    def __getitem__(self, row):
        return self.rows[row]

    def __len__(self):
        return len(self.rows)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(list(self.rows.values()), dtype)


@pytest.mark.parametrize(
    "column",
    [
        Column(FOUR_LABELS),
        Column(FOUR_LABELS, object),
        Column(FOUR_LABELS, np.uint16),
        np.asarray(FOUR_LABELS, np.uint8),
        torch.tensor(FOUR_LABELS, dtype=torch.int16),
    ],
    ids=["column", "objects", "unsigned", "bytes", "short"],
)
@pytest.mark.parametrize("named", [False, True])
def test_labels_are_read_by_position_from_whatever_holds_integers(column, named):
    found = labels_of(Untouchable(targets=column, own=column), "own" if named else None)
    assert found.dtype == torch.int64
    assert found.tolist() == FOUR_LABELS
    split = DirichletPartition(2, alpha=1.0, labels=column).split(None, seed=0, num_examples=4)
    assert sorted(torch.cat(list(split.indices)).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [None, object])
def test_names_of_classes_are_numbered_in_their_order(dtype):
    assert labels_of(Untouchable(), Column(["cat", "ant", "bee", "ant"], dtype)).tolist() == [2, 0, 1, 0]


def test_of_more_than_two_tensors_the_label_is_named_and_never_guessed():
    data = TensorDataset(torch.zeros(4, 2), torch.tensor(FOUR_LABELS), torch.arange(4))
    assert labels_of(data) is None
    with pytest.raises(PartitionError, match=r"labels are unknown.*lambda data: data\.tensors\[1\]"):
        clients_of(data, DirichletPartition(2, alpha=1.0), seed=0)
    clients = clients_of(data, DirichletPartition(2, alpha=1.0, labels=lambda data: data.tensors[1]), seed=0)
    assert clients.classes == (1, 2, 3)


def test_wrappers_of_any_depth():
    data = Untouchable(targets=FOUR_LABELS)
    both = ConcatDataset([Subset(data, [3, 0]), Subset(Subset(data, [2, 1, 0]), torch.tensor([0, 1]))])
    assert labels_of(both).tolist() == [1, 3, 2, 1]
    assert labels_of(Subset(both, range(1, 3))).tolist() == [3, 2]
    assert labels_of(Subset(data, [])).tolist() == []
    parts = random_split(data, [3, 1])
    assert sorted(labels_of(ConcatDataset(parts)).tolist()) == sorted(FOUR_LABELS)


def labelled(labels):
    """A data set whose inputs are the numbers of its examples."""
    labels = torch.as_tensor(labels)
    return TensorDataset(torch.arange(len(labels)).float(), labels)


def numbers(dataset):
    return [int(dataset[i][0]) for i in range(len(dataset))]


LABELS = [0, 1, 2, 2, 1, 0, 0, 2, 1, 1, 0, 2]


def test_partition_deals_out_every_example_once():
    clients = clients_of(labelled(LABELS), IIDPartition(5), seed=0)
    assert len(clients) == 5
    assert clients.names == ("0", "1", "2", "3", "4")
    assert clients.sizes == (3, 3, 2, 2, 2)
    assert sorted(number for part in clients.datasets for number in numbers(part)) == list(range(12))


def test_real_clients_keep_their_names_and_data():
    north, south = labelled([5, 5, 9]), labelled([9, 7])
    clients = clients_of(ClientDatasets({"north": north, "south": south}), None, seed=0)
    assert clients.names == ("north", "south")
    assert clients.datasets == (north, south)
    assert clients.sizes == (3, 2)
    assert list(clients.classes) == [5, 7, 9]
    assert clients.counts.tolist() == [[2, 0, 1], [0, 1, 1]]


def test_parts_are_a_data_set_of_their_own():
    """A ClientDatasets is also all of the data, client after client."""
    whole = ClientDatasets({"a": labelled([0, 1]), "b": labelled([2])})
    assert [len(whole[name]) for name in whole.names] == [2, 1]
    assert whole["b"] is whole.datasets[1]
    with pytest.raises(FederationError, match=r"there is no client 'c': .*a, b"):
        whole["c"]
    with pytest.raises(FederationError, match="partition"):
        clients_of(whole, IIDPartition(2), seed=0)
    assert len(whole) == 3
    assert [int(whole[i][1]) for i in range(3)] == [0, 1, 2]


def test_clients_without_examples_are_named_and_may_be_left_out(caplog):
    empty, full = random_split(labelled([0, 1, 0]), [0, 3])
    with pytest.raises(FederationError, match="clients without an example: left, right; leave them out"):
        clients_of(ClientDatasets({"left": empty, "middle": full, "right": empty}), None, seed=0)
    with caplog.at_level("INFO"):
        kept = ClientDatasets({"left": empty, 4: full, "right": empty}, skip_empty=True)
    assert kept.names == ("4",)
    assert len(kept) == 3
    assert caplog.messages == ["Clients without an example, left out: left, right."]
    caplog.clear()
    with caplog.at_level("INFO"):
        ClientDatasets({**dict.fromkeys(range(3000), empty), "full": full}, skip_empty=True)
    assert [len(line) < 100 and "and 2,997 others" in line for line in caplog.messages] == [True]
    with pytest.raises(FederationError, match=r"none of the 2 clients has an example: left, right"):
        ClientDatasets({"left": empty, "right": empty}, skip_empty=True)
    with pytest.raises(FederationError, match=r"skip_empty='yes': give True or False"):
        ClientDatasets({"full": full}, skip_empty="yes")


def test_no_example_is_loaded():
    data = Untouchable(targets=FOUR_LABELS)
    assert clients_of(data, IIDPartition(3), seed=0).counts.sum() == 4
    assert clients_of(ConcatDataset([data] * 2), None, seed=0).counts.sum() == 8


class Examples(list):
    """A map-style data set of any examples."""


PATIENTS = Examples({"image": torch.zeros(2), "diagnosis": number % 3} for number in range(60))
GRAPHS = Examples(SimpleNamespace(nodes=torch.zeros(4), y=torch.tensor([number % 3])) for number in range(60))
SEQUENCES = Examples((torch.zeros(number % 7 + 1), number % 3) for number in range(60))
CLASSES = torch.arange(60) % 3


@pytest.mark.parametrize(
    ("dataset", "labels"),
    [
        (PATIENTS, "diagnosis"),
        (GRAPHS, "y"),
        (SEQUENCES, CLASSES),
        (SEQUENCES, CLASSES.numpy()),
        (SEQUENCES, CLASSES.tolist()),
        (SEQUENCES, lambda dataset: [label for _, label in dataset]),
    ],
    ids=["column of dicts", "attribute of graphs", "tensor", "array", "list", "function"],
)
@pytest.mark.parametrize(
    "partition", [partial(DirichletPartition, 3, 0.5), partial(ClassPartition, 3, 2)], ids=["Dirichlet", "classes"]
)
def test_partitions_take_labels_from_where_they_are(dataset, labels, partition):
    made = clients_of(dataset, partition(labels=labels), seed=0)
    shown = partition().split(CLASSES, seed=0)
    assert made.counts.equal(shown.counts)
    assert [list(part.indices) for part in made.datasets] == [rows.tolist() for rows in shown.indices]


def test_columns_are_found_in_parts_and_subsets_and_in_a_column_of_hugging_face():
    half = Subset(PATIENTS, range(0, 60, 2))
    assert labels_of(half, "diagnosis").tolist() == [number % 3 for number in range(0, 60, 2)]
    assert len(labels_of(ConcatDataset([PATIENTS, half]), "diagnosis")) == 90
    table = type(
        "Table",
        (),
        {"column_names": ["label"], "__len__": lambda self: 2, "__getitem__": lambda self, key: {"label": [1, 0]}[key]},
    )()
    assert labels_of(table, "label").tolist() == [1, 0]
