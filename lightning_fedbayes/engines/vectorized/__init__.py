"""All clients of a round at once: one step of a stack of networks in place of one step of each."""

from lightning_fedbayes.engines.vectorized.engine import VectorizedEngine

__all__ = ["VectorizedEngine"]
