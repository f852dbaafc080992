"""Data sets as LightningDataModules, and the class labels and clients of any data set."""

from lightning_fedbayes.data.clients import ClientDatasets, Clients, clients_of, hold_out, labels_of
from lightning_fedbayes.data.splits import DiabetesDataModule, DigitsDataModule, SplitDataModule, TensorDataModule

__all__ = [
    "ClientDatasets",
    "Clients",
    "DiabetesDataModule",
    "DigitsDataModule",
    "SplitDataModule",
    "TensorDataModule",
    "clients_of",
    "hold_out",
    "labels_of",
]
