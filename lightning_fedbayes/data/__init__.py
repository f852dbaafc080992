"""Data sets as LightningDataModules, and the class labels and clients of any data set."""

from lightning_fedbayes.data.clients import ClientDatasets, Clients, clients_of, hold_out, labels_of
from lightning_fedbayes.data.hospitals import HospitalsDataModule
from lightning_fedbayes.data.images import (
    CIFAR10DataModule,
    FashionMNISTDataModule,
    ImageDataModule,
    MNISTDataModule,
    SVHNDataModule,
)
from lightning_fedbayes.data.offline import DiabetesDataModule, DigitsDataModule
from lightning_fedbayes.data.splits import SplitDataModule, TensorDataModule

__all__ = [
    "CIFAR10DataModule",
    "ClientDatasets",
    "Clients",
    "DiabetesDataModule",
    "DigitsDataModule",
    "FashionMNISTDataModule",
    "HospitalsDataModule",
    "ImageDataModule",
    "MNISTDataModule",
    "SVHNDataModule",
    "SplitDataModule",
    "TensorDataModule",
    "clients_of",
    "hold_out",
    "labels_of",
]
