"""The server of a federation: it plans rounds, admits updates, guards, weighs and fuses them. No Lightning."""

from lightning_fedbayes.server.guard import USUAL, Safeguards
from lightning_fedbayes.server.schedule import Asynchronous, Delays
from lightning_fedbayes.server.server import HELD_OUT_LOSS, RoundResult, Scorer, Server
from lightning_fedbayes.server.weighting import KnownOverlap

__all__ = [
    "HELD_OUT_LOSS",
    "USUAL",
    "Asynchronous",
    "Delays",
    "KnownOverlap",
    "RoundResult",
    "Safeguards",
    "Scorer",
    "Server",
]
