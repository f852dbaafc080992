"""Posterior fusion: rules by name, and the function that applies them."""

from lightning_fedbayes.fusion.accumulator import FusionAccumulator, fuse
from lightning_fedbayes.fusion.auto import AutoFusion
from lightning_fedbayes.fusion.averages import (
    GaussianFit,
    LinearPool,
    LogVarianceAverage,
    WassersteinBarycenter,
    WeightedAverage,
    WeightedSum,
)
from lightning_fedbayes.fusion.gram import Gram, GramRule, gram_of
from lightning_fedbayes.fusion.inferred import InferredRule, InverseVarianceMLE, InverseVarianceVB, Reliability
from lightning_fedbayes.fusion.inverse_covariance import InverseCovarianceMLE, InverseCovarianceVB
from lightning_fedbayes.fusion.products import (
    AlphaBarycenter,
    Conflation,
    DistributedWeightConsolidation,
    HellingerBarycenter,
    ReverseKLBarycenter,
    WeightedConflation,
)
from lightning_fedbayes.fusion.registry import (
    available_fusions,
    get_rule,
    register_fusion,
    rule_name,
    unregister_fusion,
)
from lightning_fedbayes.fusion.robust import (
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
    NearestNeighbourMixing,
    NormClipping,
    Preaggregation,
    TrimmedMean,
)
from lightning_fedbayes.fusion.rule import Cohort, Fused, FusionRule, ReliabilityRule, RuleState, Statistics, SumRule
from lightning_fedbayes.fusion.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi, ServerOptimizer

__all__ = [
    "AlphaBarycenter",
    "AutoFusion",
    "Cohort",
    "Conflation",
    "CoordinateMedian",
    "DistributedWeightConsolidation",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "Fused",
    "FusionAccumulator",
    "FusionRule",
    "GaussianFit",
    "GeometricMedian",
    "Gram",
    "GramRule",
    "HellingerBarycenter",
    "InferredRule",
    "InverseCovarianceMLE",
    "InverseCovarianceVB",
    "InverseVarianceMLE",
    "InverseVarianceVB",
    "Krum",
    "LinearPool",
    "LogVarianceAverage",
    "MultiKrum",
    "NearestNeighbourMixing",
    "NormClipping",
    "Preaggregation",
    "Reliability",
    "ReliabilityRule",
    "ReverseKLBarycenter",
    "RuleState",
    "ServerOptimizer",
    "Statistics",
    "SumRule",
    "TrimmedMean",
    "WassersteinBarycenter",
    "WeightedAverage",
    "WeightedConflation",
    "WeightedSum",
    "available_fusions",
    "fuse",
    "get_rule",
    "gram_of",
    "register_fusion",
    "rule_name",
    "unregister_fusion",
]
