"""All clients of a round at once: one step of a stack of networks in place of one step of each."""

from lightning_fedbayes.clients.vectorized.engine import VectorizedEngine
from lightning_fedbayes.clients.vectorized.probe import probe

__all__ = ["VectorizedEngine", "probe"]
