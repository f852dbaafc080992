"""Posteriors of networks that train as they always do: by the curvature of the loss, by the path, or in one shot."""

from lightning_fedbayes.modules.sources.curvature.diagonal import SWAG, Curvature, Laplace, Source, chosen_parameters
from lightning_fedbayes.modules.sources.curvature.kronecker import KroneckerLaplace, KroneckerPosterior, KroneckerSite
from lightning_fedbayes.modules.sources.curvature.linearised import draws_of_outputs, linearised_outputs

__all__ = [
    "SWAG",
    "Curvature",
    "KroneckerLaplace",
    "KroneckerPosterior",
    "KroneckerSite",
    "Laplace",
    "Source",
    "chosen_parameters",
    "draws_of_outputs",
    "linearised_outputs",
]
