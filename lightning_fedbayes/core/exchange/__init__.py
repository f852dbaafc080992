"""Collective operations of the processes that share the clients of a federation's rounds; no Lightning."""

from lightning_fedbayes.core.exchange.collective import ALONE, Collective, OneProcess
from lightning_fedbayes.core.exchange.reduction import Reduction, merge_statistics

__all__ = ["ALONE", "Collective", "OneProcess", "Reduction", "merge_statistics"]
