"""Posterior fusion: rules by name, and the function that applies them."""

from lightning_fedbayes.fusion.accumulator import FusionAccumulator, fuse
from lightning_fedbayes.fusion.alpha import AlphaBarycenter, HellingerBarycenter
from lightning_fedbayes.fusion.averages import LogVarianceAverage, WassersteinBarycenter, WeightedAverage, WeightedSum
from lightning_fedbayes.fusion.cohort import Cohort, Fused, Memory
from lightning_fedbayes.fusion.geometric_median import GeometricMedian
from lightning_fedbayes.fusion.gram import Gram, gram_of
from lightning_fedbayes.fusion.gram_rule import GramRule
from lightning_fedbayes.fusion.inferred import InferredRule
from lightning_fedbayes.fusion.inverse_covariance import InverseCovarianceMLE, InverseCovarianceVB
from lightning_fedbayes.fusion.inverse_variance import InverseVarianceMLE, InverseVarianceVB
from lightning_fedbayes.fusion.krum import Krum, MultiKrum
from lightning_fedbayes.fusion.medians import CoordinateMedian, TrimmedMean
from lightning_fedbayes.fusion.nearest_neighbour_mixing import NearestNeighbourMixing
from lightning_fedbayes.fusion.norm_clipping import NormClipping
from lightning_fedbayes.fusion.pools import GaussianFit, LinearPool
from lightning_fedbayes.fusion.preaggregation import Preaggregation
from lightning_fedbayes.fusion.products import (
    Conflation,
    DistributedWeightConsolidation,
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
from lightning_fedbayes.fusion.reliability import Reliability
from lightning_fedbayes.fusion.rule import FusionRule, JudgingRule, Statistics, SumRule

__all__ = [
    "AlphaBarycenter",
    "Cohort",
    "Conflation",
    "CoordinateMedian",
    "DistributedWeightConsolidation",
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
    "JudgingRule",
    "Krum",
    "LinearPool",
    "LogVarianceAverage",
    "Memory",
    "MultiKrum",
    "NearestNeighbourMixing",
    "NormClipping",
    "Preaggregation",
    "Reliability",
    "ReverseKLBarycenter",
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
