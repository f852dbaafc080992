"""LightningModules with Bayesian layers, and ready networks."""

from lightning_fedbayes.modules.bayesian_module import BayesianModule
from lightning_fedbayes.modules.classifier import ClassPrediction, HybridBayesianClassifier
from lightning_fedbayes.modules.networks import lenet, mlp
from lightning_fedbayes.modules.parameter_draws import draws_from_clients, draws_from_posterior, outputs_with
from lightning_fedbayes.modules.regressor import HybridBayesianRegressor, RegressionPrediction
from lightning_fedbayes.modules.sampling import is_stochastic, sample_outputs

__all__ = [
    "BayesianModule",
    "ClassPrediction",
    "HybridBayesianClassifier",
    "HybridBayesianRegressor",
    "RegressionPrediction",
    "draws_from_clients",
    "draws_from_posterior",
    "is_stochastic",
    "lenet",
    "mlp",
    "outputs_with",
    "sample_outputs",
]
