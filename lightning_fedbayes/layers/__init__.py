"""Bayesian layers: a functional core, one file per kind of layer, and the reading and loading of posteriors."""

from lightning_fedbayes.layers.base import BayesianLayer, Site
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
)
from lightning_fedbayes.layers.conv_transpose import (
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
from lightning_fedbayes.layers.kl import kl_divergence, set_prior
from lightning_fedbayes.layers.linear import LinearFlipout, LinearLocalReparameterization, LinearReparameterization
from lightning_fedbayes.layers.priors import NormalPrior, Prior, ScaleMixturePrior, TiedMeanPrior
from lightning_fedbayes.layers.reparameterized import Reparameterized
from lightning_fedbayes.layers.sites import PosteriorView, gaussian_sites, load_posterior, read_posterior
from lightning_fedbayes.layers.switch import mean_only, use_estimator

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
    "LinearFlipout",
    "LinearLocalReparameterization",
    "LinearReparameterization",
    "MCDropout",
    "NormalPrior",
    "PosteriorView",
    "Prior",
    "Reparameterized",
    "ScaleMixturePrior",
    "Site",
    "TiedMeanPrior",
    "bayesianize",
    "gaussian_sites",
    "kl_divergence",
    "load_posterior",
    "mean_only",
    "read_posterior",
    "set_prior",
    "use_estimator",
    "with_mc_dropout",
]
