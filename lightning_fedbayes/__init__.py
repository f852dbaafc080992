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
    CIFAR10DataModule,
    ClientDatasets,
    DiabetesDataModule,
    DigitsDataModule,
    FashionMNISTDataModule,
    HospitalsDataModule,
    MNISTDataModule,
    SVHNDataModule,
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
from lightning_fedbayes.layers import bayesianize, kl_divergence, load_posterior, read_posterior, with_mc_dropout
from lightning_fedbayes.modules import (
    BayesianLinearRegression,
    BayesianModule,
    DeepEnsembleRegressor,
    HybridBayesianClassifier,
    HybridBayesianRegressor,
)
from lightning_fedbayes.partition import ClassPartition, DirichletPartition, IIDPartition, SizesPartition
from lightning_fedbayes.posterior import GaussianPosterior
from lightning_fedbayes.privacy import ExamplePrivacy, UpdatePrivacy, epsilon_of, noise_multiplier_for
from lightning_fedbayes.processes import ClientParallelStrategy

__all__ = [
    "ALittleIsEnough",
    "AutoFusion",
    "BayesianLinearRegression",
    "BayesianModule",
    "CIFAR10DataModule",
    "ClassPartition",
    "ClientDatasets",
    "ClientParallelStrategy",
    "ConversionError",
    "DeepEnsembleRegressor",
    "DiabetesDataModule",
    "DigitsDataModule",
    "DirichletPartition",
    "ExamplePrivacy",
    "FashionMNISTDataModule",
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
    "MNISTDataModule",
    "NotANumber",
    "PartitionError",
    "PosteriorError",
    "RandomUpdate",
    "Reliability",
    "SVHNDataModule",
    "ScaledUpdate",
    "SignFlip",
    "SizesPartition",
    "UCIDataModule",
    "UncertaintyReport",
    "UpdatePrivacy",
    "available_fusions",
    "bayesianize",
    "epsilon_of",
    "fuse",
    "kl_divergence",
    "load_posterior",
    "noise_multiplier_for",
    "read_posterior",
    "register_fusion",
    "with_mc_dropout",
]
