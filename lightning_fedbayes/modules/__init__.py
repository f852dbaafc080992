"""LightningModules with Bayesian layers, and ready networks."""

from lightning_fedbayes.metrics.likelihoods import (
    Bernoulli,
    Categorical,
    ClassPrediction,
    Cox,
    Gaussian,
    Likelihood,
    RegressionPrediction,
    SurvivalPrediction,
)
from lightning_fedbayes.modules.added_kl import with_kl
from lightning_fedbayes.modules.bayesian_module import BayesianModule, LikelihoodModule
from lightning_fedbayes.modules.deep_ensemble import DeepEnsembleRegressor
from lightning_fedbayes.modules.export import mean_network
from lightning_fedbayes.modules.head import BayesianHead, HeadFit, HeadModule, HeadSlopes
from lightning_fedbayes.modules.hierarchical import HierarchicalFit, HierarchicalLinearRegression
from lightning_fedbayes.modules.hybrid import CoxRegressor, HybridBayesianClassifier, HybridBayesianRegressor
from lightning_fedbayes.modules.linear_regression import BayesianLinearRegression, LinearStatistics
from lightning_fedbayes.modules.networks import lenet, mlp, resnet20
from lightning_fedbayes.modules.posterior_predictive import PosteriorPredictive
from lightning_fedbayes.modules.sampling import (
    draws_from_clients,
    draws_from_posterior,
    is_stochastic,
    outputs_with,
    sample_outputs,
)

__all__ = [
    "BayesianHead",
    "BayesianLinearRegression",
    "BayesianModule",
    "Bernoulli",
    "Categorical",
    "ClassPrediction",
    "Cox",
    "CoxRegressor",
    "DeepEnsembleRegressor",
    "Gaussian",
    "HeadFit",
    "HeadModule",
    "HeadSlopes",
    "HierarchicalFit",
    "HierarchicalLinearRegression",
    "HybridBayesianClassifier",
    "HybridBayesianRegressor",
    "Likelihood",
    "LikelihoodModule",
    "LinearStatistics",
    "PosteriorPredictive",
    "RegressionPrediction",
    "SurvivalPrediction",
    "draws_from_clients",
    "draws_from_posterior",
    "is_stochastic",
    "lenet",
    "mean_network",
    "mlp",
    "outputs_with",
    "resnet20",
    "sample_outputs",
    "with_kl",
]
