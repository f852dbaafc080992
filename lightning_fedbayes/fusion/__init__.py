"""Posterior fusion: rules by name, and the function that applies them."""

from lightning_fedbayes.fusion.accumulator import FusionAccumulator, fuse
from lightning_fedbayes.fusion.averages import LogVarianceAverage, WassersteinBarycenter, WeightedAverage, WeightedSum
from lightning_fedbayes.fusion.cohort import Cohort, Fused, Memory
from lightning_fedbayes.fusion.pools import GaussianFit, LinearPool
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
from lightning_fedbayes.fusion.rule import FusionRule, JudgingRule, Statistics, SumRule

__all__ = [
    "Cohort",
    "Conflation",
    "DistributedWeightConsolidation",
    "Fused",
    "FusionAccumulator",
    "FusionRule",
    "GaussianFit",
    "JudgingRule",
    "LinearPool",
    "LogVarianceAverage",
    "Memory",
    "ReverseKLBarycenter",
    "Statistics",
    "SumRule",
    "WassersteinBarycenter",
    "WeightedAverage",
    "WeightedConflation",
    "WeightedSum",
    "available_fusions",
    "fuse",
    "get_rule",
    "register_fusion",
    "rule_name",
    "unregister_fusion",
]
