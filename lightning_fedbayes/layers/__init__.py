"""Bayesian layers: pure functions, one file per kind of layer, and the reading and loading of posteriors."""

from lightning_fedbayes.layers.base import BayesianLayer, GaussianParameter
from lightning_fedbayes.layers.conv import (
    Conv1dFlipout,
    Conv1dLocalReparameterization,
    Conv1dReparameterization,
    Conv2dFlipout,
    Conv2dLocalReparameterization,
    Conv2dReparameterization,
    Conv3dFlipout,
    Conv3dLocalReparameterization,
    Conv3dReparameterization,
    ConvTranspose1dFlipout,
    ConvTranspose1dLocalReparameterization,
    ConvTranspose1dReparameterization,
    ConvTranspose2dFlipout,
    ConvTranspose2dLocalReparameterization,
    ConvTranspose2dReparameterization,
    ConvTranspose3dFlipout,
    ConvTranspose3dLocalReparameterization,
    ConvTranspose3dReparameterization,
)
from lightning_fedbayes.layers.convert import bayesianize
from lightning_fedbayes.layers.dropout import MCDropout, with_mc_dropout
from lightning_fedbayes.layers.functional import ESTIMATORS, Estimator
from lightning_fedbayes.layers.linear import LinearFlipout, LinearLocalReparameterization, LinearReparameterization
from lightning_fedbayes.layers.posterior_view import PosteriorView, gaussian_parameters, load_posterior, read_posterior
from lightning_fedbayes.layers.priors import NormalPrior, Prior, ScaleMixturePrior, TiedMeanPrior
from lightning_fedbayes.layers.reparameterized import Reparameterized
from lightning_fedbayes.layers.scaler import FederatedScaler
from lightning_fedbayes.layers.whole_network import evaluation_mode, kl_divergence, mean_only, set_prior, use_estimator

__all__ = [
    "ESTIMATORS",
    "BayesianLayer",
    "Conv1dFlipout",
    "Conv1dLocalReparameterization",
    "Conv1dReparameterization",
    "Conv2dFlipout",
    "Conv2dLocalReparameterization",
    "Conv2dReparameterization",
    "Conv3dFlipout",
    "Conv3dLocalReparameterization",
    "Conv3dReparameterization",
    "ConvTranspose1dFlipout",
    "ConvTranspose1dLocalReparameterization",
    "ConvTranspose1dReparameterization",
    "ConvTranspose2dFlipout",
    "ConvTranspose2dLocalReparameterization",
    "ConvTranspose2dReparameterization",
    "ConvTranspose3dFlipout",
    "ConvTranspose3dLocalReparameterization",
    "ConvTranspose3dReparameterization",
    "Estimator",
    "FederatedScaler",
    "GaussianParameter",
    "LinearFlipout",
    "LinearLocalReparameterization",
    "LinearReparameterization",
    "MCDropout",
    "NormalPrior",
    "PosteriorView",
    "Prior",
    "Reparameterized",
    "ScaleMixturePrior",
    "TiedMeanPrior",
    "bayesianize",
    "evaluation_mode",
    "gaussian_parameters",
    "kl_divergence",
    "load_posterior",
    "mean_only",
    "read_posterior",
    "set_prior",
    "use_estimator",
    "with_mc_dropout",
]
