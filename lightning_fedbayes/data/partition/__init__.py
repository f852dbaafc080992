"""Partitions of one data set over simulated clients: from labels and a seed to the indices of each client."""

from lightning_fedbayes.data.partition.base import (
    IIDPartition,
    LabelPartition,
    Partition,
    SizesPartition,
    Split,
    counts_table,
)
from lightning_fedbayes.data.partition.label_skew import ClassPartition, DirichletPartition

__all__ = [
    "ClassPartition",
    "DirichletPartition",
    "IIDPartition",
    "LabelPartition",
    "Partition",
    "SizesPartition",
    "Split",
    "counts_table",
]
