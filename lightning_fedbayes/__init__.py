"""Federated Bayesian deep learning inside one Lightning Trainer.

>>> import lightning_fedbayes as fb
>>> callback = fb.FederatedBayes(fb.DirichletPartition(clients=10, alpha=0.5), fusion="reverse_kl_barycenter")
"""

from lightning_fedbayes.adversaries import (
    ALittleIsEnough,
    GaussianVector,
    InnerProductManipulation,
    LabelFlip,
    NotANumber,
    RandomUpdate,
    ScaledUpdate,
    SignFlip,
)
from lightning_fedbayes.callbacks import FederatedBayes, UncertaintyReport
from lightning_fedbayes.data import (
    ClientDatasets,
    DiabetesDataModule,
    DigitsDataModule,
    HospitalsDataModule,
    UCIDataModule,
)
from lightning_fedbayes.engines.selection import AutoFusion
from lightning_fedbayes.errors import (
    ConversionError,
    FedBayesError,
    FederationError,
    FusionError,
    PartitionError,
    PosteriorError,
)
from lightning_fedbayes.fusion import Reliability, available_fusions, fuse, register_fusion
from lightning_fedbayes.layers import bayesianize, kl_divergence, load_posterior, read_posterior
from lightning_fedbayes.modules import BayesianModule, HybridBayesianClassifier, HybridBayesianRegressor
from lightning_fedbayes.partition import ClassPartition, DirichletPartition, IIDPartition, SizesPartition
from lightning_fedbayes.posterior import GaussianPosterior

__all__ = [
    "ALittleIsEnough",
    "AutoFusion",
    "BayesianModule",
    "ClassPartition",
    "ClientDatasets",
    "ConversionError",
    "DiabetesDataModule",
    "DigitsDataModule",
    "DirichletPartition",
    "FedBayesError",
    "FederatedBayes",
    "FederationError",
    "FusionError",
    "GaussianPosterior",
    "GaussianVector",
    "HospitalsDataModule",
    "HybridBayesianClassifier",
    "HybridBayesianRegressor",
    "IIDPartition",
    "InnerProductManipulation",
    "LabelFlip",
    "NotANumber",
    "PartitionError",
    "PosteriorError",
    "RandomUpdate",
    "Reliability",
    "ScaledUpdate",
    "SignFlip",
    "SizesPartition",
    "UCIDataModule",
    "UncertaintyReport",
    "available_fusions",
    "bayesianize",
    "fuse",
    "kl_divergence",
    "load_posterior",
    "read_posterior",
    "register_fusion",
]
