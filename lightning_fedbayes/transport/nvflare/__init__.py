"""Federations across organisations, by NVIDIA FLARE: ``pip install lightning-fedbayes[nvflare]``.

The same clients, rounds and fusion rules as :class:`~lightning_fedbayes.FederatedBayes`, in a client script of the
usual loop (``while flare.is_running()``) and a controller for FLARE's server. With the same seed both end at the same
posterior.
"""

try:
    import nvflare  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "lightning_fedbayes.transport.nvflare needs FLARE: pip install lightning-fedbayes[nvflare]", name="nvflare"
    ) from error

from lightning_fedbayes.transport.checkpoint import ServerState as ServerState
from lightning_fedbayes.transport.checkpoint import load_checkpoint as load_checkpoint
from lightning_fedbayes.transport.checkpoint import personal_posterior as personal_posterior
from lightning_fedbayes.transport.nvflare.client import FusionClient as FusionClient
from lightning_fedbayes.transport.nvflare.controller import FusionController as FusionController
from lightning_fedbayes.transport.nvflare.controller import FusionRecipe as FusionRecipe
