"""Deal one data set out to simulated clients: labels and a seed in, index lists out."""

from lightning_fedbayes.partition.base import LabelPartition, Partition
from lightning_fedbayes.partition.classes import ClassPartition
from lightning_fedbayes.partition.dirichlet import DirichletPartition
from lightning_fedbayes.partition.iid import IIDPartition
from lightning_fedbayes.partition.sizes import SizesPartition
from lightning_fedbayes.partition.split import Split, counts_table

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
