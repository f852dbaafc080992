"""Posteriors of networks that train as they always do: by the curvature of the loss, by the path, or in one shot."""

from lightning_fedbayes.curvature.diagonal import SWAG, Curvature, Laplace, Source, Task, chosen_parameters
from lightning_fedbayes.curvature.kronecker import KroneckerLaplace, KroneckerPosterior, KroneckerSite

__all__ = [
    "SWAG",
    "Curvature",
    "KroneckerLaplace",
    "KroneckerPosterior",
    "KroneckerSite",
    "Laplace",
    "Source",
    "Task",
    "chosen_parameters",
]
