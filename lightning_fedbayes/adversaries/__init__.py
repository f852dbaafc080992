"""Clients that attack: what they would have sent in, what they send out."""

from lightning_fedbayes.adversaries.assignment import assign
from lightning_fedbayes.adversaries.base import Attack, Knowledge, UpdateAttack
from lightning_fedbayes.adversaries.collusion import (
    ALittleIsEnough,
    InnerProductManipulation,
    largest_unnoticed_shift,
)
from lightning_fedbayes.adversaries.honest import HonestMoments
from lightning_fedbayes.adversaries.labels import LabelFlip, flip_labels
from lightning_fedbayes.adversaries.updates import RandomUpdate, ScaledUpdate, SignFlip
from lightning_fedbayes.adversaries.vectors import GaussianVector, NotANumber

__all__ = [
    "ALittleIsEnough",
    "Attack",
    "GaussianVector",
    "HonestMoments",
    "InnerProductManipulation",
    "Knowledge",
    "LabelFlip",
    "NotANumber",
    "RandomUpdate",
    "ScaledUpdate",
    "SignFlip",
    "UpdateAttack",
    "assign",
    "flip_labels",
    "largest_unnoticed_shift",
]
