"""Exact heads: a Gaussian posterior over the last layer of a network with frozen other layers."""

from lightning_fedbayes.modules.head.fit import HeadFit, HeadSlopes
from lightning_fedbayes.modules.head.head import BayesianHead
from lightning_fedbayes.modules.head.module import HeadModule

__all__ = ["BayesianHead", "HeadFit", "HeadModule", "HeadSlopes"]
