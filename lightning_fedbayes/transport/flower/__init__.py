"""Federations across organisations, by Flower: ``pip install lightning-fedbayes[flower]``.

The same clients, rounds and fusion rules as :class:`~lightning_fedbayes.FederatedBayes`, with every client on its
own machine: Flower carries posteriors, each client trains with a Lightning Trainer, the server fuses. With the same
seed both end at the same posterior.
"""

try:
    import flwr  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "lightning_fedbayes.transport.flower needs Flower: pip install lightning-fedbayes[flower]", name="flwr"
    ) from error

from lightning_fedbayes.transport.checkpoint import ServerState as ServerState
from lightning_fedbayes.transport.checkpoint import load_checkpoint as load_checkpoint
from lightning_fedbayes.transport.checkpoint import personal_posterior as personal_posterior
from lightning_fedbayes.transport.flower.apps import client_app as client_app
from lightning_fedbayes.transport.flower.apps import initial_arrays as initial_arrays
from lightning_fedbayes.transport.flower.apps import server_app as server_app
from lightning_fedbayes.transport.flower.strategy import FusionStrategy as FusionStrategy
