"""LightningModules with Bayesian layers, and ready networks."""

from lightning_fedbayes.modules.bayesian_module import BayesianModule
from lightning_fedbayes.modules.classifier import ClassPrediction, HybridBayesianClassifier
from lightning_fedbayes.modules.networks import lenet, mlp
from lightning_fedbayes.modules.regressor import HybridBayesianRegressor, RegressionPrediction
from lightning_fedbayes.modules.sampling import is_stochastic, sample_outputs

__all__ = [
    "BayesianModule",
    "ClassPrediction",
    "HybridBayesianClassifier",
    "HybridBayesianRegressor",
    "RegressionPrediction",
    "is_stochastic",
    "lenet",
    "mlp",
    "sample_outputs",
]
