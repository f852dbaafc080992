"""Data sets as LightningDataModules, and what a partition needs to know about any data set."""

from lightning_fedbayes.data.clients import ClientDatasets, Clients, clients_of
from lightning_fedbayes.data.diabetes import DiabetesDataModule
from lightning_fedbayes.data.digits import DigitsDataModule
from lightning_fedbayes.data.labels import labels_of
from lightning_fedbayes.data.tensors import TensorDataModule

__all__ = [
    "ClientDatasets",
    "Clients",
    "DiabetesDataModule",
    "DigitsDataModule",
    "TensorDataModule",
    "clients_of",
    "labels_of",
]
