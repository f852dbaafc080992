"""Posteriors of networks that train as they always do: by the curvature of the loss, by the path, or in one shot."""

from lightning_fedbayes.modules.sources.curvature.diagonal import SWAG as SWAG
from lightning_fedbayes.modules.sources.curvature.diagonal import Curvature as Curvature
from lightning_fedbayes.modules.sources.curvature.diagonal import Laplace as Laplace
from lightning_fedbayes.modules.sources.curvature.diagonal import Source as Source
from lightning_fedbayes.modules.sources.curvature.diagonal import chosen_parameters as chosen_parameters
from lightning_fedbayes.modules.sources.curvature.kronecker import KroneckerLaplace as KroneckerLaplace
from lightning_fedbayes.modules.sources.curvature.kronecker import KroneckerPosterior as KroneckerPosterior
from lightning_fedbayes.modules.sources.curvature.kronecker import KroneckerSite as KroneckerSite
from lightning_fedbayes.modules.sources.curvature.linearised import draws_of_outputs as draws_of_outputs
from lightning_fedbayes.modules.sources.curvature.linearised import linearised_outputs as linearised_outputs
