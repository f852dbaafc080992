"""Training of the clients of a round: engines, resident model, batches, and the rounds of a federation."""

from lightning_fedbayes.clients.federation import Federation
from lightning_fedbayes.clients.loader import FederatedLoader, federated_loader
from lightning_fedbayes.clients.setup import make_federation

__all__ = ["FederatedLoader", "Federation", "federated_loader", "make_federation"]
