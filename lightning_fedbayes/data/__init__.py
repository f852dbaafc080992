"""Data sets as LightningDataModules, and the class labels and clients of any data set."""

from lightning_fedbayes.data.clients import ClientDatasets as ClientDatasets
from lightning_fedbayes.data.clients import Clients as Clients
from lightning_fedbayes.data.clients import clients_of as clients_of
from lightning_fedbayes.data.clients import hold_out as hold_out
from lightning_fedbayes.data.clients import labels_of as labels_of
from lightning_fedbayes.data.splits import DiabetesDataModule as DiabetesDataModule
from lightning_fedbayes.data.splits import DigitsDataModule as DigitsDataModule
from lightning_fedbayes.data.splits import SplitDataModule as SplitDataModule
