"""Training of the clients of a round: engines, resident model, batches, and the rounds of a federation."""

from lightning_fedbayes.clients.federation import Federation as Federation
from lightning_fedbayes.clients.loader import FederatedLoader as FederatedLoader
from lightning_fedbayes.clients.loader import federated_loader as federated_loader
from lightning_fedbayes.clients.setup import make_federation as make_federation
