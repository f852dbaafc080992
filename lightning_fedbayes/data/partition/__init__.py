"""Partitions of one data set over simulated clients: from labels and a seed to the indices of each client."""

from lightning_fedbayes.data.partition.base import IIDPartition as IIDPartition
from lightning_fedbayes.data.partition.base import LabelPartition as LabelPartition
from lightning_fedbayes.data.partition.base import Partition as Partition
from lightning_fedbayes.data.partition.base import SizesPartition as SizesPartition
from lightning_fedbayes.data.partition.base import Split as Split
from lightning_fedbayes.data.partition.label_skew import ClassPartition as ClassPartition
from lightning_fedbayes.data.partition.label_skew import DirichletPartition as DirichletPartition
