"""Labels come from attributes and wrappers, never from loading examples."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from lightning_fedbayes.data import labels_of

LABELS = [3, 1, 2, 1]


class Untouchable(Dataset):
    """A data set that fails when an example is loaded."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise AssertionError("an example was loaded")


@pytest.mark.parametrize("name", ["targets", "labels", "y"])
@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda v: np.array(v, dtype=np.int32)])
def test_attributes_of_any_kind(name, kind):
    assert labels_of(Untouchable(**{name: kind(LABELS)})).tolist() == LABELS


@pytest.mark.parametrize(
    "values",
    [["a", "b", "c", "d"], [0.5] * 4, torch.zeros(4), torch.zeros(4, 2).long(), [1, 2], [[1], [2, 3], [], []], None,
     print, torch.zeros(4, dtype=torch.complex64)],
    ids=str,
)
def test_anything_but_one_integer_per_example_is_unknown(values):
    assert labels_of(Untouchable(targets=values)) is None


def test_an_attribute_that_is_no_label_does_not_hide_one_that_is():
    assert labels_of(Untouchable(targets=None, y=LABELS)).tolist() == LABELS


def test_no_attribute_is_unknown():
    assert labels_of(Untouchable()) is None


def test_last_tensor_if_it_holds_integers():
    inputs = torch.randn(4, 2)
    assert labels_of(TensorDataset(inputs, torch.tensor(LABELS))).tolist() == LABELS
    assert labels_of(TensorDataset(inputs, torch.randn(4))) is None
    assert labels_of(TensorDataset(inputs)) is None


def test_wrappers_of_any_depth():
    data = Untouchable(targets=LABELS)
    both = ConcatDataset([Subset(data, [3, 0]), Subset(Subset(data, [2, 1, 0]), torch.tensor([0, 1]))])
    assert labels_of(both).tolist() == [1, 3, 2, 1]
    assert labels_of(Subset(both, range(1, 3))).tolist() == [3, 2]
    assert labels_of(Subset(data, [])).tolist() == []
    parts = random_split(data, [3, 1])
    assert sorted(labels_of(ConcatDataset(parts)).tolist()) == sorted(LABELS)


def test_one_unknown_part_makes_the_whole_unknown():
    assert labels_of(ConcatDataset([Untouchable(targets=LABELS), Untouchable()])) is None
    assert labels_of(Subset(Untouchable(), [0])) is None
