"""How the clients of a round are trained."""

from lightning_fedbayes.engines.sequential import Client, SequentialEngine

__all__ = ["Client", "SequentialEngine"]
