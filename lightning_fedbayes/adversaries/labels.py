"""An attack on the data: labels turned round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedbayes.adversaries.base import Attack, Attackers


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Trains honestly on labels in reverse order, y → C − 1 − y.

    The C classes are those of the whole federation, in ascending order: label c_i becomes c_{C−1−i}. When to use it:
    poisoned data, which leave the update itself well formed. Examples must be tuples whose last entry is the label.
    The data set itself stays as it is, and so do the counts of classes that are logged: they are the true labels.

    Args:
        clients: see :class:`~lightning_fedbayes.adversaries.Attack`.

    Raises:
        FederationError: ``clients`` cannot be used; before training, if the data have no integer labels.
    """

    clients: Attackers


def flip_labels(labels: Tensor, classes: Sequence[int]) -> Tensor:
    """Each label replaced by its mirror image among ``classes``.

    Args:
        labels: integers, any shape; those that are not among ``classes`` stay.
        classes: ascending.

    Returns: shape and dtype of ``labels``.

    >>> flip_labels(torch.tensor([2, 5, 9, 2]), classes=(2, 5, 9))
    tensor([9, 5, 2, 9])
    """
    ascending = torch.tensor(classes, dtype=torch.int64, device=labels.device)
    given = labels.to(torch.int64)
    place = torch.searchsorted(ascending, given).clamp_max(len(ascending) - 1)
    return torch.where(ascending[place] == given, ascending.flip(0)[place], given).to(labels.dtype)
