"""Bayesian layers: pure functions, one file per kind of layer, and the reading and loading of posteriors."""

from lightning_fedbayes.layers.affine import Conv1dFlipout as Conv1dFlipout
from lightning_fedbayes.layers.affine import Conv1dLocalReparameterization as Conv1dLocalReparameterization
from lightning_fedbayes.layers.affine import Conv1dReparameterization as Conv1dReparameterization
from lightning_fedbayes.layers.affine import Conv2dFlipout as Conv2dFlipout
from lightning_fedbayes.layers.affine import Conv2dLocalReparameterization as Conv2dLocalReparameterization
from lightning_fedbayes.layers.affine import Conv2dReparameterization as Conv2dReparameterization
from lightning_fedbayes.layers.affine import Conv3dFlipout as Conv3dFlipout
from lightning_fedbayes.layers.affine import Conv3dLocalReparameterization as Conv3dLocalReparameterization
from lightning_fedbayes.layers.affine import Conv3dReparameterization as Conv3dReparameterization
from lightning_fedbayes.layers.affine import ConvTranspose1dFlipout as ConvTranspose1dFlipout
from lightning_fedbayes.layers.affine import (
    ConvTranspose1dLocalReparameterization as ConvTranspose1dLocalReparameterization,
)
from lightning_fedbayes.layers.affine import ConvTranspose1dReparameterization as ConvTranspose1dReparameterization
from lightning_fedbayes.layers.affine import ConvTranspose2dFlipout as ConvTranspose2dFlipout
from lightning_fedbayes.layers.affine import (
    ConvTranspose2dLocalReparameterization as ConvTranspose2dLocalReparameterization,
)
from lightning_fedbayes.layers.affine import ConvTranspose2dReparameterization as ConvTranspose2dReparameterization
from lightning_fedbayes.layers.affine import ConvTranspose3dFlipout as ConvTranspose3dFlipout
from lightning_fedbayes.layers.affine import (
    ConvTranspose3dLocalReparameterization as ConvTranspose3dLocalReparameterization,
)
from lightning_fedbayes.layers.affine import ConvTranspose3dReparameterization as ConvTranspose3dReparameterization
from lightning_fedbayes.layers.affine import LinearFlipout as LinearFlipout
from lightning_fedbayes.layers.affine import LinearLocalReparameterization as LinearLocalReparameterization
from lightning_fedbayes.layers.affine import LinearReparameterization as LinearReparameterization
from lightning_fedbayes.layers.base import BayesianLayer as BayesianLayer
from lightning_fedbayes.layers.base import GaussianParameter as GaussianParameter
from lightning_fedbayes.layers.base import Reparameterized as Reparameterized
from lightning_fedbayes.layers.convert import MCDropout as MCDropout
from lightning_fedbayes.layers.convert import bayesianize as bayesianize
from lightning_fedbayes.layers.convert import with_mc_dropout as with_mc_dropout
from lightning_fedbayes.layers.functional import ESTIMATORS as ESTIMATORS
from lightning_fedbayes.layers.functional import Estimator as Estimator
from lightning_fedbayes.layers.posterior_view import PosteriorView as PosteriorView
from lightning_fedbayes.layers.posterior_view import evaluation_mode as evaluation_mode
from lightning_fedbayes.layers.posterior_view import gaussian_parameters as gaussian_parameters
from lightning_fedbayes.layers.posterior_view import kl_divergence as kl_divergence
from lightning_fedbayes.layers.posterior_view import load_posterior as load_posterior
from lightning_fedbayes.layers.posterior_view import mean_only as mean_only
from lightning_fedbayes.layers.posterior_view import read_posterior as read_posterior
from lightning_fedbayes.layers.posterior_view import set_prior as set_prior
from lightning_fedbayes.layers.posterior_view import use_estimator as use_estimator
from lightning_fedbayes.layers.priors import NormalPrior as NormalPrior
from lightning_fedbayes.layers.priors import Prior as Prior
from lightning_fedbayes.layers.priors import ScaleMixturePrior as ScaleMixturePrior
from lightning_fedbayes.layers.priors import TiedMeanPrior as TiedMeanPrior
from lightning_fedbayes.layers.scaler import FederatedScaler as FederatedScaler

__all__ = [n for n in dir() if n[0] != "_"]  # pyright: ignore[reportUnsupportedDunderAll]  # ExamplePrivacy reads it
