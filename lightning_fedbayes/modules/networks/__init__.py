"""Ready networks, deterministic: make them Bayesian with :func:`~lightning_fedbayes.bayesianize`."""

from lightning_fedbayes.modules.networks.lenet import lenet
from lightning_fedbayes.modules.networks.mlp import mlp
from lightning_fedbayes.modules.networks.resnet import resnet20

__all__ = ["lenet", "mlp", "resnet20"]
