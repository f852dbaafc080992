"""Federated Bayesian deep learning inside one Lightning Trainer.

>>> import lightning_fedbayes as fb
>>> callback = fb.FederatedBayes(fb.DirichletPartition(clients=10, alpha=0.5), fusion="reverse_kl_barycenter")
"""

from importlib import import_module
from importlib.metadata import version
from sys import _getframe
from typing import TYPE_CHECKING, Any
from warnings import warn

if TYPE_CHECKING:  # a name is imported when it is first used, see __getattr__
    from lightning_fedbayes.callbacks import ClientReport, ExamplePrivacy, FederatedBayes, UncertaintyReport, check
    from lightning_fedbayes.callbacks.calibration import FederatedConformal, FederatedTemperature
    from lightning_fedbayes.clients.across import evaluate_across
    from lightning_fedbayes.clients.evaluation import choose_personal_weight, evaluate_clients
    from lightning_fedbayes.clients.privacy import UpdatePrivacy, noise_multiplier_for
    from lightning_fedbayes.clients.settings import Kept
    from lightning_fedbayes.core.errors import FedBayesError
    from lightning_fedbayes.core.messages import ClientUpdate
    from lightning_fedbayes.core.posterior import GaussianPosterior
    from lightning_fedbayes.data import ClientDatasets, DigitsDataModule, hold_out
    from lightning_fedbayes.data.partition import ClassPartition, DirichletPartition, IIDPartition, SizesPartition
    from lightning_fedbayes.fusion import available_fusions, fuse, register_fusion
    from lightning_fedbayes.layers import (
        FederatedScaler,
        bayesianize,
        kl_divergence,
        load_posterior,
        read_posterior,
        with_mc_dropout,
    )
    from lightning_fedbayes.methods import Method, Sites, register_method, remove_client
    from lightning_fedbayes.modules import (
        BayesianHead,
        BayesianLinearRegression,
        BayesianModule,
        Bernoulli,
        Categorical,
        Cox,
        CoxRegressor,
        Gaussian,
        HeadModule,
        HierarchicalLinearRegression,
        HybridBayesianClassifier,
        HybridBayesianRegressor,
        PosteriorPredictive,
        mean_network,
        with_kl,
    )
    from lightning_fedbayes.modules.sources.curvature import SWAG, KroneckerLaplace, Laplace
    from lightning_fedbayes.modules.sources.ivon import IVON
    from lightning_fedbayes.server import Asynchronous, Delays, Safeguards, Server
    from lightning_fedbayes.server.plan import RoundPlan

__all__ = [
    "IVON",
    "SWAG",
    "Asynchronous",
    "BayesianHead",
    "BayesianLinearRegression",
    "BayesianModule",
    "Bernoulli",
    "Categorical",
    "ClassPartition",
    "ClientDatasets",
    "ClientReport",
    "ClientUpdate",
    "Cox",
    "CoxRegressor",
    "Delays",
    "DigitsDataModule",
    "DirichletPartition",
    "ExamplePrivacy",
    "FedBayesError",
    "FederatedBayes",
    "FederatedConformal",
    "FederatedScaler",
    "FederatedTemperature",
    "Gaussian",
    "GaussianPosterior",
    "HeadModule",
    "HierarchicalLinearRegression",
    "HybridBayesianClassifier",
    "HybridBayesianRegressor",
    "IIDPartition",
    "Kept",
    "KroneckerLaplace",
    "Laplace",
    "Method",
    "PosteriorPredictive",
    "RoundPlan",
    "Safeguards",
    "Server",
    "Sites",
    "SizesPartition",
    "UncertaintyReport",
    "UpdatePrivacy",
    "available_fusions",
    "bayesianize",
    "check",
    "choose_personal_weight",
    "evaluate_across",
    "evaluate_clients",
    "fuse",
    "hold_out",
    "kl_divergence",
    "load_posterior",
    "mean_network",
    "noise_multiplier_for",
    "read_posterior",
    "register_fusion",
    "register_method",
    "remove_client",
    "with_kl",
    "with_mc_dropout",
]

_ROOMS = (
    *("core.errors", "core.posterior", "core.messages", "fusion", "methods", "server.plan", "server"),
    *("modules.sources.ivon", "clients.privacy", "layers", "modules.sources.curvature", "data.partition", "data"),
    *("modules", "clients.settings", "clients.evaluation", "clients.across", "callbacks.calibration", "callbacks"),
)
"""Rooms that the public names come from, those first that need no Lightning and little else."""

_MOVED = {
    "callbacks.trainer": "ClientParallelStrategy",
    "clients.evaluation": "ClientScores",
    "clients.learned": "LearnedPosterior PosteriorSource",
    "clients.privacy": "epsilon_of",
    "clients.settings": "FederationSettings",
    "core.errors": "ConversionError FederationError FusionError PartitionError PosteriorError",
    "core.messages": "ClientFailure",
    "data": "DiabetesDataModule",
    "fusion": "AutoFusion Reliability",
    "methods": "Averaging Ditto FedAsync FedBuff FedNova FedProx LocalProblem Participant Population Quadratic Report "
    "Scaffold Shared Sums Trained",
    "modules": "DeepEnsembleRegressor HeadFit HeadSlopes LinearStatistics",
    "server": "RoundResult",
}
"""Room → names of it that version 0.2 had at the top, which warn until version 0.4."""


def __getattr__(name: str) -> Any:
    """Import a public name, or a room, when it is first used: ``fedbayes --help`` needs neither torch nor Lightning."""
    for room, names in _MOVED.items():
        # jsonargparse tries where a class can be found, to write the shortest path into a file
        if name in names.split() and _getframe(1).f_code.co_name != "get_import_path":
            warn(f"fb.{name} has moved: write fb.{room}.{name}; version 0.4 lacks it", FutureWarning, stacklevel=2)
            return getattr(import_module(f"{__name__}.{room}"), name)
    found = None
    if name == "__version__":
        found = version("lightning-fedbayes")
    elif name in __all__:
        rooms = (import_module(f"{__name__}.{room}") for room in _ROOMS)
        found = next(vars(room)[name] for room in rooms if name in vars(room))
    elif not name.startswith("_"):
        try:
            found = import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    if found is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the names of this module, those that are not imported yet among them."""
    return sorted({*globals(), *__all__})
