"""Exact heads: a Gaussian posterior over the last layer of a network with frozen other layers."""

from lightning_fedbayes.modules.head.fit import HeadFit as HeadFit
from lightning_fedbayes.modules.head.fit import HeadSlopes as HeadSlopes
from lightning_fedbayes.modules.head.head import BayesianHead as BayesianHead
from lightning_fedbayes.modules.head.module import HeadModule as HeadModule
