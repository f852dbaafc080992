"""How the clients of a round are trained."""

from lightning_fedbayes.engines.client import Client
from lightning_fedbayes.engines.sequential import SequentialEngine

__all__ = ["Client", "SequentialEngine"]
