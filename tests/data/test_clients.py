"""Who the clients are."""

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, TensorDataset, random_split

from lightning_fedbayes import (
    ClientDatasets,
    DirichletPartition,
    FederationError,
    IIDPartition,
    PartitionError,
    SizesPartition,
)
from lightning_fedbayes.data import clients_of


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


@pytest.mark.parametrize("partition", [IIDPartition(4), DirichletPartition(clients=2, alpha=1.0, min_examples=1)])
def test_counts_are_those_of_the_clients_labels(partition):
    clients = clients_of(labelled(LABELS), partition, seed=3)
    assert list(clients.classes) == [0, 1, 2]
    for part, row in zip(clients.datasets, clients.counts, strict=True):
        assert torch.bincount(torch.tensor([int(y) for _, y in part]), minlength=3).tolist() == row.tolist()


def test_same_seed_same_clients():
    first, second, other = (clients_of(labelled(LABELS * 4), IIDPartition(3), seed) for seed in (1, 1, 2))
    assert [numbers(p) for p in first.datasets] == [numbers(p) for p in second.datasets]
    assert [numbers(p) for p in first.datasets] != [numbers(p) for p in other.datasets]


def test_partition_without_labels():
    clients = clients_of(TensorDataset(torch.arange(10).float()), SizesPartition((6, 4)), seed=0)
    assert clients.sizes == (6, 4)
    assert clients.counts is None
    with pytest.raises(PartitionError, match="label"):
        clients_of(TensorDataset(torch.arange(10).float()), DirichletPartition(2, alpha=1.0), seed=0)


def test_real_clients_keep_their_names_and_data():
    north, south = labelled([5, 5, 9]), labelled([9, 7])
    clients = clients_of(ClientDatasets({"north": north, "south": south}), None, seed=0)
    assert clients.names == ("north", "south")
    assert clients.datasets == (north, south)
    assert clients.sizes == (3, 2)
    assert list(clients.classes) == [5, 7, 9]
    assert clients.counts.tolist() == [[2, 0, 1], [0, 1, 1]]


def test_plain_concatenation_is_numbered():
    clients = clients_of(ConcatDataset([labelled([1, 1]), labelled([0])]), None, seed=0)
    assert clients.names == ("0", "1")
    assert clients.counts.tolist() == [[0, 2], [1, 0]]


def test_clients_without_integer_labels_have_no_counts():
    regression = TensorDataset(torch.zeros(2), torch.tensor([0.5, 1.5]))
    for parts in ([regression, labelled([0])], [regression, regression]):
        clients = clients_of(ConcatDataset(parts), None, seed=0)
        assert clients.counts is None
        assert clients.classes == ()


def test_parts_are_a_data_set_of_their_own():
    """A ClientDatasets is also all of the data, client after client."""
    whole = ClientDatasets({"a": labelled([0, 1]), "b": labelled([2])})
    assert len(whole) == 3
    assert [int(whole[i][1]) for i in range(3)] == [0, 1, 2]


def test_one_data_set_and_no_partition():
    with pytest.raises(FederationError, match=r"one TensorDataset: who are the clients\?.*partition=.*ClientDatasets"):
        clients_of(labelled(LABELS), None, seed=0)


def test_partition_of_parts_is_refused():
    parts = ClientDatasets({"a": labelled([0, 1]), "b": labelled([2])})
    with pytest.raises(FederationError, match="partition"):
        clients_of(parts, IIDPartition(2), seed=0)


def test_clients_without_examples_are_named():
    whole = labelled([0, 1, 2])
    empty, full = random_split(whole, [0, 3])
    with pytest.raises(FederationError, match="clients without an example: left, right; leave them out"):
        clients_of(ClientDatasets({"left": empty, "middle": full, "right": empty}), None, seed=0)


def test_class_that_nobody_has():
    with pytest.raises(FederationError, match="no client has an example of class 3, and a network"):
        clients_of(labelled([3] + [0, 1, 2] * 20), SizesPartition((15, 15)), seed=1)
    with pytest.warns(UserWarning, match="no client has an example of class 1: if"):
        clients_of(ClientDatasets({"a": labelled([0, 2]), "b": labelled([2])}), None, seed=0)


def test_no_example_is_loaded():
    class Untouchable(Dataset):
        targets = LABELS

        def __len__(self):
            return len(LABELS)

        def __getitem__(self, index):
            raise AssertionError("an example was loaded")

    assert clients_of(Untouchable(), IIDPartition(3), seed=0).counts.sum() == 12
    assert clients_of(ConcatDataset([Untouchable()] * 2), None, seed=0).counts.sum() == 24
