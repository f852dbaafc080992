"""All clients of a round at once: one step of a stack of networks in place of one step of each."""

from lightning_fedbayes.training.vectorized.engine import VectorizedEngine
from lightning_fedbayes.training.vectorized.probe import probe

__all__ = ["VectorizedEngine", "probe"]
