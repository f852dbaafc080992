"""Class labels of a data set, without touching its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

ATTRIBUTES = ("targets", "labels", "y")


def labels_of(dataset: Dataset[Any]) -> Tensor | None:
    """Integer class label of every example, or None where they cannot be known cheaply.

    Looks for an attribute ``targets``, ``labels`` or ``y`` (torchvision's data sets have one), takes the last tensor
    of a TensorDataset, and looks into Subset and ConcatDataset. Examples are never loaded, so no image is decoded.
    Anything but one integer per example (continuous targets, masks, names) is None.

    Returns: integers, shape (examples,), in the order of the data set; or None.

    >>> data = TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 2, 1]))
    >>> labels_of(Subset(data, [3, 2]))
    tensor([1, 2])
    """
    if isinstance(dataset, Subset):
        labels = labels_of(dataset.dataset)
        return None if labels is None else labels[torch.as_tensor(dataset.indices, dtype=torch.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [labels_of(part) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return torch.cat(known) if len(known) == len(parts) else None
    if isinstance(dataset, TensorDataset):
        return _as_labels(dataset.tensors[-1], len(dataset))
    for name in ATTRIBUTES:
        labels = _as_labels(getattr(dataset, name, None), len(dataset))  # type: ignore[arg-type]
        if labels is not None:
            return labels
    return None


def _as_labels(values: Any, length: int) -> Tensor | None:
    """``values`` as a vector of ``length`` integers, or None if they are something else."""
    try:
        labels = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):  # names, ragged lists, methods, None
        return None
    if labels.shape != (length,) or labels.is_floating_point() or labels.is_complex():
        return None
    return labels
